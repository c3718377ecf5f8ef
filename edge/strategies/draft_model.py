"""Drafts by a small model: the target's own rule and noise, over the draft model's top 64 logits (core/sampling.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.model import Segment, Span
from paceline.core.rejection import certain, draw, weights_of
from paceline.core.sampling import History, adjust_values, choose, probabilities
from paceline.edge.rows import ContiguousRows
from paceline.edge.runtimes.base import TOP, Runtime, Top
from paceline.edge.session import Session

QUICK_TOKENS = 32
QUICK_STEPS = 2  # where a batched step takes one token a session: what a fully accepted draft leaves to catch up


class DraftModel:
    """A strategy over a runtime. One step is one forward over the batch."""

    name = "draft_model"
    keeps_tail = True
    keeps_kv = True

    def __init__(self, runtime: Runtime) -> None:
        self._runtime: Runtime = ContiguousRows(runtime) if runtime.rows == "contiguous" else runtime
        self.vocabulary_size = runtime.vocabulary_size
        self.kv_slots = self._runtime.kv_slots
        self.max_context = min(runtime.max_context, self._runtime.kv_slots)
        self.quick = QUICK_TOKENS if runtime.multi_token_batch else QUICK_STEPS
        self.reads_together = runtime.multi_token_batch

    def allocate(self, length: int) -> Span | None:
        return self._runtime.allocate(length)

    def free(self, span: Span) -> None:
        self._runtime.free(span)

    def advance(self, sessions: Sequence[Session]) -> list[Session]:
        segments, rows, plain = [], [], True
        for session in sessions:
            segment = self._next_segment(session)
            segments.append(segment)
            if segment.rows:
                rows.append(session)
                plain = plain and session.plain
        top = self._runtime.forward(segments, 1 if plain else TOP)
        tokens = top.ids[:, 0].tolist() if plain else self._choose(rows, top)
        for session, token in zip(rows, tokens, strict=True):
            session.tail.append(token)
        return [s for s in sessions if len(s.tail) >= s.want and s.computed >= len(s.committed)]

    def read(self, reads: Sequence[tuple[Session, int]]) -> None:
        segments = []
        for session, count in reads:
            start = session.computed
            segments.append(Segment(session.span, start, session.committed[start : start + count], 0))
            session.computed = start + count
            session.spare = None
        self._runtime.forward(segments, 1)

    def _next_segment(self, session: Session) -> Segment:
        """What is not computed yet, and a row after it if another proposal is wanted."""
        session.spare = None  # this forward overwrites it
        total = len(session.committed) + len(session.tail)
        wanted = len(session.tail) < session.want
        start = min(session.computed, total - 1)
        tokens = session.pending(start)
        if not self.reads_together and len(tokens) > 1:
            session.computed = start + 1
            return Segment(session.span, start, tokens[:1], 0)
        session.computed = total
        return Segment(session.span, start, tokens, 1 if wanted else 0)

    def _choose(self, sessions: Sequence[Session], top: Top) -> list[int]:
        """The proposal at each session's next absolute position, bias and penalties first."""
        ids, logits = top
        if any(s.sampling.adjusts for s in sessions):
            ids, logits = ids.copy(), logits.astype(np.float64)
            for row, session in enumerate(sessions):
                if session.sampling.adjusts:
                    self._adjust(session, ids[row], logits[row])
        if not any(session.draws for session in sessions):
            return self._coupled(sessions, ids, logits)
        tokens = [0] * len(sessions)
        for draws, propose in ((False, self._coupled), (True, self._drawn)):
            rows = [row for row, session in enumerate(sessions) if session.draws is draws]
            if rows:
                for row, token in zip(rows, propose([sessions[r] for r in rows], ids[rows], logits[rows]), strict=True):
                    tokens[row] = token
        return tokens

    @staticmethod
    def _coupled(sessions: Sequence[Session], ids: np.ndarray, logits: np.ndarray) -> list[int]:
        """argmax(log q + noise): the target's own noise."""
        positions = [len(s.committed) + len(s.tail) for s in sessions]
        tokens: list[int] = choose(logits, [s.sampling for s in sessions], positions, ids).tolist()
        return tokens

    @staticmethod
    def _drawn(sessions: Sequence[Session], ids: np.ndarray, logits: np.ndarray) -> list[int]:
        """Draws from integer weights, noted beside the tail; what the target's vocabulary lacks has none."""
        tokens = []
        shares = probabilities(logits, [s.sampling for s in sessions])
        for session, candidates, share in zip(sessions, ids, shares, strict=True):
            known = (candidates < session.vocabulary_size) & (share > 0)
            weights = weights_of(candidates[known], share[known]) if known.any() else certain(0)
            held, drafted = len(session.committed), len(session.tail)
            session.weights[drafted:] = [weights]
            tokens.append(draw(weights, session.sampling.seed, held, held + drafted))
        return tokens

    @staticmethod
    def _adjust(session: Session, ids: np.ndarray, logits: np.ndarray) -> None:
        """In place: adjusted candidates of one row, sorted again by (−logit, id)."""
        values = adjust_values(logits, ids.tolist(), session.sampling, _history(session), session.tail)
        order = np.lexsort((ids, -values))
        ids[:], logits[:] = ids[order], values[order]


def _history(session: Session) -> History:
    """The penalties' view of the committed tokens, extended by what is new."""
    held = len(session.committed)
    if session.history is None or session.history_length < session.prompt_length:
        session.history = History(session.committed, session.prompt_length)
    elif session.history_length < held:
        session.history.extend(session.committed[session.history_length :])
    session.history_length = held
    return session.history
