"""Drafts by a small model: the target's own rule and noise, over the draft model's top 64 logits (core/sampling.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from paceline.core.model import Segment, Span
from paceline.core.rejection import certain, draw, weights_of
from paceline.core.sampling import History, adjust_values, choose, probabilities
from paceline.edge.rows import ContiguousRows
from paceline.edge.runtimes.base import TOP, PackedRuntime, Runtime, Top
from paceline.edge.session import Session

LEAST_SHARE = 1e-20
QUICK_TOKENS = 32
QUICK_STEPS = 2  # where a batched step takes one token a session: what a fully accepted draft leaves to catch up


class DraftModel:
    """A strategy over a runtime. One step is one forward over the batch."""

    name = "draft_model"
    keeps_tail = True
    keeps_kv = True

    def __init__(self, runtime: Runtime) -> None:
        self._observed = runtime
        self._lap: Callable[[], None] | None = None
        self._runtime: Runtime = ContiguousRows(runtime) if runtime.rows == "contiguous" else runtime
        self.vocabulary_size = runtime.vocabulary_size
        self.kv_slots = self._runtime.kv_slots
        self.max_context = min(runtime.max_context, self._runtime.kv_slots)
        self.quick = QUICK_TOKENS if runtime.multi_token_batch else QUICK_STEPS
        self.reads_together = runtime.multi_token_batch
        self.forks = self._runtime.forks

    def allocate(self, length: int) -> Span | None:
        return self._runtime.allocate(length)

    def free(self, span: Span) -> None:
        self._runtime.free(span)

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        self._runtime.copy(source, target, start, stop)

    def observe(self, lap: Callable[[], None]) -> None:
        self._lap = lap
        if isinstance(self._observed, PackedRuntime):
            self._observed.lap = lap

    def advance(self, sessions: Sequence[Session]) -> list[Session]:
        segments, rows, plain, branches = [], [], True, False
        for session in sessions:
            segment = self._next_segment(session, several=self.reads_together or len(sessions) == 1)
            segments.append(segment)
            if segment.rows:
                rows.append(session)
                plain = plain and session.plain
                branches = branches or session.branches > 0
        tells = [session for session in rows if session.tells]
        top = self._runtime.forward(segments, (2 if branches else 1) if plain and not tells else TOP)
        if self._lap is not None:
            self._lap()
        candidates = top if plain else self._adjusted(rows, top)
        tokens = top.ids[:, 0].tolist() if plain else self._choose(rows, candidates)
        if tells:
            self._note_log_probs(rows, candidates, tokens)
        seconds = self._seconds(rows, top, tokens) if branches else [None] * len(tokens)
        for session, token, second in zip(rows, tokens, seconds, strict=True):
            session.propose(token, second)
        return [s for s in sessions if len(s.tail) >= s.want and s.computed >= len(s.committed)]

    def read(self, reads: Sequence[tuple[Session, int]]) -> None:
        segments = []
        for session, count in reads:
            start = session.computed
            segments.append(Segment(session.span, start, session.committed[start : start + count], 0))
            session.computed = start + count
            session.spare = None
        self._runtime.forward(segments, 1)

    def _next_segment(self, session: Session, several: bool) -> Segment:
        """What is not computed yet, and a row after it if another proposal is wanted.

        several: whether this step takes several tokens of a session.
        """
        session.spare = None  # this forward overwrites it
        total = len(session.committed) + len(session.tail)
        wanted = len(session.tail) < session.want
        start = min(session.computed, total - 1)
        tokens = session.pending(start)
        if len(tokens) > 1 and not several:
            session.computed = start + 1
            return Segment(session.span, start, tokens[:1], 0)
        session.computed = total
        return Segment(session.span, start, tokens, 1 if wanted else 0)

    def _adjusted(self, sessions: Sequence[Session], top: Top) -> Top:
        """The candidates with bias and penalties in."""
        if not any(s.sampling.adjusts for s in sessions):
            return top
        ids, logits = top.ids.copy(), top.logits.astype(np.float64)
        for row, session in enumerate(sessions):
            if session.sampling.adjusts:
                self._adjust(session, ids[row], logits[row])
        return Top(ids, logits)

    def _choose(self, sessions: Sequence[Session], candidates: Top) -> list[int]:
        """The proposal at each session's next absolute position."""
        ids, logits = candidates
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

    def _seconds(self, sessions: Sequence[Session], top: Top, tokens: Sequence[int]) -> list[int | None]:
        """What each row's choice would be without the one that it is; by the bare logits, without bias or penalties."""
        others = np.where(top.ids == np.asarray(tokens)[:, None], -np.inf, top.logits)
        chosen = self._coupled(sessions, top.ids, others)
        return [token if session.branches else None for session, token in zip(sessions, chosen, strict=True)]

    @staticmethod
    def _note_log_probs(sessions: Sequence[Session], candidates: Top, tokens: Sequence[int]) -> None:
        """How likely each token was among the candidates, at the session's temperature and cuts; greedy ones at 1."""
        stated = [replace(s.sampling, temperature=s.sampling.temperature or 1.0) for s in sessions]
        shares = probabilities(candidates.logits, stated)
        for row, (session, token) in enumerate(zip(sessions, tokens, strict=True)):
            if session.tells:
                share = float(shares[row][candidates.ids[row] == token].sum())
                session.tell(math.log(max(share, LEAST_SHARE)))

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
