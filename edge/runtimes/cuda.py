"""CUDA as a graph runtime needs it: one device and one stream; memory, copies and CUDA graphs, over `cuda-bindings`.

Addresses are integers. Nothing but NVIDIA's own bindings is needed: no torch, no CuPy.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import PacelineError, UserError
from paceline.core.extras import install


class CudaError(PacelineError):
    """A CUDA call failed; the message has its name and the driver's words."""


class Cuda:
    """A device with a stream of its own. Copies and graphs are asynchronous, in the order of the calls.

    UserError when there is no such device, or no `cuda-bindings`.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            from cuda.bindings import runtime as cuda
        except ImportError as error:
            how = install("jetson") if platform.machine() == "aarch64" else install("gpu")
            raise UserError(f"CUDA cannot be used without cuda-bindings, {error}: {how}") from None
        self._cuda: Any = cuda
        status, count = cuda.cudaGetDeviceCount()
        if status != cuda.cudaError_t.cudaSuccess:
            raise UserError(f"no CUDA device can be used: {self._words(status)}{self._advice(status)}")
        if index >= count:
            raise UserError(f"there is no cuda:{index}: this machine has {count} CUDA device(s)")
        self.index = index
        self.activate()
        self._allocated: list[int] = []
        self._pinned: list[int] = []
        self._stream = self._get(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
        self.stream = int(self._stream)

    def activate(self) -> None:
        """Makes the device the calling thread's."""
        self._do(self._cuda.cudaSetDevice(self.index))

    @property
    def architecture(self) -> str:
        """Such as sm_87."""
        kind = self._cuda.cudaDeviceAttr
        major = self._get(self._cuda.cudaDeviceGetAttribute(kind.cudaDevAttrComputeCapabilityMajor, self.index))
        minor = self._get(self._cuda.cudaDeviceGetAttribute(kind.cudaDevAttrComputeCapabilityMinor, self.index))
        return f"sm_{major}{minor}"

    @property
    def name(self) -> str:
        """The card's name."""
        return str(self._get(self._cuda.cudaGetDeviceProperties(self.index)).name.decode().rstrip("\0"))

    def free_memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device; on a Jetson that is the board's one memory."""
        free, total = self._all(self._cuda.cudaMemGetInfo())
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        """The address of `size` zeroed bytes, aligned to 256 at least."""
        address = int(self._get(self._cuda.cudaMalloc(size)))
        self._allocated.append(address)
        self._do(self._cuda.cudaMemsetAsync(address, 0, size, self._stream))
        return address

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Host memory that copies need not stage; it is there until `close`."""
        address = int(self._get(self._cuda.cudaHostAlloc(size, self._cuda.cudaHostAllocDefault)))
        self._pinned.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def upload(self, to: int, source: NDArray[np.uint8]) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._do(self._cuda.cudaMemcpyAsync(to, source.ctypes.data, source.nbytes, kind, self._stream))

    def download(self, to: NDArray[np.uint8], source: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._do(self._cuda.cudaMemcpyAsync(to.ctypes.data, source, to.nbytes, kind, self._stream))

    def copy_rows(self, to: int, source: int, width: int, pitch: int, height: int) -> None:
        """Copies `height` pieces of `width` bytes, `pitch` bytes from one to the next, within the device."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._do(self._cuda.cudaMemcpy2DAsync(to, pitch, source, pitch, width, height, kind, self._stream))

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        """What `work` puts on the stream, as a graph; nothing of it runs. CudaError when it cannot be captured."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._do(self._cuda.cudaStreamBeginCapture(self._stream, mode))
        try:
            work()
        finally:  # the stream is of no use until its capture ends, however that goes
            ended = self._cuda.cudaStreamEndCapture(self._stream)
        graph = self._get(ended)
        try:
            return CudaGraph(self, self._get(self._cuda.cudaGraphInstantiate(graph, 0)))
        finally:
            self._do(self._cuda.cudaGraphDestroy(graph))

    def launch(self, graph: Any) -> None:
        self._do(self._cuda.cudaGraphLaunch(graph, self._stream))

    def destroy(self, graph: Any) -> None:
        self._do(self._cuda.cudaGraphExecDestroy(graph))

    def synchronize(self) -> None:
        """Waits until the stream is empty."""
        self._do(self._cuda.cudaStreamSynchronize(self._stream))

    def close(self) -> None:
        """Gives back the stream and all memory; nothing that was made of them may be used afterwards."""
        self.synchronize()
        for address in self._allocated:
            self._do(self._cuda.cudaFree(address))
        for address in self._pinned:
            self._do(self._cuda.cudaFreeHost(address))
        self._allocated, self._pinned = [], []
        self._do(self._cuda.cudaStreamDestroy(self._stream))

    def _do(self, result: tuple[Any, ...]) -> None:
        self._all(result)

    def _get(self, result: tuple[Any, ...]) -> Any:
        return self._all(result)[0]

    def _all(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        error, *values = result
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise CudaError(f"CUDA: {self._words(error)}")
        return tuple(values)

    def _advice(self, error: Any) -> str:
        if error != self._cuda.cudaError_t.cudaErrorInsufficientDriver:
            return "; `paceline doctor` says more"
        return (
            ": there is no NVIDIA driver, or it is older than cuda-bindings (JetPack 6: pip install 'cuda-bindings<13')"
        )

    def _words(self, error: Any) -> str:
        return f"{self._cuda.cudaGetErrorString(error)[1].decode()} ({error.name})"


class CudaGraph:
    """Recorded work: launched as a whole, with the addresses and shapes it was recorded with."""

    def __init__(self, device: Cuda, graph: Any) -> None:
        self._device = device
        self._graph = graph

    def launch(self) -> None:
        self._device.launch(self._graph)

    def close(self) -> None:
        self._device.destroy(self._graph)
