"""The memory of a TensorRT drafter: KV rows in one allocation, and one step's inputs and outputs side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import PacelineError, UserError
from paceline.core.manifest import Manifest
from paceline.edge.runtimes.bundle import ITEM_BYTES
from paceline.edge.runtimes.tensorrt_parts import Device

ALIGNMENT = 256  # bytes; what TensorRT asks of addresses


class KvRows:
    """The KV memory of all rows, key.0, value.0, key.1, … one after the other in one allocation."""

    def __init__(self, manifest: Manifest, rows: int, device: Device) -> None:
        self.row_shape = (manifest.kv_heads, manifest.max_context, manifest.head_dim)
        self.inputs = [f"{kind}.{layer}" for layer in range(manifest.layers) for kind in ("key", "value")]
        self._row_bytes = int(np.prod(self.row_shape)) * ITEM_BYTES[manifest.kv_dtype]
        if self._row_bytes % ALIGNMENT:
            raise UserError(
                f"{manifest.model.name}: a KV row of {self._row_bytes} bytes is no multiple of {ALIGNMENT}, so the"
                " next one would not be aligned: export with a --max-context that is a multiple of 64"
            )
        self._tensor_bytes = rows * self._row_bytes
        self._device = device
        size = self._tensor_bytes * len(self.inputs)
        try:
            self._base = device.allocate(size)
        except PacelineError as error:
            raise UserError(
                f"{manifest.model.name}: KV for {rows - 1} sessions and a spare row needs {size / 2**20:.0f} MiB"
                f" ({len(self.inputs)} tensors × {rows} rows × {self._row_bytes} bytes): {error};"
                " lower max_sessions or kv_memory, or export with a smaller --max-context"
            ) from None

    def addresses(self, first: int) -> dict[str, int]:
        """Of a window that starts at row `first`; outputs are the inputs, so that rows change in place."""
        found = {}
        for index, name in enumerate(self.inputs):
            address = self._base + index * self._tensor_bytes + first * self._row_bytes
            found[name] = found[name.replace(".", "_out.")] = address
        return found

    def move(self, from_row: int, to_row: int) -> None:
        source, to = (self._base + row * self._row_bytes for row in (from_row, to_row))
        self._device.copy_rows(to, source, self._row_bytes, self._tensor_bytes, len(self.inputs))


class StepMemory:
    """Pinned host memory and device memory for the inputs and outputs of any step, one step at a time.

    tokens: most in a step, all rows together. rows: most in a step. top: candidates of a row.
    """

    def __init__(self, device: Device, tokens: int, rows: int, top: int) -> None:
        self._top = top
        inputs = _aligned(tokens * 8) + 2 * _aligned(rows * 8)
        outputs = _aligned(rows * top * 4) + _aligned(rows * top * 8)
        self._inputs, self._outputs = device.pinned(inputs), device.pinned(outputs)
        self._inputs_address, self._outputs_address = device.allocate(inputs), device.allocate(outputs)
        self._views: dict[tuple[int, int], StepView] = {}

    def view(self, rows: int, tokens: int) -> StepView:
        """The memory laid out for a shape; the same object each time, as graphs hold its addresses."""
        if (rows, tokens) not in self._views:
            hosts = self._inputs, self._outputs
            self._views[rows, tokens] = StepView(
                hosts, (self._inputs_address, self._outputs_address), rows, tokens, self._top
            )
        return self._views[rows, tokens]


class StepView:
    """Arrays over the pinned memory, int64 but top_logits (float32), and the device's address of each tensor."""

    def __init__(
        self, hosts: tuple[NDArray[np.uint8], ...], bases: tuple[int, int], rows: int, tokens: int, top: int
    ) -> None:
        self.addresses: dict[str, int] = {}
        self.inputs_address, self.outputs_address = bases

        def place(side: int, offset: int, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[NDArray[Any], int]:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.addresses[name] = bases[side] + offset
            return hosts[side][offset : offset + size].view(dtype).reshape(shape), offset + _aligned(size)

        self.input_ids, end = place(0, 0, "input_ids", "int64", (rows, tokens))
        self.past_lengths, end = place(0, end, "past_lengths", "int64", (rows,))
        self.logit_idx, end = place(0, end, "logit_idx", "int64", (rows,))
        self.inputs = hosts[0][:end]
        self.top_logits, end = place(1, 0, "top_logits", "float32", (rows, top))
        self.top_ids, end = place(1, end, "top_ids", "int64", (rows, top))
        self.outputs = hosts[1][:end]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
