"""One step of a drafter's graph: the arrays it is given and those it answers in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.model import Segment
from paceline.edge.runtimes.base import Top


class Step:
    """The arrays of a step of one shape: what the graph is given and what it answers. binding: theirs, or None."""

    def __init__(self, binding: Any, rows: int, tokens: int, top_k: int) -> None:
        self.binding = binding
        self.ids = np.zeros((rows, tokens), np.int64)
        self.starts = np.zeros(rows, np.int64)
        self.last = np.zeros(rows, np.int64)
        self.top_logits = np.zeros((rows, top_k), np.float32)
        self.top_ids = np.zeros((rows, top_k), np.int64)
        self.inputs: dict[str, NDArray[np.int64]] = {
            "input_ids": self.ids,
            "past_lengths": self.starts,
            "logit_idx": self.last,
        }
        self.outputs: dict[str, NDArray[Any]] = {"top_logits": self.top_logits, "top_ids": self.top_ids}

    def fill(self, segments: Sequence[Segment], max_context: int) -> None:
        """What each row is given; what pads it is masked, and overwritten when its turn comes.

        ValueError for what no step of the graph can do.
        """
        for row, (_, start, tokens, wanted) in enumerate(segments):
            count = len(tokens)
            if wanted > 1:
                raise ValueError(f"this graph answers for one token a session, not for {wanted}")
            if start + count > max_context:
                raise ValueError(f"tokens up to {start + count} of a session with room for {max_context}")
            self.ids[row, :count] = tokens
            self.starts[row] = start
            self.last[row] = count - 1

    def top(self, segments: Sequence[Segment], width: int) -> Top:
        """The rows that are asked for, copied."""
        ids, logits = self.top_ids[:, :width], self.top_logits[:, :width]
        wanted = [row for row, segment in enumerate(segments) if segment.rows]
        if len(wanted) == len(segments):
            return Top(ids.copy(), logits.copy())
        return Top(ids[wanted], logits[wanted])
