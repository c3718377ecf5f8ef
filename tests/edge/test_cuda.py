"""The layer over cuda-bindings, on a fake of their runtime module: what is called, in which order, and what errors say.

That the names exist in the real bindings is held by tests/export/test_engine_api.py.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.edge.runtimes.cuda import Cuda, CudaError


class Status(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorStreamCaptureInvalidated = 901


VALUES = {
    "cudaGetDeviceCount": (2,),
    "cudaStreamCreateWithFlags": (77,),
    "cudaDeviceGetAttribute": (8,),
    "cudaGetDeviceProperties": (SimpleNamespace(name=b"Fake card"),),
    "cudaMemGetInfo": (3 << 30, 8 << 30),
    "cudaMalloc": (4096,),
    "cudaStreamEndCapture": ("graph",),
    "cudaGraphInstantiate": ("executable",),
    "cudaGetErrorString": (b"the driver's words",),
}


class FakeRuntime(ModuleType):
    """A fake of cuda.bindings.runtime: every call is noted, and succeeds unless it is in `failing`."""

    cudaError_t = Status

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, Status] = {}
        self.host = ctypes.create_string_buffer(64)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda") or name.endswith(("Attr", "Kind", "Mode", "Default", "NonBlocking")):
            return _Names(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            values = (ctypes.addressof(self.host),) if name == "cudaHostAlloc" else VALUES.get(name, ())
            return (self.failing.get(name, Status.cudaSuccess), *values)

        return call

    def taken(self) -> list[str]:
        """Names of the calls since the last time."""
        names = [name for name, *_ in self.calls]
        self.calls.clear()
        return names


class _Names(str):
    """An enumeration or a constant: whatever is asked of it has its name."""

    def __getattr__(self, name: str) -> str:
        return name


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    bindings: Any = ModuleType("cuda.bindings")
    bindings.runtime = runtime
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    return runtime


def test_a_device_its_memory_and_its_end(fake: FakeRuntime) -> None:
    cuda = Cuda(1)
    assert fake.taken() == ["cudaGetDeviceCount", "cudaSetDevice", "cudaStreamCreateWithFlags"]
    assert (cuda.stream, cuda.architecture, cuda.name) == (77, "sm_88", "Fake card")
    assert cuda.free_memory() == (3 << 30, 8 << 30)
    fake.taken()
    assert cuda.allocate(512) == 4096
    assert fake.calls == [("cudaMalloc", 512), ("cudaMemsetAsync", 4096, 0, 512, 77)]
    host = cuda.pinned(64)
    host[:3] = (1, 2, 3)
    assert fake.host.raw[:4] == b"\1\2\3\0" and host.dtype == np.uint8
    fake.taken()
    cuda.upload(4096, host[:16])
    cuda.download(host[16:32], 4096)
    cuda.copy_rows(4096, 8192, 256, 1024, 4)
    address = ctypes.addressof(fake.host)
    assert fake.calls == [
        ("cudaMemcpyAsync", 4096, address, 16, "cudaMemcpyHostToDevice", 77),
        ("cudaMemcpyAsync", address + 16, 4096, 16, "cudaMemcpyDeviceToHost", 77),
        ("cudaMemcpy2DAsync", 4096, 1024, 8192, 1024, 256, 4, "cudaMemcpyDeviceToDevice", 77),
    ]
    fake.taken()
    cuda.close()
    assert fake.taken() == ["cudaStreamSynchronize", "cudaFree", "cudaFreeHost", "cudaStreamDestroy"]


def test_a_graph_is_recorded_launched_and_destroyed(fake: FakeRuntime) -> None:
    cuda = Cuda()
    fake.taken()
    graph = cuda.capture(lambda: cuda.copy_rows(4096, 8192, 256, 1024, 4))
    graph.launch()
    graph.close()
    assert fake.taken() == [
        "cudaStreamBeginCapture",
        "cudaMemcpy2DAsync",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        "cudaGraphDestroy",
        "cudaGraphLaunch",
        "cudaGraphExecDestroy",
    ]


def test_a_capture_ends_even_where_its_work_fails(fake: FakeRuntime) -> None:
    cuda = Cuda()
    fake.taken()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cuda.capture(fail)
    assert fake.taken() == ["cudaStreamBeginCapture", "cudaStreamEndCapture"]
    fake.failing["cudaStreamEndCapture"] = Status.cudaErrorStreamCaptureInvalidated
    with pytest.raises(CudaError, match=r"CUDA: the driver's words \(cudaErrorStreamCaptureInvalidated\)"):
        cuda.capture(lambda: None)


def test_what_is_missing_is_said_in_one_sentence(fake: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"there is no cuda:2: this machine has 2 CUDA device"):
        Cuda(2)
    fake.failing["cudaGetDeviceCount"] = Status.cudaErrorInsufficientDriver
    with pytest.raises(UserError, match=r"no CUDA device can be used: .*older than cuda-bindings \(JetPack 6: "):
        Cuda()
    fake.failing["cudaGetDeviceCount"] = Status.cudaErrorNoDevice
    with pytest.raises(UserError, match=r"\(cudaErrorNoDevice\); `paceline doctor` says more"):
        Cuda()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for machine, extra in (("aarch64", "jetson"), ("x86_64", "gpu")):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        with pytest.raises(UserError, match=rf"without cuda-bindings, .*pip install -e '\.\[{extra}\]'"):
            Cuda()
