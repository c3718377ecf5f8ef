"""Draft ahead: while a target verifies a draft, idle time goes into the drafts of rounds that may follow it.

What a round leads to is its outcome: so many proposals right, and which token came next. Where all are right the
session just drafts on. For a rejection the likeliest next token is the drafter's own second choice there, under the
same noise; such a branch has a span of its own, beside the session's, with a copy of what they share. All branches
are drafted as one batch, in steps that begin only while nothing else waits. A branch that is ready is sent ahead;
one whose outcome came true becomes the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.measured import Average
from paceline.edge.session import Fork, Phase, Session
from paceline.edge.strategies.base import Strategy
from paceline.topology.wire import Branch, pack_tokens

FIRST_AGREEMENT, FIRST_SECOND = 0.7, 0.4  # what is assumed of first and second choices until some were seen
COPIED_A_STEP = 1024  # tokens; a long text is copied to one fork after the other, so that a step stays short
SEEN = 256  # choices that count


@dataclass(eq=False)
class Continuation:
    """A session as it is if a round has this outcome: the session itself, or a shadow of it on a fork's span.

    after: tokens of its tail that come before the draft. length: of the draft.
    """

    accepted: int
    session: Session
    after: int
    length: int
    chance: float
    fork: Fork | None = None
    told: bool = False

    @property
    def ready(self) -> bool:
        return len(self.session.tail) >= self.after + self.length

    @property
    def finished(self) -> bool:
        session = self.session
        return len(session.tail) >= session.want and session.computed >= len(session.committed)

    def message(self) -> Branch:
        tail, next_token = self.session.tail, self.session.committed[-1]
        if self.after:
            next_token = tail[self.after - 1]
        return self.accepted, next_token, pack_tokens(tail[self.after : self.after + self.length])


@dataclass(eq=False)
class Plan:
    """What is prepared while `proposals`, which follow the first `position` tokens, are being verified."""

    position: int
    proposals: list[int]
    rewrites: int
    k: int
    outcomes: list[tuple[int, float]]  # that are still to be branched out for, as (accepted, chance)
    continuations: list[Continuation]


class Ready(NamedTuple):
    """Branches that are to be sent: of a session, after the round that begins at `position`."""

    session: Session
    position: int
    branches: list[Branch]


class Ahead:
    """The plans of all sessions; true while one of them has something left to draft.

    most: sequences in one step. spare: frees memory that is merely kept, one span a call; False when there is none.
    """

    def __init__(self, strategy: Strategy, most: int, spare: Callable[[], bool]) -> None:
        self._strategy = strategy
        self._most = most
        self._spare = spare
        self._open: dict[Session, None] = {}  # in the order in which their proposals left
        self._agreement = Average(SEEN)
        self._second = Average(SEEN)
        self.tokens = 0  # drafted ahead

    def __bool__(self) -> bool:
        return bool(self._open)

    # --- before the outcome is known

    def prepare(self, session: Session, verified: int, k: int) -> None:
        """The first `verified` tokens of the tail are being verified: plans drafts of k tokens for what may follow."""
        self._forget(session)
        if not (session.branches and k and verified) or session.draws:
            return
        outcomes = self._likeliest(verified, session.branches)
        session.plan = Plan(len(session.committed), session.tail[:verified], session.rewrites, k, outcomes, [])
        self._open[session] = None

    def _likeliest(self, verified: int, count: int) -> list[tuple[int, float]]:
        """The `count` likeliest outcomes for which the next token can be guessed, as (accepted, chance)."""
        right = self._agreement.value if self._agreement.count else FIRST_AGREEMENT
        second = self._second.value if self._second.count else FIRST_SECOND
        chances = [right**j * (1.0 - right) * second for j in range(verified)] + [right ** (verified + 1)]
        return sorted(enumerate(chances), key=lambda outcome: -outcome[1])[:count]

    def _branch_out(self, session: Session, room: int) -> int:
        """Makes continuations, the likeliest first, until about `room` tokens were copied; returns how many were."""
        plan: Plan = session.plan
        copied = 0
        while plan.outcomes and copied < room:
            outcome, chance = plan.outcomes.pop(0)
            if outcome == len(plan.proposals):
                continuation = self._itself(session, outcome, plan.k, chance)
            else:
                copied += session.computed - max((fork.valid for fork in session.forks if not fork.busy), default=0)
                continuation = self._fork(session, outcome, plan.k, chance)
            if continuation is not None:
                plan.continuations.append(continuation)
        return copied

    def _itself(self, session: Session, verified: int, k: int, chance: float) -> Continuation | None:
        """All proposals right: the session drafts on, by the token after them, the draft, and one more."""
        length = min(k, self._room(session) - verified - 1)
        session.want = max(len(session.tail), verified + 1 + length + 1)
        session.want = min(session.want, self._room(session))
        return Continuation(verified, session, verified + 1, length, chance) if length > 0 else None

    def _fork(self, session: Session, place: int, k: int, chance: float) -> Continuation | None:
        """The proposal at `place` is wrong and the second choice right. None where there is no span to draft it in."""
        second = session.seconds[place] if place < len(session.seconds) else None
        if second is None or session.sampling.adjusts:
            return None
        fork = self._span(session)
        if fork is None:
            return None
        stop = min(session.computed, len(session.committed) + place)
        if fork.valid < stop:
            self._strategy.copy(session.span, fork.span, fork.valid, stop)
        fork.busy, fork.valid = True, stop
        committed = session.committed[:]
        committed.extend([*session.tail[:place], second])
        shadow = Session(
            session.target,
            session.id,
            session.sampling,
            session.prompt_length,
            fork.span,
            vocabulary_size=session.vocabulary_size,
            committed=committed,
            computed=stop,
            branches=session.branches,
            tells=session.tells,
        )
        length = min(k, self._room(shadow))
        shadow.want = min(k + 1, self._room(shadow))
        return Continuation(place, shadow, 0, length, chance, fork) if length > 0 else None

    def _span(self, session: Session) -> Fork | None:
        """A span beside the session's, that nobody else wants now; of those it has, the one that lacks least."""
        idle = [fork for fork in session.forks if not fork.busy]
        if idle:
            return max(idle, key=lambda fork: fork.valid)
        span = self._strategy.allocate(session.span.size)
        while span is None:
            if not self._spare():
                return None
            span = self._strategy.allocate(session.span.size)
        session.forks.append(Fork(span))
        return session.forks[-1]

    def _room(self, session: Session) -> int:
        return min(session.span.size, self._strategy.max_context) - len(session.committed)

    # --- drafting

    def step(self) -> list[Ready]:
        """One draft step of the likeliest continuations; returns what is ready by it. The oldest plans go first."""
        batch: list[Continuation] = []
        looked_at: list[Session] = []
        copied = 0
        for session in self._open:
            looked_at.append(session)
            if session.plan is not None and session.phase is Phase.IDLE:
                copied += self._branch_out(session, COPIED_A_STEP - copied)
            batch += self._unfinished(session)
            if len(batch) >= self._most:
                break
        del batch[self._most :]
        if batch:
            self._strategy.advance([continuation.session for continuation in batch])
            self.tokens += len(batch)
        ready = [self._tell(session) for session in looked_at if session.plan is not None]
        for session in looked_at:
            if not self._unfinished(session) and (session.plan is None or not session.plan.outcomes):
                del self._open[session]
        return [one for one in ready if one.branches]

    @staticmethod
    def _unfinished(session: Session) -> list[Continuation]:
        if session.plan is None or session.phase is not Phase.IDLE:
            return []
        left = [one for one in session.plan.continuations if not one.finished]
        return sorted(left, key=lambda continuation: -continuation.chance)

    @staticmethod
    def _tell(session: Session) -> Ready:
        branches = []
        for continuation in session.plan.continuations:
            if continuation.ready and not continuation.told:
                continuation.told = True
                branches.append(continuation.message())
        return Ready(session, session.plan.position, branches)

    # --- when it is known

    def settle(self, session: Session) -> None:
        """The session's committed tokens are known now: a continuation that foresaw them becomes the session."""
        plan: Plan | None = session.plan
        if plan is None:
            return
        emitted = session.committed[plan.position :] if session.rewrites == plan.rewrites else session.committed[:0]
        right = _right(emitted, plan.proposals)
        if emitted:
            self._learn(plan, right, emitted[right] if right < len(emitted) else None)
        for continuation in plan.continuations:
            if continuation.fork is not None:
                shared = plan.position + min(continuation.accepted, right)
                known = min(continuation.session.computed, shared)
                continuation.fork.valid = known if session.rewrites == plan.rewrites else 0
        self._forget(session)
        for continuation in plan.continuations:
            if continuation.fork is not None and _came_true(continuation, session, right, emitted):
                _become(session, continuation.session, continuation.fork)

    def _forget(self, session: Session) -> None:
        session.plan = None
        for fork in session.forks:
            fork.busy = False
        self._open.pop(session, None)

    def _learn(self, plan: Plan, right: int, next_token: int | None) -> None:
        """How often first choices are right, and second ones where the first was wrong."""
        for _ in range(right):
            self._agreement.add(1.0)
        if right == len(plan.proposals) or next_token is None:
            return
        self._agreement.add(0.0)
        for continuation in plan.continuations:
            if continuation.fork is not None and continuation.accepted == right:
                guess = continuation.session.committed[plan.position + right]
                self._second.add(float(guess == next_token))


def _right(emitted: Sequence[int], proposals: Sequence[int]) -> int:
    """How many first proposals were emitted."""
    for place, (token, proposal) in enumerate(zip(emitted, proposals, strict=False)):
        if token != proposal:
            return place
    return min(len(emitted), len(proposals))


def _came_true(continuation: Continuation, session: Session, right: int, emitted: Sequence[int]) -> bool:
    shadow = continuation.session
    place = len(shadow.committed) - 1
    return (
        continuation.accepted == right
        and bool(emitted)
        and place < len(session.committed)
        and session.committed[place] == shadow.committed[place]
        and shadow.sampling is session.sampling
        and shadow.computed > session.computed
    )


def _become(session: Session, shadow: Session, fork: Fork) -> None:
    """The session goes on where the shadow is; its own span, right up to where they part, is the fork's from now on."""
    shadow.commit(len(shadow.committed), session.committed[len(shadow.committed) :])
    fork.span, session.span = session.span, fork.span
    fork.valid, session.computed = session.computed, shadow.computed
    session.tail, session.seconds, session.log_probs = shadow.tail, shadow.seconds, shadow.log_probs
    session.spare = None
