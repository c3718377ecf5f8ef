"""The target's side of the wire: what each drafter acknowledged, what is asked of it, and how long to wait.

Runs on the engine's thread only. A session's text never depends on anything here: a draft is a guess that
the next forward checks, and every doubt ends in "send from what the drafter says it holds".
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.cloud.lanes import Lane
from paceline.cloud.sessions import Session
from paceline.core.percentiles import Window
from paceline.topology.wire import (
    Close,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Message,
    Status,
    Welcome,
    check_hash,
    pack_tokens,
    unpack_tokens,
)

FIRST_DEADLINE = 1.0
DEADLINE_SAMPLES = 16
MIN_DEADLINE, MAX_DEADLINE = 0.005, 2.0
PROBE_INTERVAL = 1.0
KEPT_SEND_TIMES = 8
OK, WARMING, UNKNOWN = int(Status.OK), int(Status.WARMING), int(Status.UNKNOWN)  # plain ints compare faster
FULL, BEYOND = int(Status.FULL), int(Status.BEYOND)


@dataclass(frozen=True)
class DraftingConfig:
    """drafters: names in order of preference. deadline: seconds, or None for the measured one.

    max_tokens: of one session in one Draft; longer prompts go in several, each after the last one's answer.
    """

    drafters: tuple[str, ...] = ()
    draft_length: int = 4
    deadline: float | None = None
    max_tokens: int = 16_384


class DrafterState:
    """One drafter as this target sees it. `send` is None while its link is down."""

    def __init__(self, name: str, fixed_deadline: float | None) -> None:
        self.name = name
        self.send: Callable[[Message], bool] | None = None
        self.epoch = 0
        self.max_context = 0
        self.max_draft_length = 0
        self.handled = 0  # answers looked at, ever
        self.arrivals = Window(256)
        self._fixed_deadline = fixed_deadline
        self._measured_deadline, self._measured_at = FIRST_DEADLINE, 0

    @property
    def up(self) -> bool:
        return self.send is not None

    def answered(self, seconds: float) -> None:
        """A draft came so long after it was asked for. One past the deadline has it measured anew at once."""
        self.arrivals.add(seconds)
        if seconds > self._measured_deadline:
            self._measured_at = -DEADLINE_SAMPLES

    def deadline(self) -> float:
        """Seconds to wait for a draft: 2 × the p99 of send→arrival, late replies included."""
        if self._fixed_deadline is not None:
            return self._fixed_deadline
        if len(self.arrivals) < DEADLINE_SAMPLES:
            return FIRST_DEADLINE
        if self.arrivals.count - self._measured_at >= DEADLINE_SAMPLES:
            self._measured_at = self.arrivals.count
            self._measured_deadline = min(max(2 * self.arrivals.percentile(99), MIN_DEADLINE), MAX_DEADLINE)
        return self._measured_deadline


class Drafting:
    """All drafters and every live session's soft state. Proposed ids from `vocabulary_size` on are dropped."""

    def __init__(self, config: DraftingConfig, vocabulary_size: int) -> None:
        self.config = config
        self._vocabulary_size = vocabulary_size
        self.drafters = {name: DrafterState(name, config.deadline) for name in config.drafters}
        self.sessions: dict[int, Session] = {}
        self._ids = itertools.count(secrets.randbits(40) << 20)  # never reused, also by a restarted target

    # --- sessions

    def new_id(self) -> int:
        return next(self._ids)

    def open(self, session: Session, now: float) -> None:
        """The prompt goes to a drafter at once, so that both ends read it together."""
        self.sessions[session.id] = session
        self._send({session: 0}, now)

    def close(self, sessions: Sequence[Session]) -> None:
        """Both ends forget the sessions."""
        by_drafter: dict[str, list[int]] = {}
        for session in sessions:
            self.sessions.pop(session.id, None)
            if session.drafts.drafter is not None:
                by_drafter.setdefault(session.drafts.drafter, []).append(session.id)
        for name, ids in by_drafter.items():
            drafter = self.drafters[name]
            if drafter.send is not None:
                drafter.send(Close(drafter.epoch, ids))

    def live(self) -> list[int]:
        """Ids of the sessions a Ping lists; safe from any thread."""
        return list(self.sessions)

    # --- links

    def link_up(self, name: str, welcome: Welcome, send: Callable[[Message], bool], now: float) -> None:
        """A drafter is there: it holds nothing of ours, and what is open goes to it at once."""
        drafter = self.drafters[name]
        drafter.send, drafter.epoch = send, welcome.epoch
        drafter.max_context, drafter.max_draft_length = welcome.max_context, welcome.max_draft_length
        for session in self.sessions.values():
            if session.drafts.drafter == name:
                session.drafts.forget()
                session.drafts.beyond = False
                session.drafts.retry_at = 0.0
        self._send({s: 0 for s in self.sessions.values() if s.drafts.drafter in (name, None)}, now)

    def link_down(self, name: str) -> None:
        """Nobody waits for it any more."""
        self.drafters[name].send = None
        for session in self.sessions.values():
            if session.drafts.drafter == name:
                session.drafts.awaited = False
                session.drafts.forget()

    # --- asking

    def request(self, lane: Lane, sessions: Sequence[Session], now: float) -> None:
        """Asks for the next drafts of a lane's `sessions` and sets until when the lane waits for them."""
        asked: dict[Session, int] = {}
        for session in sessions:
            k = self._draft_length(session, self._drafter(session), now)
            session.drafts.wanted = k > 0
            if k:
                asked[session] = k
        if not asked:
            return
        if lane.plain:
            asked = self._probe(lane, asked, now)
        drafters = self._send(asked, now)
        if lane.plain or not drafters:
            return
        for session in asked:
            session.drafts.awaited = session.drafts.caught_up
        lane.deadline = now + max([drafter.deadline() for drafter in drafters])

    @staticmethod
    def _probe(lane: Lane, asked: dict[Session, int], now: float) -> dict[Session, int]:
        """One session's draft, now and then: its answer ends the lane's plain decoding."""
        if now < lane.probe_at:
            return {}
        lane.probe_at = now + PROBE_INTERVAL
        return dict([next(iter(asked.items()))])

    def _draft_length(self, session: Session, drafter: DrafterState | None, now: float) -> int:
        state = session.drafts
        if drafter is None or state.beyond or now < state.retry_at:
            return 0
        if not state.caught_up and state.unanswered_since is not None and now < state.unanswered_since + PROBE_INTERVAL:
            return 0  # one Draft at a time until it has caught up
        room = drafter.max_context - len(session.tokens)
        return max(0, min(self.config.draft_length, session.output.remaining - 1, drafter.max_draft_length, room))

    def _drafter(self, session: Session) -> DrafterState | None:
        """The session's drafter, or the first one that is up when it has none or has lost it."""
        own = self.drafters.get(session.drafts.drafter or "")
        if own is not None and own.send is not None:
            return own
        for drafter in self.drafters.values():
            if drafter.up:
                session.drafts.drafter = drafter.name
                session.drafts.forget()
                session.drafts.beyond = False
                return drafter
        return None

    def _send(self, asked: dict[Session, int], now: float) -> list[DrafterState]:
        """One Draft to each drafter concerned; returns those it went to."""
        items: dict[str, list[DraftItem]] = {}
        for session, k in asked.items():
            drafter = self._drafter(session)
            if drafter is not None and not session.drafts.beyond:
                items.setdefault(drafter.name, []).append(self._item(session, k, now))
        reached = []
        for name, batch in items.items():
            drafter = self.drafters[name]
            if drafter.send is not None and drafter.send(Draft(drafter.epoch, batch)):
                reached.append(drafter)
        return reached

    def _item(self, session: Session, k: int, now: float) -> DraftItem:
        state = session.drafts
        base = state.acknowledged
        tokens = session.tokens[base : base + self.config.max_tokens]
        version = base + len(tokens)
        state.cut = version < len(session.tokens)
        if state.cut:
            k = 0
        state.unanswered_since = now
        state.sent_at[version] = now
        if len(state.sent_at) > KEPT_SEND_TIMES:
            del state.sent_at[next(iter(state.sent_at))]
        opening = base == 0
        return DraftItem(
            session=session.id,
            base=base,
            tokens=pack_tokens(tokens),
            check=state.check,
            k=k,
            sampling=session.request.sampling if opening else None,
            prompt_length=len(session.request.prompt) if opening else 0,
            limit=session.limit if opening else 0,
        )

    # --- answers

    def arrived(self, name: str, message: Drafted, now: float) -> list[Session]:
        """Takes a drafter's answers. Returns the sessions whose draft is usable, or at least came in time."""
        drafter = self.drafters[name]
        drafter.handled += 1
        if message.epoch != drafter.epoch or not drafter.up:
            return []
        drafted, again, patience = [], {}, drafter.deadline()
        for item in message.items:
            session = self.sessions.get(item.session)
            if session is None or session.drafts.drafter != name or item.held > len(session.tokens):
                continue
            in_time = False
            sent = session.drafts.sent_at.pop(item.position, None)
            if sent is not None and item.status == OK:
                drafter.answered(now - sent)
                in_time = now - sent <= patience
            if self._take(session, item, now):
                again[session] = session.drafts.wanted * self._draft_length(session, self._drafter(session), now)
            if in_time or session.drafts.proposal:
                drafted.append(session)
        if again:
            self._send(again, now)
        return drafted

    def _take(self, session: Session, item: DraftedItem, now: float) -> bool:
        """Applies one answer. True when the drafter lacks tokens that are to be sent again at once."""
        state = session.drafts
        state.unanswered_since = None
        if item.status == UNKNOWN:
            doubled = item.held == state.acknowledged  # or the tokens before base differ: start over, later
            state.acknowledged = 0 if doubled else item.held
            state.check = check_hash(session.tokens[: state.acknowledged])
            state.caught_up = state.awaited = False
            return not doubled
        advanced = item.held > state.acknowledged
        if advanced:
            state.check = check_hash(session.tokens[state.acknowledged : item.held], state.check)
            state.acknowledged = item.held
        if item.status == OK:
            state.caught_up = True
            self._propose(session, item)
        else:
            state.awaited = False
            if item.status == WARMING:
                state.caught_up = False
            elif item.status == FULL:
                state.retry_at = now + item.retry_after_ms / 1000.0
            elif item.status == BEYOND:
                state.beyond = True
        return advanced and state.cut

    def _propose(self, session: Session, item: DraftedItem) -> None:
        """Keeps the part of a draft that lies beyond what is committed, if what lies before it came true."""
        state = session.drafts
        late = len(session.tokens) - item.position
        tokens = self._known(unpack_tokens(item.tokens))
        if late == 0:
            state.proposal, state.awaited = tokens, False
        elif 0 < late < len(tokens) and tokens[:late] == session.tokens[item.position : item.position + late]:
            state.proposal, state.awaited = tokens[late:], False

    def _known(self, tokens: array[int]) -> array[int]:
        """The tokens before the first id that the target's vocabulary lacks."""
        if not tokens or max(tokens) < self._vocabulary_size:
            return tokens
        unknown = (index for index, token in enumerate(tokens) if token >= self._vocabulary_size)
        return tokens[: next(unknown, len(tokens))]


def clear(sessions: Iterable[Session]) -> None:
    """After a round: what was proposed is used up."""
    for session in sessions:
        session.drafts.proposal = ()
        session.drafts.awaited = False
