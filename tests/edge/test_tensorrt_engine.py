"""The adapter over TensorRT's runtime, on a fake of its module: what it asks for, what it says when it is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.edge.runtimes.tensorrt_engine import TensorRtEngine, TensorRtError
from paceline.edge.runtimes.tensorrt_steps import Profile

from .fake_cuda import FakeDevice

NAMES = {"input_ids": "in", "key.0": "in", "top_ids": "out", "key_out.0": "out"}


class FakeLogger:
    """A fake of trt.ILogger."""

    Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0, WARNING=2)


class FakeContext:
    """A fake of an execution context that refuses what is in `refused`."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.refused: set[str] = set()
        self.calls: list[tuple[Any, ...]] = []

    def set_device_memory(self, address: int, size: int) -> None:
        self.calls.append(("memory", address, size))

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.calls.append(("profile", index, stream))
        return index < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.calls.append(("shape", name, shape))
        return name not in self.refused

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.calls.append(("address", name, address))
        return name not in self.refused

    def execute_async_v3(self, stream: int) -> bool:
        self.calls.append(("execute", stream))
        return "execute" not in self.refused


class FakeEngine:
    """A fake of a deserialised engine."""

    num_io_tensors = len(NAMES)
    num_optimization_profiles = 2
    device_memory_size_v2 = 5000

    def get_tensor_name(self, index: int) -> str:
        return list(NAMES)[index]

    def get_tensor_mode(self, name: str) -> str:
        return NAMES[name]

    def get_tensor_profile_shape(self, name: str, index: int) -> list[list[int]]:
        return [[1, 1], [4, 1], [[8, 32], [1, 256]][index]]

    def create_execution_context(self, strategy: str) -> FakeContext | None:
        assert strategy == "user managed"
        return FakeContext(self)


class FakeTrt:
    """A fake of the module; content b"good" is an engine."""

    ILogger = FakeLogger
    TensorIOMode = SimpleNamespace(INPUT="in", OUTPUT="out")
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, content: bytes) -> FakeEngine | None:
            if content == b"good":
                return FakeEngine()
            self.logger.log(FakeLogger.Severity.ERROR, "the plan is of another version ")
            return None


class Device(FakeDevice):
    stream = 77


def loaded(tmp_path: Path, content: bytes = b"good") -> TensorRtEngine:
    path = tmp_path / "some.plan"
    path.write_bytes(content)
    return TensorRtEngine(FakeTrt, path, Device())  # type: ignore[arg-type]


def test_an_engine_tells_its_tensors_and_profiles(tmp_path: Path) -> None:
    engine = loaded(tmp_path)
    assert engine.inputs == {"input_ids", "key.0"} and engine.outputs == {"top_ids", "key_out.0"}
    assert engine.profiles == (Profile(8, 32), Profile(1, 256))


def test_contexts_share_the_memory_of_activations(tmp_path: Path) -> None:
    engine = loaded(tmp_path)
    contexts = [engine.context(1)._context, engine.context(0)._context]
    (address,) = {context.calls[0][1] for context in contexts}
    assert [context.calls for context in contexts] == [
        [("memory", address, 5000), ("profile", 1, 77)],
        [("memory", address, 5000), ("profile", 0, 77)],
    ]


def test_shapes_and_addresses_are_bound_and_run(tmp_path: Path) -> None:
    context = loaded(tmp_path).context(0)
    context._context.calls.clear()
    context.bind({"input_ids": (2, 4)}, {"input_ids": 512, "top_ids": 1024})
    context.enqueue()
    assert context._context.calls == [
        ("shape", "input_ids", (2, 4)),
        ("address", "input_ids", 512),
        ("address", "top_ids", 1024),
        ("execute", 77),
    ]


def test_refusals_are_told_in_tensorrts_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"some\.plan cannot be loaded: the plan is of another version; build it again"):
        loaded(tmp_path, b"bad")
    engine = loaded(tmp_path)
    with pytest.raises(TensorRtError, match="optimisation profile 2 was refused: no reason given"):
        engine.context(2)
    context = engine.context(0)
    context._context.refused = {"key.0", "execute"}
    engine._logger.log(FakeLogger.Severity.ERROR, "dimension 0 is too large")
    with pytest.raises(TensorRtError, match=r"key\.0 could not be bound: dimension 0 is too large"):
        context.bind({"key.0": (99, 1)}, {})
    with pytest.raises(TensorRtError, match="the engine did not run: no reason given"):
        context.enqueue()
