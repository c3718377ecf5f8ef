"""The ONNX Runtime runtime: a bundle's graph over KV rows that it updates in place, nothing copied between steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.core.errors import PacelineError, UserError
from paceline.core.manifest import Manifest
from paceline.core.model import Segment, Span
from paceline.edge.runtimes.base import TOP, Runtime, Top
from paceline.edge.runtimes.bundle import GRAPH, open_bundle, row_bytes, rows_within
from paceline.edge.runtimes.onnx_concat import ConcatRuntime
from paceline.edge.runtimes.onnx_memory import DeviceRows, HostRows, RowMemory
from paceline.edge.runtimes.onnx_session import device_index, first_line, open_session
from paceline.edge.runtimes.onnx_step import Step

BINDINGS = 512  # kept: one for each (first row, rows, tokens) of late
INT64, ELEMENT_TYPES = 7, {"float32": 1, "float16": 10, "bfloat16": 16, "float64": 11}  # of onnx.TensorProto


def load(
    folder: str | Path,
    *,
    device: str = "cpu",
    provider: str | None = None,
    threads: int | None = None,
    max_context: int | None = None,
    max_sessions: int | None = None,
    kv_memory: int | None = None,
) -> Runtime:
    """The runtime of a bundle made for onnxruntime, whatever its graph's profile. UserError for what does not fit.

    max_context, max_sessions: default what the bundle was made for. kv_memory: bytes.
    """
    folder = Path(folder)
    asked = {"max_context": max_context, "max_sessions": max_sessions}
    manifest = open_bundle(folder, "onnxruntime", **asked, device=device)
    rows = rows_within(manifest, max_sessions or manifest.max_sessions, kv_memory)
    session = open_session(folder / GRAPH, device=device, provider=provider, threads=threads)
    context = max_context or manifest.max_context
    try:
        runtime: Runtime
        if manifest.profile == "concat":
            runtime = ConcatRuntime(session, manifest, rows, name=str(folder), max_context=context)
        else:
            memory = _memory(manifest, rows, device)
            runtime = OnnxRuntime(session, manifest, memory, rows, name=str(folder), max_context=context)
        # A node without a kernel shows, and a GPU's libraries load, in the first step only.
        runtime.forward([Segment(Span(0, 0, context), 0, [0], 1)])
    except MemoryError:
        raise UserError(
            f"no memory for {rows} KV rows of {row_bytes(manifest)} bytes each: lower max_sessions or kv_memory"
        ) from None
    except PacelineError:
        raise
    except Exception as error:  # the package's exceptions have no common root but this
        raise UserError(f"onnxruntime cannot run {folder / GRAPH} on {device}: {first_line(error)}") from error
    return runtime


def _memory(manifest: Manifest, rows: int, device: str) -> RowMemory:
    if device == "cpu":
        return HostRows(manifest, rows)
    from paceline.edge.runtimes.cuda import Cuda

    index = device_index(device)
    return DeviceRows(manifest, rows, Cuda(index), index)


class OnnxRuntime:
    """A graph that writes KV into the rows it is given. A batch is a window of neighbouring rows, bound by address.

    The rows a batch is to have are arranged in front of it (`ContiguousRows`): `span.key` is the row.
    """

    rows: Literal["any", "contiguous"] = "contiguous"
    forks = False

    def __init__(
        self, session: Any, manifest: Manifest, memory: RowMemory, rows: int, *, name: str, max_context: int
    ) -> None:
        self.name = name
        self.multi_token_batch = manifest.multi_token_batch
        self.vocabulary_size = manifest.vocabulary_size
        self.max_context = max_context
        self.kv_slots = rows * max_context
        self._session = session
        self._manifest = manifest
        self._memory = memory
        self._ends = [0] * rows  # where the last forward of each row ended
        self._step = lru_cache(BINDINGS)(self._bind)

    def allocate(self, length: int) -> Span | None:
        raise ValueError("rows are given out in front of this runtime")

    def free(self, span: Span) -> None:
        raise ValueError("rows are given out in front of this runtime")

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        raise ValueError("this runtime moves whole rows only")

    def move(self, from_row: int, to_row: int) -> None:
        """Copies what a row holds over another one."""
        self._memory.move(from_row, to_row, self._ends[from_row])
        self._ends[to_row] = self._ends[from_row]

    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        """One row of candidates for each segment that asks for one; ValueError where it asks for more."""
        tokens = max([len(segment.tokens) for segment in segments])
        padded_end = max([segment.start for segment in segments]) + tokens
        if len(segments) == 1 or padded_end <= self._manifest.max_context:
            return self._run(segments, tokens, width)
        tops = [self._run([segment], len(segment.tokens), width) for segment in segments]  # no padding beyond a row
        return Top(np.concatenate([top.ids for top in tops]), np.concatenate([top.logits for top in tops]))

    def _run(self, segments: Sequence[Segment], tokens: int, width: int) -> Top:
        if tokens > 1 and len(segments) > 1 and not self.multi_token_batch:
            raise ValueError(f"this graph takes one token a session in a batch, not {tokens}")
        step = self._step(segments[0].span.key, len(segments), tokens)
        step.fill(segments, self.max_context)
        for span, start, new, _ in segments:
            self._ends[span.key] = start + len(new)
        self._session.run_with_iobinding(step.binding)
        return step.top(segments, width)

    def _bind(self, first: int, rows: int, tokens: int) -> Step:
        """A step over rows `first … first + rows`, its arrays and the rows' addresses bound."""
        manifest, memory = self._manifest, self._memory
        binding = self._session.io_binding()
        step = Step(binding, rows, tokens, manifest.top_k)
        for name, array in step.inputs.items():
            binding.bind_input(name, "cpu", 0, INT64, array.shape, array.ctypes.data)
        for name, answer in step.outputs.items():
            binding.bind_output(name, "cpu", 0, answer.dtype.type, answer.shape, answer.ctypes.data)
        shape = (rows, manifest.kv_heads, manifest.max_context, manifest.head_dim)
        element = ELEMENT_TYPES[manifest.kv_dtype]
        for layer in range(manifest.layers):
            for cache, name in ((2 * layer, "key"), (2 * layer + 1, "value")):
                place = (memory.device, memory.index, element, shape, memory.address(cache, first))
                binding.bind_input(f"{name}.{layer}", *place)
                binding.bind_output(f"{name}_out.{layer}", *place)
        return step
