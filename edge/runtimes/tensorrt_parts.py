"""What the TensorRT runtime stands on, as small interfaces; the real ones are `Cuda` and `TensorRtEngine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.edge.runtimes.tensorrt_steps import Profile


class Graph(Protocol):
    """Recorded work."""

    def launch(self) -> None: ...

    def close(self) -> None: ...


class Device(Protocol):
    """What the runtime needs of CUDA; `Cuda` in cuda.py is one."""

    def activate(self) -> None: ...

    def allocate(self, size: int) -> int: ...

    def pinned(self, size: int) -> NDArray[np.uint8]: ...

    def upload(self, to: int, source: NDArray[np.uint8]) -> None: ...

    def download(self, to: NDArray[np.uint8], source: int) -> None: ...

    def copy_rows(self, to: int, source: int, width: int, pitch: int, height: int) -> None: ...

    def capture(self, work: Callable[[], None]) -> Graph: ...

    def synchronize(self) -> None: ...


class Context(Protocol):
    """An engine's execution context; `TensorRtContext` is one."""

    def bind(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None: ...

    def enqueue(self) -> None: ...


class Engine(Protocol):
    """An engine and its optimisation profiles; `TensorRtEngine` is one."""

    @property
    def profiles(self) -> tuple[Profile, ...]: ...

    @property
    def inputs(self) -> frozenset[str]: ...

    @property
    def outputs(self) -> frozenset[str]: ...

    def context(self, profile: int) -> Context: ...
