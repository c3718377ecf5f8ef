"""The emulated runtime: a numpy `PackedModel`, such as the toy language, in place of a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.core.model import PackedModel, Segment, Span
from paceline.edge.runtimes.base import TOP, Top, top_of


class EmulatedRuntime:
    """Wraps a model whose forward returns numpy rows; its pace, if it has one, is the model's own."""

    rows: Literal["any", "contiguous"] = "any"
    multi_token_batch = True

    def __init__(self, model: PackedModel, vocabulary_size: int | None = None) -> None:
        self.name = model.name
        self.vocabulary_size = min(vocabulary_size or model.vocabulary_size, model.vocabulary_size)
        self.max_context = model.max_context
        self.kv_slots = model.kv_slots
        self._model = model

    def allocate(self, length: int) -> Span | None:
        return self._model.allocate(length)

    def free(self, span: Span) -> None:
        self._model.free(span)

    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        logits = self._model.forward(segments)
        return top_of(logits[:, : self.vocabulary_size], width)

    def move(self, from_row: int, to_row: int) -> None:
        raise NotImplementedError("this runtime's sessions may lie anywhere")
