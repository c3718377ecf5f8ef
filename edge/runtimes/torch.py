"""The torch runtime: a Hugging Face model through the packed forward, its top tokens picked on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from paceline.core.model import PackedModel, Segment, Span
from paceline.edge.runtimes.base import TOP, Top


class TorchRuntime:
    """Wraps a `PackedModel` whose forward returns torch rows.

    vocabulary_size: the tokenizer's, where the model's rows have a padded tail; the tail is never proposed.
    """

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

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        logits = self._model.forward(segments)
        if not any(segment.rows for segment in segments):
            return Top(np.zeros((0, 1), np.int64), np.zeros((0, 1)))
        return _top_of(logits[:, : self.vocabulary_size], width)

    def move(self, from_row: int, to_row: int) -> None:
        raise NotImplementedError("this runtime's sessions may lie anywhere")


def _top_of(logits: Any, width: int) -> Top:
    """Candidates of torch rows [R, V], on the host.

    topk promises no order among equal logits, so twice the width is fetched and sorted again: ties go to the
    lowest id unless more than `width` tokens share the last logit.
    """
    if width == 1:
        values, ids = logits.max(dim=1, keepdim=True)  # the first of equal maxima, as documented
        return Top(ids.cpu().numpy(), values.cpu().numpy())
    values, ids = logits.topk(min(2 * width, logits.shape[1]), dim=1)
    host_values, host_ids = values.cpu().numpy(), ids.cpu().numpy()
    order = np.lexsort((host_ids, -host_values))[:, :width]
    return Top(np.take_along_axis(host_ids, order, 1), np.take_along_axis(host_values, order, 1))
