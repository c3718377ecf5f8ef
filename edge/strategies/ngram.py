"""Drafts by prompt lookup: what followed the last time these tokens came up. No weights, no KV."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence

from paceline.core.model import Span
from paceline.core.rejection import certain
from paceline.edge.session import Session

LONGEST = 3  # tokens of a suffix that is looked up; then shorter ones down to 1


class Index:
    """Where each n-gram of a growing sequence ended last, n = 1..3. O(1) a token."""

    def __init__(self) -> None:
        self.count = 0  # tokens whose n-grams are in
        self._ends: dict[int | tuple[int, ...], int] = {}

    def extend(self, tokens: array[int], until: int) -> None:
        """Adds the n-grams that end before `until`. The sequence's last one stays out, so that it finds an earlier."""
        ends = self._ends
        for end in range(self.count + 1, until + 1):
            last = tokens[end - 1]
            ends[last] = end
            if end >= 2:
                ends[tokens[end - 2], last] = end
            if end >= 3:
                ends[tokens[end - 3], tokens[end - 2], last] = end
        self.count = max(self.count, until)

    def find(self, tokens: array[int]) -> int | None:
        """Where the longest suffix of `tokens` ended before: the position of what followed it."""
        for n in range(min(LONGEST, len(tokens)), 0, -1):
            end = self._ends.get(tuple(tokens[-n:]) if n > 1 else tokens[-1])
            if end is not None:
                return end
        return None


class NGram:
    """A strategy that copies. A match that runs into the end goes on with its own proposals, as LZ77 does."""

    name = "ngram"
    keeps_tail = False  # after the first proposals came true, a longer or later match may say otherwise
    keeps_kv = False
    forks = False
    kv_slots = 1 << 62  # none are needed
    quick = 256
    reads_together = True

    def __init__(self, max_context: int, vocabulary_size: int = 1 << 32) -> None:
        self.vocabulary_size = vocabulary_size
        self.max_context = max_context
        self._keys = itertools.count()

    def allocate(self, length: int) -> Span | None:
        return Span(next(self._keys), 0, length)

    def free(self, span: Span) -> None:
        """Nothing is held."""

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        raise ValueError("n-grams are looked up in one text")

    def observe(self, lap: Callable[[], None]) -> None:
        """There are no parts to tell apart."""

    def advance(self, sessions: Sequence[Session]) -> list[Session]:
        for session in sessions:
            self._index(session, len(session.committed))
            session.tail[:] = self._propose(session, session.want)
            session.weights[:] = [certain(token) for token in session.tail] if session.draws else []
        return list(sessions)

    def read(self, reads: Sequence[tuple[Session, int]]) -> None:
        for session, count in reads:
            self._index(session, session.computed + count)

    @staticmethod
    def _index(session: Session, until: int) -> None:
        """Notes the n-grams of the first `until` tokens, all but the last of the sequence."""
        if session.index is None:
            session.index = Index()
        session.index.extend(session.committed, min(until, len(session.committed) - 1))
        session.computed = until

    @staticmethod
    def _propose(session: Session, k: int) -> list[int]:
        tokens = session.committed
        start = session.index.find(tokens) if k else None
        if start is None:
            return []
        proposals = tokens[start : start + k].tolist()
        while len(proposals) < k:
            proposals.append(proposals[len(proposals) - (len(tokens) - start)])
        return proposals
