"""ONNX Runtime over a graph that returns its past with the new tokens appended: for devices without in-place nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.manifest import Manifest
from paceline.core.model import Segment, Span
from paceline.edge.runtimes.base import TOP, Top
from paceline.edge.runtimes.onnx_step import Step

KV_TYPES = {"float32": np.float32, "float16": np.float16, "float64": np.float64}


class ConcatRuntime:
    """A step copies the past of its sessions out and what is new back: exact everywhere, slower with every token.

    A session's KV may lie in any row.
    """

    rows: Literal["any", "contiguous"] = "any"
    forks = True

    def __init__(self, session: Any, manifest: Manifest, rows: int, *, name: str, max_context: int) -> None:
        self.name = name
        self.multi_token_batch = manifest.multi_token_batch
        self.vocabulary_size = manifest.vocabulary_size
        self.max_context = max_context
        self.kv_slots = rows * max_context
        self._session = session
        self._top_k = manifest.top_k
        shape = (2 * manifest.layers, rows, manifest.kv_heads, max_context, manifest.head_dim)
        self._kv: NDArray[Any] = np.zeros(shape, KV_TYPES[manifest.kv_dtype])
        self._inputs = [f"{kind}.{layer}" for layer in range(manifest.layers) for kind in ("key", "value")]
        self._outputs = [name.replace(".", "_out.") for name in self._inputs]
        self._free = list(range(rows))

    def allocate(self, length: int) -> Span | None:
        if not self._free or length > self.max_context:
            return None
        return Span(self._free.pop(), 0, self.max_context)

    def free(self, span: Span) -> None:
        self._free.append(span.key)

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        self._kv[:, target.key, :, start:stop] = self._kv[:, source.key, :, start:stop]

    def move(self, from_row: int, to_row: int) -> None:
        """Never called where rows is `any`."""
        raise ValueError("this runtime's sessions may lie anywhere: nothing is to be moved")

    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        """One row of candidates for each segment that asks for one; ValueError where it asks for more."""
        step = Step(None, len(segments), max([len(segment.tokens) for segment in segments]), self._top_k)
        step.fill(segments, self.max_context)
        rows = [segment.span.key for segment in segments]
        past = int(step.starts.max())
        feeds = dict(zip(self._inputs, self._kv[:, rows, :, :past], strict=True))
        names = [*step.outputs, *self._outputs]
        step.top_logits, step.top_ids, *grown = self._session.run(names, {**step.inputs, **feeds})
        for row, (span, start, tokens, _) in enumerate(segments):
            count = len(tokens)
            for cache, values in zip(self._kv, grown, strict=True):
                cache[span.key, :, start : start + count] = values[row, :, past : past + count]
        return step.top(segments, width)
