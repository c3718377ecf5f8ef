"""What a model is to the loops: packed forwards over spans of KV memory.

The target engine and the drafter's runtimes speak to torch models, emulated models and test models
through these types alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

Array = Any  # a numpy array or a torch tensor: sampling accepts both


class Span(NamedTuple):
    """A session's contiguous share of the KV arena: token slots `first … first + size`."""

    key: int
    first: int
    size: int


class Segment(NamedTuple):
    """Consecutive tokens of one session in a packed forward.

    start: absolute position of tokens[0]. KV before it is kept, KV from it on is overwritten, so a
        rollback is nothing but a smaller start.
    rows: how many of the last tokens want a row of logits (0 for a prompt chunk that is not the last).
    """

    span: Span
    start: int
    tokens: Sequence[int]
    rows: int


class PackedModel(Protocol):
    """A causal language model over a KV arena."""

    name: str
    vocabulary_size: int  # width of a row of logits; a padded tail included
    max_context: int  # longest session in tokens
    kv_slots: int  # token slots of the whole arena

    def allocate(self, length: int) -> Span | None:
        """A span for a session of at most `length` tokens; None when there is no room now."""

    def free(self, span: Span) -> None:
        """Gives a span back."""

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        """Copies the KV of the tokens `start … stop` (absolute positions) to the same places of another span."""

    def forward(self, segments: Sequence[Segment]) -> Array:
        """One pass over all segments. Returns logits [sum of rows, vocabulary_size], in order."""
