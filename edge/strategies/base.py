"""How drafts are made: an interface between the service's loop and what proposes tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.model import Span
from paceline.edge.session import Session


class Strategy(Protocol):
    """Proposes tokens after a session's committed ones.

    quick: so many tokens of catch-up ride along in a draft step; more is read in chunks.
    reads_together: whether one `read` may take chunks of several sessions.
    keeps_tail: whether proposals stay right when their first tokens are committed.
    keeps_kv: whether a session's span is worth keeping after it.
    forks: whether several continuations of a session can be drafted at a time (edge/ahead.py).
    """

    name: str
    vocabulary_size: int
    max_context: int
    kv_slots: int
    quick: int
    reads_together: bool
    keeps_tail: bool
    keeps_kv: bool
    forks: bool

    def allocate(self, length: int) -> Span | None:
        """Memory for a session of at most `length` tokens; None when there is no room now."""

    def free(self, span: Span) -> None:
        """Gives a span back."""

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        """Copies what is computed of the tokens `start … stop` from one span to another; only where `forks`."""

    def observe(self, lap: Callable[[], None]) -> None:
        """Has `lap` called within each forward, when the model is through and when its candidates are chosen."""

    def advance(self, sessions: Sequence[Session]) -> list[Session]:
        """One draft step: catches up and appends to each session's tail. Returns those that are complete."""

    def read(self, reads: Sequence[tuple[Session, int]]) -> None:
        """Catches up by so many committed tokens of each session, without proposing anything."""
