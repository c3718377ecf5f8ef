"""The target's side of the wire: what each drafter acknowledged, what is asked of it, and how long to wait.

Runs on the engine's thread only. A session's text never depends on anything here: a draft is a guess that
the next forward checks, and every doubt ends in "send from what the drafter says it holds".
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.cloud.ahead import AheadControl
from paceline.cloud.controller import Controller, Freedom
from paceline.cloud.drafter_log import DrafterLog
from paceline.cloud.drafters import Drafters, DrafterState, Policy
from paceline.cloud.drafts import draft_item, parts
from paceline.cloud.lanes import Lane
from paceline.cloud.proposals import acknowledge, branches_arrived, propose, propose_drawn, take_branch
from paceline.cloud.sessions import Session
from paceline.core.rejection import Weights
from paceline.topology.log_probs import log_probs_of_items
from paceline.topology.weights import weights_of_items
from paceline.topology.wire import (
    Branches,
    Close,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Message,
    Status,
    Welcome,
    check_hash,
)

logger = logging.getLogger(__name__)

PROBE_INTERVAL = 1.0
PROBE_LENGTH = 4
USELESS_PASSES = 10
OK, WARMING, UNKNOWN = int(Status.OK), int(Status.WARMING), int(Status.UNKNOWN)  # plain ints compare faster
FULL, BEYOND = int(Status.FULL), int(Status.BEYOND)


@dataclass(frozen=True)
class DraftingConfig:
    """drafters: names in order of preference. deadline: seconds, or None for the measured one.

    draft_length: tokens proposed for a session in one round; None: what the controller chooses.

    max_tokens: of one session in one Draft; longer prompts go in several, each after the last one's answer.
    policy: which of several drafters serves a session (drafters.py).
    draft_ahead: outcomes of a round under way that are drafted for meanwhile, where drafters can and it pays.
    verification: with `rejection`, a drafter that cannot draw makes coupled drafts instead, which are verified so.
    verify_budget: draft tokens that a lane's pass verifies at most; None: all (budget.py).
    target: its name, for the log.
    """

    drafters: tuple[str, ...] = ()
    draft_length: int | None = 4
    deadline: float | None = None
    max_tokens: int = 16_384
    policy: Policy = "failover"
    verification: Literal["coupled", "rejection"] = "coupled"
    verify_budget: int | None = None
    draft_ahead: int = 0
    target: str = ""


class Drafting:
    """All drafters and every live session's soft state. Proposed ids from `vocabulary_size` on are dropped."""

    def __init__(self, config: DraftingConfig, vocabulary_size: int, controller: Controller | None = None) -> None:
        self.config = config
        self._controller = controller or Controller(Freedom(draft_length=config.draft_length))
        self._vocabulary_size = vocabulary_size
        self._drafters = Drafters(config.drafters, config.policy, config.deadline)
        self._log = DrafterLog(config.target)
        self.ahead = AheadControl()
        self.sessions: dict[int, Session] = {}
        self._ids = itertools.count(secrets.randbits(40) << 20)  # never reused, also by a restarted target

    def reconfigure(self, config: DraftingConfig) -> None:
        """Takes on another configuration; a session whose drafter is gone from it gets another one next time."""
        self.config = config
        self._drafters.configure(config.drafters, config.policy, config.deadline)

    @property
    def drafters(self) -> Mapping[str, DrafterState]:
        """By name, in order of preference."""
        return self._drafters.by_name

    # --- sessions

    def new_id(self) -> int:
        return next(self._ids)

    def open(self, session: Session, now: float) -> None:
        """The prompt goes to a drafter at once, so that both ends read it together."""
        self.sessions[session.id] = session
        self._send({session: 0} if self._assign(session, now) else {}, now)

    def close(self, sessions: Sequence[Session]) -> None:
        """Both ends forget the sessions."""
        by_drafter: dict[str, list[int]] = {}
        for session in sessions:
            self.sessions.pop(session.id, None)
            if session.drafts.drafter is not None:
                by_drafter.setdefault(session.drafts.drafter, []).append(session.id)
        for name, ids in by_drafter.items():
            drafter = self.drafters.get(name)
            if drafter is not None and drafter.send is not None:
                drafter.send(Close(drafter.epoch, ids))

    def live(self, drafter: str | None = None) -> list[int]:
        """Ids of the sessions that a Ping to that drafter (or to any) lists; safe from any thread."""
        sessions = list(self.sessions.values())
        return [session.id for session in sessions if drafter is None or session.drafts.drafter == drafter]

    def _assign(self, session: Session, now: float) -> DrafterState | None:
        """The session's drafter for its next Draft. One that moves leaves its old place, and gets a new id:
        what was closed at a drafter stays closed there."""
        drafter = self._drafters.choose(session, self.sessions, now)
        if drafter is None or drafter.name == session.drafts.drafter:
            return drafter
        if session.drafts.drafter is not None:
            self._log.left(session.drafts.drafter)
            self.close([session])
            session.id = self.new_id()
            self.sessions[session.id] = session
        session.drafts.drafter = drafter.name
        session.drafts.awaited = False
        session.drafts.forget()
        return drafter

    # --- links

    def link_up(self, name: str, welcome: Welcome, send: Callable[[Message], bool], now: float) -> None:
        """A drafter is there: it holds nothing of ours, and what waits for one goes to it at once."""
        drafter = self.drafters.get(name)
        if drafter is None:
            return
        drafter.link_up(welcome, send, now)
        if self.config.verification == "rejection" and not drafter.draws:
            logger.warning("drafter %s has no rejection: its drafts are coupled ones, the texts are right", name)
        for session in self.sessions.values():
            session.drafts.refused_until.pop(name, None)
            if session.drafts.drafter == name:
                session.drafts.forget()
        self._open_again([s for s in self.sessions.values() if s.drafts.drafter == name or not self._served(s)], now)

    def link_down(self, name: str, now: float) -> None:
        """Nobody waits for it any more; its sessions move to another one at once."""
        drafter = self.drafters.get(name)
        if drafter is not None:
            drafter.send = None
        lost = [session for session in self.sessions.values() if session.drafts.drafter == name]
        for session in lost:
            session.drafts.awaited = False
            session.drafts.forget()
        self._open_again(lost, now)
        self._log.tell(self.drafters, now)

    def said_room(self, name: str, free_sessions: int, now: float) -> None:
        """What a drafter says of its room, once a second."""
        self._drafters.said_room(name, free_sessions, self.sessions)
        self._log.tell(self.drafters, now)

    def _served(self, session: Session) -> bool:
        return self._drafters.of(session.drafts) is not None

    def _open_again(self, sessions: Sequence[Session], now: float) -> None:
        self._send({session: 0 for session in sessions if self._assign(session, now)}, now)

    # --- asking

    def request(self, lane: Lane, sessions: Sequence[Session], now: float) -> None:
        """Asks for the next drafts of a lane's `sessions` and sets until when the lane waits for them."""
        asked: dict[Session, int] = {}
        patience = 0.0
        saved: list[float] = []
        waits = len(sessions) < len(lane.sessions) and any(s.drafts.awaited for s in lane.sessions)
        for session in sessions:
            drafter = self._assign(session, now)
            k = self._draft_length(session, drafter, now)
            state = session.drafts
            state.wanted, state.taken = k, 0
            if drafter is None:
                continue
            if k and not drafter.suspect:
                asked[session] = k
                if (right := state.branches.second_was_right(session.tokens)) is not None:
                    self.ahead.second.add(float(right))
                saved += [] if state.saved is None else [state.saved]
                state.saved = 0.0 if state.branches_asked else None
                if take_branch(session, k, self._vocabulary_size):
                    state.taken, state.took, state.saved = len(state.proposal), 0.0, 1.0
                    continue
                state.awaited = state.caught_up
                patience = max(patience, drafter.patience(k))
                state.due = now + drafter.patience(k)
            elif now >= drafter.probe_at and (probe := k or self._probe_length(session, drafter)):
                drafter.probe_at = now + PROBE_INTERVAL  # nobody waits for it; its answer says how things are
                asked[session] = probe
        if not asked:
            return
        self.ahead.looked(saved)
        took = lane.round_took(now, max(asked.values())) if sessions is lane.sessions else None
        if took is not None:
            self.ahead.round(took, now)
        unreached = self._send(asked, now)
        for session in unreached:
            session.drafts.awaited = False
        if patience and len(unreached) < len(asked):  # who joins a lane that waits already does not make it wait longer
            lane.deadline = min(lane.deadline, now + patience) if waits else now + patience

    def give_up(self, sessions: Sequence[Session], now: float) -> None:
        """A lane goes: nothing of its sessions is awaited any more, and drafters that kept it waiting are noted."""
        missed: dict[str, bool] = {}
        for session in sessions:
            state = session.drafts
            early = state.awaited and now < state.due  # it joined a lane that could wait no longer
            if state.wanted and state.drafter is not None and not early:
                missed[state.drafter] = missed.get(state.drafter, False) or state.awaited
            state.awaited = False
        for name, late in missed.items():
            drafter = self.drafters.get(name)
            if drafter is None or drafter.suspect:
                continue
            if late:
                drafter.missed(now)
                self._log.tell(self.drafters, now)
            else:
                drafter.kept_up()

    def _probe_length(self, session: Session, drafter: DrafterState) -> int:
        """Of a draft that is asked for only to see whether drafting would pay by now."""
        if self.config.draft_length is not None or session.drafts.unanswered_since is not None:
            return 0
        return self._bounded(PROBE_LENGTH, session, drafter)

    def _draft_length(self, session: Session, drafter: DrafterState | None, now: float) -> int:
        state = session.drafts
        if drafter is None or now < state.refused_until.get(drafter.name, 0.0):
            return 0
        if not state.caught_up and state.unanswered_since is not None and now < state.unanswered_since + PROBE_INTERVAL:
            return 0  # one Draft at a time until it has caught up
        wanted = self.config.draft_length
        return self._bounded(self._controller.length(session) if wanted is None else wanted, session, drafter)

    @staticmethod
    def _bounded(k: int, session: Session, drafter: DrafterState) -> int:
        room = drafter.max_context - len(session.tokens)
        return max(0, min(k, session.output.remaining - 1, drafter.max_draft_length, room))

    def _send(self, asked: dict[Session, int], now: float) -> list[Session]:
        """One Draft to each drafter concerned; returns the sessions that did not get through."""
        batches: dict[str, list[Session]] = {}
        unreached = []
        for session in asked:
            drafter = self._drafters.of(session.drafts)
            if drafter is None or now < session.drafts.refused_until.get(drafter.name, 0.0):
                unreached.append(session)
            else:
                batches.setdefault(drafter.name, []).append(session)
        for name, batch in batches.items():
            drafter = self.drafters[name]
            for part in parts(batch):
                items = [self._item(session, asked[session], drafter, now) for session in part]
                if drafter.send is None or not drafter.send(Draft(drafter.epoch, items)):
                    unreached += part
        return unreached

    def _item(self, session: Session, k: int, drafter: DrafterState, now: float) -> DraftItem:
        draws = self._draws(session)
        branches = self.config.draft_ahead if drafter.forks and not draws and self.ahead.on else 0
        tells = self.config.verify_budget is not None and not draws  # the weights of drawn ones say it
        return draft_item(session, k, now, self.config.max_tokens, draws=draws, branches=branches, log_probs=tells)

    def _draws(self, session: Session) -> bool:
        """Whether its drafts are drawn from weights and verified by rejection."""
        if self.config.verification == "coupled" or session.request.sampling.temperature <= 0:
            return False
        drafter = self._drafters.of(session.drafts)
        return drafter is not None and drafter.draws

    # --- answers

    def verified(self, rounds: Iterable[tuple[Session, int, int]], seconds: float, now: float) -> None:
        """What a pass of so many seconds found: (session, right draft tokens, drafted). A drafter whose drafts come
        long after plain decoding would have been done, none of them right, costs time like one that does not answer."""
        useless: dict[str, float] = {}
        for session, right, drafted in rounds:
            self._controller.compared(session, right, drafted)
            name = session.drafts.drafter or ""
            took = 0.0 if right else session.drafts.took
            useless[name] = min(useless.get(name, took), took)
        for name, took in useless.items():
            drafter = self.drafters.get(name)
            if drafter is not None and took > USELESS_PASSES * seconds:
                drafter.wasted(took, now)

    def arrived(self, name: str, message: Drafted, now: float) -> None:
        """Takes a drafter's answers. One that is usable, or at least came in time, ends its suspicion."""
        drafter = self.drafters.get(name)
        if drafter is None:
            return
        drafter.handled += 1
        if message.epoch != drafter.epoch or not drafter.up:
            return
        if message.branches is not None:
            self._sent_ahead(drafter, message, message.branches, now)
            return
        again, patience = {}, drafter.deadline()
        seconds = 0.0
        counts = [len(item.tokens) // 4 for item in message.items]
        every_weight = weights_of_items(message.weights, counts)
        log_probs = log_probs_of_items(message.log_probs, counts)
        for item, weights, chances in zip(message.items, every_weight, log_probs, strict=True):
            session = self.sessions.get(item.session)
            if session is None or session.drafts.drafter != name or item.held > len(session.tokens):
                continue
            sent = session.drafts.answered(item.position)
            in_time = False
            if sent is not None and item.status == OK:
                seconds = now - sent
                session.drafts.took = seconds if session.drafts.awaited else 0.0
                if session.drafts.wanted:  # else it only read what it was sent
                    drafter.answered(seconds)
                in_time = seconds <= patience
            session.drafts.log_probs, session.drafts.log_probs_from = chances, item.position
            if self._take(session, item, weights, drafter, now):
                again[session] = self._draft_length(session, drafter, now) if session.drafts.wanted else 0
            if drafter.suspect and (in_time or session.drafts.proposal):
                drafter.kept_up()
                self._log.tell(self.drafters, now)
        if seconds:
            drafter.drafted(message, seconds)
        if again:
            self._send(again, now)

    def _sent_ahead(self, drafter: DrafterState, message: Drafted, branches: Sequence[Branches], now: float) -> None:
        """Drafts for what may follow the proposals under way; one that is waited for by now is used at once."""
        for item, its_branches in zip(message.items, branches, strict=True):
            session = self.sessions.get(item.session)
            if session is None or session.drafts.drafter != drafter.name or item.held > len(session.tokens):
                continue
            state = session.drafts
            if not state.branches_asked:
                continue
            state.unanswered_since = None
            acknowledge(session, item.held)
            if branches_arrived(session, item, its_branches, self._vocabulary_size):
                wait, _ = drafter.round_trip(state.wanted)
                waited = now - state.sent_at.get(len(session.tokens), now)
                state.saved = max(0.0, min(0.99, 1.0 - waited / wait)) if wait else 0.0

    def _take(
        self, session: Session, item: DraftedItem, weights: Sequence[Weights], drafter: DrafterState, now: float
    ) -> bool:
        """Applies one answer. True when the drafter lacks tokens that are to be sent again at once."""
        state = session.drafts
        state.unanswered_since = None
        if item.status == UNKNOWN:
            if state.resent:  # once a round is enough for any honest drafter
                return False
            state.resent = True
            doubled = item.held == state.acknowledged  # or the tokens before base differ: start over, later
            state.acknowledged = 0 if doubled else item.held
            state.check = check_hash(session.tokens[: state.acknowledged])
            state.caught_up = state.awaited = False
            return not doubled
        advanced = acknowledge(session, item.held)
        if item.status == OK:
            state.caught_up = True
            if weights and self._draws(session):
                propose_drawn(session, item, weights, self._vocabulary_size)
            else:
                right, drafted = propose(session, item, self._vocabulary_size)
                self._controller.compared(session, right, drafted)
        else:
            state.awaited = False
            if item.status == WARMING:
                state.caught_up = False
            elif item.status == FULL:
                drafter.full_until = now + item.retry_after_ms / 1000.0
                state.refused_until[drafter.name] = drafter.full_until
            elif item.status == BEYOND:
                state.refused_until[drafter.name] = math.inf
        return advanced and state.cut
