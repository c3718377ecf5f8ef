"""Fakes of a GPU and of a TensorRT engine: the memory is an array, the engine ONNX Runtime on the bundle's own graph.

They hold the runtime to CUDA's and TensorRT's rules and fail where it breaks one: work is only done when the stream is
waited for, a graph repeats the addresses and shapes it was recorded with, a context is not touched once a graph was
recorded from it, addresses are aligned, shapes fit their profile, KV is updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.edge.runtimes.tensorrt_steps import Profile

TYPES = {"tensor(int64)": "int64", "tensor(float)": "float32", "tensor(float16)": "float16"}
BASE = 1 << 20  # addresses begin there, so that 0 and small numbers are never valid


class FakeGraph:
    """What was recorded, to be done again as it was."""

    def __init__(self, device: FakeDevice, work: list[Callable[[], None]]) -> None:
        self.closed = False
        self._device = device
        self._work = work

    def launch(self) -> None:
        assert not self.closed
        self._device.launches += 1
        self._device.queue.extend(self._work)

    def close(self) -> None:
        self.closed = True


class FakeDevice:
    """A device of `size` bytes and one stream. can_capture: whether recording works."""

    def __init__(self, size: int = 1 << 24, can_capture: bool = True) -> None:
        self.memory = np.zeros(size, np.uint8)
        self.queue: list[Callable[[], None]] = []
        self.recording: list[Callable[[], None]] | None = None
        self.can_capture = can_capture
        self.launches = 0
        self.captures = 0
        self.activated = self.is_closed = False
        self._used = 0

    def at(self, address: int, size: int) -> NDArray[np.uint8]:
        assert address >= BASE and address + size <= BASE + self._used, "outside of what was allocated"
        return self.memory[address - BASE : address - BASE + size]

    def put(self, work: Callable[[], None]) -> None:
        """On the stream, or into the recording."""
        (self.queue if self.recording is None else self.recording).append(work)

    def activate(self) -> None:
        self.activated = True

    def allocate(self, size: int) -> int:
        if self._used + size > len(self.memory):
            raise PacelineError("out of memory (fake)")
        address = BASE + self._used
        self._used += -(-size // 256) * 256
        return address

    def pinned(self, size: int) -> NDArray[np.uint8]:
        return np.zeros(size, np.uint8)

    def upload(self, to: int, source: NDArray[np.uint8]) -> None:
        self.put(lambda: np.copyto(self.at(to, source.nbytes), source))

    def download(self, to: NDArray[np.uint8], source: int) -> None:
        self.put(lambda: np.copyto(to, self.at(source, to.nbytes)))

    def copy_rows(self, to: int, source: int, width: int, pitch: int, height: int) -> None:
        assert self.activated and width <= pitch
        for row in range(height):
            pair = to + row * pitch, source + row * pitch
            self.put(lambda pair=pair: np.copyto(self.at(pair[0], width), self.at(pair[1], width)))  # type: ignore[misc]

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        if not self.can_capture:
            raise PacelineError("cannot be captured (fake)")
        self.captures += 1
        self.recording = []
        try:
            work()
            return FakeGraph(self, self.recording)
        finally:
            self.recording = None

    def close(self) -> None:
        self.is_closed = True

    def synchronize(self) -> None:
        assert self.recording is None
        while self.queue:
            self.queue.pop(0)()


class FakeEngine:
    """A graph in ONNX Runtime as an engine with these profiles."""

    def __init__(self, graph: Path, device: FakeDevice, profiles: tuple[Profile, ...]) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # it warns of each copy of a cache
        self.session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self.device = device
        self.profiles = profiles
        self.inputs = frozenset(each.name for each in self.session.get_inputs())
        self.outputs = frozenset(each.name for each in self.session.get_outputs())
        self.runs: list[tuple[int, int, int]] = []  # rows, tokens, address of key.0
        self.contexts: list[FakeContext] = []

    def context(self, profile: int) -> FakeContext:
        self.contexts.append(FakeContext(self, self.profiles[profile]))
        return self.contexts[-1]


class FakeContext:
    def __init__(self, engine: FakeEngine, most: Profile) -> None:
        self._engine = engine
        self._most = most
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._is_settled = False  # it ran with these shapes
        self._is_recorded = False

    def bind(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        assert not self._is_recorded, "a graph was recorded from this context"
        assert set(shapes) == self._engine.inputs
        assert set(addresses) == self._engine.inputs | self._engine.outputs
        assert all(address % 256 == 0 for address in addresses.values()), "not aligned"
        rows, tokens = shapes["input_ids"]
        assert 1 <= rows <= self._most.rows and 1 <= tokens <= self._most.tokens, "outside of the profile"
        for name in self._engine.inputs:
            if name.startswith(("key.", "value.")):
                assert addresses[name] == addresses[name.replace(".", "_out.")], "not in place"
        self._is_settled &= shapes == self._shapes
        self._shapes, self._addresses = dict(shapes), dict(addresses)

    def enqueue(self) -> None:
        device = self._engine.device
        if device.recording is not None:
            assert self._is_settled, "a new shape cannot be recorded before it ran once"
            self._is_recorded = True
        else:
            assert not self._is_recorded, "a graph was recorded from this context"
        self._is_settled = True
        shapes, addresses = self._shapes, self._addresses
        device.put(lambda: self._run(shapes, addresses))

    def _run(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        engine = self._engine
        engine.runs.append((*shapes["input_ids"], addresses["key.0"]))
        feeds = {
            each.name: self._array(each.type, shapes[each.name], addresses[each.name])
            for each in engine.session.get_inputs()
        }
        assert (feeds["past_lengths"] + shapes["input_ids"][1] <= feeds["key.0"].shape[2]).all(), "beyond the row"
        for each, value in zip(engine.session.get_outputs(), engine.session.run(None, feeds), strict=True):
            np.copyto(engine.device.at(addresses[each.name], value.nbytes).view(value.dtype), value.ravel())

    def _array(self, kind: str, shape: tuple[int, ...], address: int) -> NDArray[Any]:
        dtype = np.dtype(TYPES[kind])
        size = int(np.prod(shape)) * dtype.itemsize
        return self._engine.device.at(address, size).view(dtype).reshape(shape).copy()
