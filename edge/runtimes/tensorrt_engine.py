"""An engine file in TensorRT's runtime: its profiles, and contexts that share one piece of memory for activations.

A context that a CUDA graph was recorded from must not be touched again, so each graph has a context of its own
(TensorRT's guide, "CUDA Graphs"); sharing the activations keeps them small. All of them run on one stream, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError, UserError
from paceline.edge.runtimes.cuda import Cuda
from paceline.edge.runtimes.tensorrt_library import logger_of
from paceline.edge.runtimes.tensorrt_steps import Profile


class TensorRtError(PacelineError):
    """TensorRT refused something; the message has its own words."""


class TensorRtEngine:
    """The engine in `path`. UserError when it cannot be loaded here."""

    def __init__(self, trt: Any, path: Path, cuda: Cuda) -> None:
        self._trt = trt
        self._cuda = cuda
        self._logger = logger_of(trt)
        self._logger.errors.clear()
        runtime = trt.Runtime(self._logger)
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise UserError(f"{path} cannot be loaded: {self._words('TensorRT gave no reason')}; build it again")
        self._runtime = runtime  # it must outlive its engines
        self._engine = engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        modes = {name: engine.get_tensor_mode(name) for name in names}
        self.inputs = frozenset(name for name, mode in modes.items() if mode == trt.TensorIOMode.INPUT)
        self.outputs = frozenset(names) - self.inputs
        shapes = [
            engine.get_tensor_profile_shape("input_ids", index)[-1] for index in range(engine.num_optimization_profiles)
        ]
        self.profiles = tuple(Profile(int(most[0]), int(most[1])) for most in shapes)
        self.activation_bytes = int(engine.device_memory_size_v2)
        self._activations = cuda.allocate(max(256, self.activation_bytes))

    def context(self, profile: int) -> TensorRtContext:
        """A context for shapes of one of `profiles`."""
        engine = self._engine
        context = engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise TensorRtError(f"no execution context could be made: {self._words('out of memory?')}")
        context.set_device_memory(self._activations, max(256, self.activation_bytes))
        if not context.set_optimization_profile_async(profile, self._cuda.stream):
            raise TensorRtError(f"optimisation profile {profile} was refused: {self._words('no reason given')}")
        return TensorRtContext(context, self._cuda.stream, self._words)

    def _words(self, otherwise: str) -> str:
        """TensorRT's errors since the last time."""
        words = "; ".join(self._logger.errors) or otherwise
        self._logger.errors.clear()
        return words


class TensorRtContext:
    """One execution context, bound to shapes and addresses."""

    def __init__(self, context: Any, stream: int, words: Callable[[str], str]) -> None:
        self._context = context
        self._stream = stream
        self._words = words

    def bind(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """shapes: of every input. addresses: of every input and output."""
        context = self._context
        refused = [name for name, shape in shapes.items() if not context.set_input_shape(name, shape)]
        refused += [name for name, address in addresses.items() if not context.set_tensor_address(name, address)]
        if refused:
            raise TensorRtError(f"{', '.join(sorted(refused))} could not be bound: {self._words('no reason given')}")

    def enqueue(self) -> None:
        """Puts one run on the stream."""
        context = self._context
        if not context.execute_async_v3(self._stream):
            raise TensorRtError(f"the engine did not run: {self._words('no reason given')}")
