"""The torch runtime: a Hugging Face model through the packed forward, its top tokens picked on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.core.model import Segment
from paceline.edge.runtimes.base import TOP, PackedRuntime, Top


class TorchRuntime(PackedRuntime):
    """A model whose forward returns torch rows."""

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        logits = self._model.forward(segments)
        if not any(segment.rows for segment in segments):
            return Top(np.zeros((0, 1), np.int64), np.zeros((0, 1)))
        return _top_of(logits[:, : self.vocabulary_size], width)


def _top_of(logits: Any, width: int) -> Top:
    """Candidates of torch rows [R, V], on the host.

    topk promises no order among equal logits. They are rare, so they are looked for, at the cut too; where there
    are any, twice the width is fetched and sorted: ties go to the lowest id unless more than `width` tokens share
    the last logit.
    """
    if width == 1:
        values, ids = logits.max(dim=1, keepdim=True)  # the first of equal maxima, as documented
        return Top(ids.cpu().numpy(), values.cpu().numpy())
    values, ids = logits.topk(min(width + 1, logits.shape[1]), dim=1)
    host_values, host_ids = values.cpu().numpy(), ids.cpu().numpy()
    if not (host_values[:, 1:] == host_values[:, :-1]).any():
        return Top(host_ids[:, :width], host_values[:, :width])
    values, ids = logits.topk(min(2 * width, logits.shape[1]), dim=1)
    host_values, host_ids = values.cpu().numpy(), ids.cpu().numpy()
    order = np.lexsort((host_ids, -host_values))[:, :width]
    return Top(np.take_along_axis(host_ids, order, 1), np.take_along_axis(host_values, order, 1))
