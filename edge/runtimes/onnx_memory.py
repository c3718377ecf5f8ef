"""KV rows of a graph runtime, on the host or on a CUDA device: the graph reads and writes them where they lie."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from paceline.core.manifest import Manifest
from paceline.edge.runtimes.bundle import ITEM_BYTES
from paceline.edge.runtimes.tensorrt_parts import Device


class RowMemory(Protocol):
    """Caches of `rows` rows each, zeroed: unwritten slots are read, too, if only to be masked.

    A row is [kv_heads, max_context, head_dim]. device, index: where it is, in ONNX Runtime's words.
    """

    device: str
    index: int

    def address(self, cache: int, row: int) -> int:
        """Where a row of a cache begins."""

    def move(self, from_row: int, to_row: int, length: int) -> None:
        """Copies the first `length` tokens of a row, in all caches."""


class HostRows:
    """Rows in the process' own memory; the system gives pages only to what is written."""

    device = "cpu"
    index = 0

    def __init__(self, manifest: Manifest, rows: int) -> None:
        shape = (2 * manifest.layers, rows, manifest.kv_heads, manifest.max_context)
        self._slots = np.zeros((*shape, manifest.head_dim * ITEM_BYTES[manifest.kv_dtype]), np.uint8)

    def address(self, cache: int, row: int) -> int:
        return int(self._slots[cache, row].ctypes.data)

    def move(self, from_row: int, to_row: int, length: int) -> None:
        self._slots[:, to_row, :, :length] = self._slots[:, from_row, :, :length]


class DeviceRows:
    """Rows on a CUDA device."""

    device = "cuda"

    def __init__(self, manifest: Manifest, rows: int, cuda: Device, index: int) -> None:
        self.index = index
        self._cuda = cuda
        self._heads = manifest.kv_heads
        self._slot_bytes = manifest.head_dim * ITEM_BYTES[manifest.kv_dtype]
        self._head_bytes = manifest.max_context * self._slot_bytes
        self._caches = [cuda.allocate(rows * self._heads * self._head_bytes) for _ in range(2 * manifest.layers)]
        cuda.synchronize()

    def address(self, cache: int, row: int) -> int:
        return self._caches[cache] + row * self._heads * self._head_bytes

    def move(self, from_row: int, to_row: int, length: int) -> None:
        self._cuda.activate()
        for cache in range(len(self._caches)):
            to, source = self.address(cache, to_row), self.address(cache, from_row)
            self._cuda.copy_rows(to, source, length * self._slot_bytes, self._head_bytes, self._heads)
        self._cuda.synchronize()  # the graph runs on another stream
