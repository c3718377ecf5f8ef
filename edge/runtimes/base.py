"""What executes a draft model: spans of KV memory, and forwards that return the likeliest tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.model import PackedModel, Segment, Span

TOP = 64  # a proposal is chosen among this many tokens


class Top(NamedTuple):
    """The likeliest tokens of each row, sorted by (−logit, id): ids int64 [R, ≤ 64], logits floats [R, ≤ 64]."""

    ids: NDArray[np.int64]
    logits: NDArray[np.floating[Any]]


class Runtime(Protocol):
    """A draft model that runs.

    rows: `any` when each session's KV may lie anywhere; `contiguous` when a batch must be neighbouring rows
        (then `ContiguousRows` in rows.py stands in front and does the moving).
    multi_token_batch: whether one batched forward takes several tokens a session.
    forks: whether `copy` takes KV from one span to another, so that several continuations of a session can be drafted.
    """

    name: str
    rows: Literal["any", "contiguous"]
    multi_token_batch: bool
    forks: bool
    vocabulary_size: int
    max_context: int  # longest session in tokens
    kv_slots: int  # token slots of all sessions together

    def allocate(self, length: int) -> Span | None:
        """A span for a session of at most `length` tokens; None when there is no room now."""

    def free(self, span: Span) -> None:
        """Gives a span back."""

    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        """One pass over all segments; one row of `width` candidates for each row that they ask for, in order."""

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        """Copies the KV of the tokens `start … stop` to the same places of another span; only where `forks`."""

    def move(self, from_row: int, to_row: int) -> None:
        """Copies a KV row over another one; only where `rows` is contiguous."""


class PackedRuntime:
    """A runtime over a `PackedModel` of numpy rows; sessions' KV may lie anywhere.

    vocabulary_size: the tokenizer's, where the model's rows have a padded tail; the tail is never proposed.
    """

    rows: Literal["any", "contiguous"] = "any"
    multi_token_batch = True
    forks = True

    def __init__(self, model: PackedModel, vocabulary_size: int | None = None) -> None:
        self.name = model.name
        self.vocabulary_size = min(vocabulary_size or model.vocabulary_size, model.vocabulary_size)
        self.max_context = model.max_context
        self.kv_slots = model.kv_slots
        self._model = model
        self.lap: Callable[[], None] | None = None  # to be called when the model is through

    def allocate(self, length: int) -> Span | None:
        return self._model.allocate(length)

    def free(self, span: Span) -> None:
        self._model.free(span)

    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        logits = self._model.forward(segments)
        if self.lap is not None:
            self.lap()
        return top_of(logits[:, : self.vocabulary_size], width)

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        self._model.copy(source, target, start, stop)

    def move(self, from_row: int, to_row: int) -> None:
        """Never called where rows is `any`."""
        raise ValueError("this runtime's sessions may lie anywhere: nothing is to be moved")


def top_of(logits: NDArray[np.floating[Any]], width: int = TOP) -> Top:
    """The `width` likeliest tokens of rows of logits [R, V]; ties go to the lowest id, also at the cut."""
    width = min(width, logits.shape[1])
    if width == 1:
        ids = logits.argmax(axis=1)[:, None]
        return Top(ids.astype(np.int64, copy=False), np.take_along_axis(logits, ids, 1))
    if logits.shape[1] <= 4096 or not len(logits):
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :width]
    else:
        ids = np.stack([_largest(row, width) for row in logits])
    return Top(ids.astype(np.int64, copy=False), np.take_along_axis(logits, ids, 1))


def _largest(row: NDArray[np.floating[Any]], width: int) -> NDArray[np.int64]:
    """Sorting a whole vocabulary costs too much: what reaches the `width`-th largest value is sorted alone."""
    least = np.partition(row, -width)[-width]
    candidates = np.flatnonzero(row >= least)
    return candidates[np.argsort(-row[candidates], kind="stable")[:width]]
