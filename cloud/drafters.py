"""The drafters of a target: who is up, who can be relied on, and which of them serves a session."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from paceline.cloud.sessions import DraftState, Session
from paceline.core.measured import Average, Curve
from paceline.core.percentiles import Window
from paceline.topology.handshake import DRAFT_AHEAD, REJECTION
from paceline.topology.wire import Drafted, Message, Welcome

FIRST_DEADLINE = 1.0
DEADLINE_SAMPLES = 16
MIN_DEADLINE, MAX_DEADLINE = 0.005, 2.0
MISSES_BEFORE_SUSPECT = 3
RECENT_ROUNDS = 0xFFFF  # a mask: the last 16
MISSES_OF_RECENT = 8
MOST_LOST_SECONDS, FADING = 1.5, 15 / 16
FIRST_SUSPICION, LONGEST_SUSPICION = 2.0, 30.0  # seconds until others trust it with sessions again
RETURN_SECONDS = 1.0  # a drafter that is back must have stayed so long before sessions leave another for it
SMOOTHING = 0.3  # of what a drafter says once a second about sessions of other targets

Policy = Literal["failover", "spread"]


class DrafterState:
    """One drafter as this target sees it. `send` is None while its link is down.

    It is `suspect` after three rounds with a miss in a row, when half of the last rounds missed, or when misses have
    cost too much time: its sessions move to another drafter, or stay, are not waited for, and one of them probes it
    once a second. Any draft that counts ends that, but what was missed before is not forgotten at once.
    """

    def __init__(self, name: str, fixed_deadline: float | None) -> None:
        self.name = name
        self.send: Callable[[Message], bool] | None = None
        self.epoch = 0
        self.max_context = 0
        self.max_draft_length = 0
        self.max_batch = 0
        self.max_messages = 0
        self.max_sessions = 0
        self.draws = False  # it can draw from weights and send them along
        self.forks = False  # it can draft ahead
        self.up_at = 0.0
        self.full_until = 0.0
        self.others = 0.0  # sessions of other targets that it holds, as it last said
        self.handled = 0  # answers looked at, ever
        self.arrivals = Window(256)
        self.step = Curve()  # of one draft token, over the sessions of a Draft
        self.queue = Average(32)  # seconds that a Draft waits at the drafter
        self.rtt = Average(32)  # of a Draft and its answer, without what the drafter did meanwhile
        self.drafted_length = Average(32)
        self.suspect = False
        self.probe_at = 0.0
        self.fixed_deadline = fixed_deadline
        self._misses = 0  # in a row
        self._recent = 0  # a bit for each of the last rounds: missed or not
        self._lost = 0.0  # seconds that were waited for nothing, fading
        self._suspicion = FIRST_SUSPICION
        self._trust_at = 0.0
        self._measured_deadline, self._measured_at = FIRST_DEADLINE, 0

    @property
    def up(self) -> bool:
        return self.send is not None

    def link_up(self, welcome: Welcome, send: Callable[[Message], bool], now: float) -> None:
        """A new link: it holds nothing of ours and is owed a fresh start."""
        self.send, self.epoch, self.up_at = send, welcome.epoch, now
        self.max_context, self.max_draft_length = welcome.max_context, welcome.max_draft_length
        self.max_sessions = welcome.max_sessions
        self.max_batch, self.max_messages = welcome.max_batch, welcome.max_messages
        self.draws = REJECTION in welcome.capabilities
        self.forks = DRAFT_AHEAD in welcome.capabilities
        self.full_until = self._lost = 0.0
        self._recent = 0
        self.kept_up()

    def together(self, lanes: int, size: float) -> int:
        """How many of so many lanes, each with so many sessions, it drafts for in one step; 1 where it does not say."""
        messages = lanes if self.max_messages == 0 else min(lanes, self.max_messages)
        return max(1, min(messages, int(self.max_batch / size)))

    # --- the circuit breaker

    def wasted(self, seconds: float, now: float) -> None:
        """A draft was waited for for so long, and none of it was right."""
        self._lost = min(self._lost + seconds, 2 * MOST_LOST_SECONDS)
        self._judge(now)

    def missed(self, now: float) -> None:
        """A round went without a draft that it was waited for."""
        self._misses += 1
        self._recent = (self._recent << 1 | 1) & RECENT_ROUNDS
        self._lost = min(self._lost + self.deadline(), 2 * MOST_LOST_SECONDS)
        self._judge(now)

    def _judge(self, now: float) -> None:
        often = self._recent.bit_count() >= MISSES_OF_RECENT
        if not self.suspect and (self._misses >= MISSES_BEFORE_SUSPECT or often or self._lost >= MOST_LOST_SECONDS):
            self.suspect = True
            self._trust_at = now + self._suspicion
            self._suspicion = min(2 * self._suspicion, LONGEST_SUSPICION)

    def kept_up(self) -> None:
        """A draft of it counted."""
        self._misses = 0
        self._recent = self._recent << 1 & RECENT_ROUNDS
        self._lost *= FADING
        self.suspect = False

    def reliable(self, now: float) -> bool:
        """Whether sessions of others may come to it: half-open once its time of suspicion is over."""
        if self.suspect and now >= self._trust_at:
            self.suspect, self._misses = False, MISSES_BEFORE_SUSPECT - 1
        return self.up and not self.suspect

    # --- what was measured

    def drafted(self, message: Drafted, seconds: float) -> None:
        """An answer with proposals came so long after it was asked for; a peer's own times are taken within that."""
        lengths = [len(item.tokens) // 4 for item in message.items if item.tokens]
        if not lengths:
            return
        draft = min(max(message.draft_us, 0) / 1e6, seconds)
        queue = min(max(message.queue_us, 0) / 1e6, seconds - draft)
        if message.draft_us:  # else it had them already
            self.step.add(len(lengths), draft / max(lengths))
        self.queue.add(queue)
        self.rtt.add(seconds - draft - queue)
        self.drafted_length.add(max(lengths))

    def round_trip(self, k: int) -> tuple[float, float]:
        """Seconds from a Draft to its answer with k tokens, and of one draft step; 0 where nothing is known yet."""
        step = self.step.times().ms(1) / 1000.0 if self.step else 0.0
        return self.rtt.value + self.queue.value + k * step, step

    # --- the deadline

    def answered(self, seconds: float) -> None:
        """A draft came so long after it was asked for. One past the deadline has it measured anew at once; what comes
        seconds late from one that had stopped says nothing about how it drafts."""
        if self.suspect and seconds > FIRST_DEADLINE:
            return
        self.arrivals.add(seconds)
        if seconds > self._measured_deadline:
            self._measured_at = -DEADLINE_SAMPLES

    def deadline(self) -> float:
        """Seconds to wait for a draft: 2 × the p99 of send→arrival, late replies included."""
        if self.fixed_deadline is not None:
            return self.fixed_deadline
        if len(self.arrivals) < DEADLINE_SAMPLES:
            return FIRST_DEADLINE
        if self.arrivals.count - self._measured_at >= DEADLINE_SAMPLES:
            self._measured_at = self.arrivals.count
            self._measured_deadline = min(max(2 * self.arrivals.percentile(99), MIN_DEADLINE), MAX_DEADLINE)
        return self._measured_deadline

    def patience(self, k: int) -> float:
        """Seconds to wait for a draft of so many tokens: more than lately take longer, which is no failure."""
        if self.fixed_deadline is not None:
            return self.fixed_deadline
        return min(max(self.deadline(), 2 * self.round_trip(k)[0]), MAX_DEADLINE)


class Drafters:
    """All drafters of a target, in order of preference, and the policy by which sessions get theirs.

    failover: the first that is up, and back to it when it returns. spread: the one with the largest free share.
    """

    def __init__(self, names: Iterable[str], policy: Policy, deadline: float | None) -> None:
        self.by_name: dict[str, DrafterState] = {}
        self.configure(names, policy, deadline)

    def configure(self, names: Iterable[str], policy: Policy, deadline: float | None) -> None:
        """Takes on another configuration; drafters that are in both keep their state."""
        self.policy = policy
        self.by_name = {name: self.by_name.get(name) or DrafterState(name, deadline) for name in names}
        self._first = next(iter(self.by_name.values()), None)
        for drafter in self.by_name.values():
            drafter.fixed_deadline = deadline

    def of(self, state: DraftState) -> DrafterState | None:
        """The drafter of a session while its link is up."""
        drafter = self.by_name.get(state.drafter or "")
        return drafter if drafter is not None and drafter.up else None

    def choose(self, session: Session, sessions: Mapping[int, Session], now: float) -> DrafterState | None:
        """Who is to draft for a session from now on; its present drafter where nobody else would do better."""
        own = self.of(session.drafts)
        content = own is not None and not own.suspect and _has_place(own, session, now)
        if content and (own is self._first or self.policy == "spread"):
            return own
        places = [drafter for drafter in self.by_name.values() if drafter.up and _has_place(drafter, session, now)]
        able = [drafter for drafter in places if drafter.reliable(now)]
        if not able:
            return own or next(iter(places), None)
        able = [drafter for drafter in able if now >= drafter.full_until or drafter is own] or able
        if self.policy == "spread":
            return self._freest(able, session, sessions)
        best = able[0]
        if content and now < best.up_at + RETURN_SECONDS:
            return own
        return best

    def _freest(self, able: list[DrafterState], session: Session, sessions: Mapping[int, Session]) -> DrafterState:
        """The largest free share; equals are taken in an order that differs from session to session."""
        mine = dict.fromkeys(self.by_name, 0)
        for other in sessions.values():
            if other is not session and other.drafts.drafter in mine:
                mine[other.drafts.drafter] += 1

        def taken(drafter: DrafterState) -> tuple[float, int]:
            share = (mine[drafter.name] + drafter.others) / max(1, drafter.max_sessions)
            return share, zlib.crc32(f"{session.request.id} {drafter.name}".encode())

        return min(able, key=taken)

    def said_room(self, name: str, free_sessions: int, sessions: Mapping[int, Session]) -> None:
        """A drafter told how many more sessions it could hold: the rest that is not ours belongs to other targets."""
        drafter = self.by_name.get(name)
        if drafter is None or not 0 <= free_sessions <= drafter.max_sessions:
            return
        mine = sum(session.drafts.drafter == name for session in sessions.values())
        others = max(0, drafter.max_sessions - free_sessions - mine)
        drafter.others += SMOOTHING * (others - drafter.others)


def _has_place(drafter: DrafterState, session: Session, now: float) -> bool:
    """Nothing is known that would make it refuse the session."""
    refused_until = session.drafts.refused_until.get(drafter.name, 0.0)
    return now >= refused_until and len(session.tokens) < drafter.max_context
