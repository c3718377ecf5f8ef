"""How long drafts are and how many lanes there are, chosen again and again from what was measured.

The model is the planner's (core/costs.py): a lane's round takes T = max(L·S, S + R, L·V) and gains A tokens a session.
Here S, R and V are what passes and answers of the last rounds took, with the time that Drafts waited at the drafter,
and A comes from how often each session's drafts were right. What the formula leaves out shows in how long rounds really
take (slips.py). k = 0 is plain decoding in one lane; then one session's draft is asked for now and then without being
waited for, so that a change for the better is seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.cloud.agreement import Agreement, Prior, prior_of
from paceline.cloud.ahead import NO_BRANCHES, Branching
from paceline.cloud.drafters import DrafterState
from paceline.cloud.sessions import Session
from paceline.cloud.slips import Setting, Slips
from paceline.core.costs import MAX_DRAFT_LENGTH, ahead_hit_rate, expected_tokens, round_seconds
from paceline.core.measured import Curve
from paceline.core.profile import StepTimes

FIRST_LENGTH = 4
DECIDE_ROUNDS = 8
KEPT_LANES, KEPT_LENGTH = 1.007, 1.003  # what is worth so much more if it is kept: sessions that move lose time
FIRST_REST, LONGEST_REST = 0.5, 30.0  # seconds of plain decoding after speculation was given up at once
BATCH_ROUNDS = 3  # until it is known well enough how many lanes a draft step holds
LANES = (1, 2, 3, 4, 6, 8)


class Plan(NamedTuple):
    """What holds until the next decision.

    least: a draft token is worth its place in the pass if it is right with this probability.
    """

    lanes: int
    draft_length: int
    least: float = 0.0

    def length(self, agreement: float) -> int:
        """Of a session whose drafts are right so often."""
        if self.least <= 0.0 or agreement >= 1.0 or self.draft_length == 0:
            return self.draft_length
        if agreement <= self.least:
            return 0
        return min(self.draft_length, int(math.log(self.least) / math.log(agreement)))


@dataclass(frozen=True)
class Freedom:
    """What the controller may choose. None: anything. verify_budget: draft tokens in a lane's pass, at most."""

    lanes: int | None = 1
    draft_length: int | None = FIRST_LENGTH
    verify_budget: int | None = None


class Controller:
    """One target's. All times in seconds."""

    def __init__(self, freedom: Freedom) -> None:
        self.verify = Curve()
        self.agreement = Agreement(window=2048)  # of all sessions, also of those that have ended
        self._prior = Prior()
        self._slips = Slips()
        self._rounds = 0
        self._rest, self._rest_until, self._speculating_since = FIRST_REST, 0.0, 0.0
        self.set_freedom(freedom)

    def set_freedom(self, freedom: Freedom) -> None:
        """What the topology leaves open, now."""
        self.freedom = freedom
        length = FIRST_LENGTH if freedom.draft_length is None else freedom.draft_length
        self.plan = Plan(freedom.lanes or 1, length)

    # --- what was measured

    def verified(self, tokens: int, seconds: float, sessions: int) -> None:
        """A pass over so many tokens of a lane with so many sessions, without any prompt."""
        self.verify.add(tokens, seconds)
        self._slips.round(sessions)
        self._rounds += 1

    def disturbed(self) -> None:
        """Something else took time: rounds are longer now than the plan makes them."""
        self._slips.disturbed()

    def compared(self, session: Session, right: int, drafted: int) -> None:
        """Of a session's draft so many tokens were right before the first wrong one, or before its end."""
        tried = right + (right < drafted)
        session.drafts.agreement.add(right, tried)
        self.agreement.add(right, tried)

    def agreement_of(self, session: Session) -> float:
        """How often the session's draft tokens are right."""
        return session.drafts.agreement.value(self._prior)

    # --- what follows

    def length(self, session: Session) -> int:
        """The session's next draft length."""
        if self.freedom.draft_length is not None:
            return self.freedom.draft_length
        return self.plan.length(self.agreement_of(session))

    def decide(
        self,
        sessions: Sequence[Session],
        drafters: Iterable[DrafterState],
        now: float,
        branching: Branching = NO_BRANCHES,
    ) -> Plan:
        """The plan for the coming rounds; looked at anew every few rounds."""
        able = [drafter for drafter in drafters if drafter.reliable(now)]
        if not able:  # one pass over all is the quickest plain decoding
            return Plan(1, self.plan.draft_length, self.plan.least)
        free = self.freedom
        open_questions = free.lanes is None or free.draft_length is None
        due = self._rounds >= DECIDE_ROUNDS and self._rounds % self.plan.lanes == 0  # after whole rounds of all lanes
        if not (due and open_questions and sessions):
            return self.plan
        known = [drafter for drafter in able if drafter.step]
        if not self.verify or not known:
            return self.plan
        self._rounds = 0
        self._prior = prior_of([session.drafts.agreement for session in sessions], self.agreement.value(Prior()))
        agreements = [self.agreement_of(session) for session in sessions]
        times, budget = self.verify.times(), free.verify_budget
        outlook = _Outlook(times, known, agreements, self.plan, self._slips, budget, branching)
        setting = Setting(self.plan.lanes, self.plan.draft_length)
        self._slips.compare(setting, len(sessions), outlook.present_round(), now)
        self._change(outlook, now)
        return self.plan

    def _change(self, outlook: _Outlook, now: float) -> None:
        """Takes the best plan, the present one if none is clearly better."""
        free, present = self.freedom, self.plan
        lanes = [count for count in LANES if count <= outlook.sessions] if free.lanes is None else [free.lanes]
        lengths = range(MAX_DRAFT_LENGTH + 1) if free.draft_length is None else [free.draft_length]
        best, most = present, -1.0
        for count, k in itertools.product(lanes, lengths):
            if k == 0 and count != lanes[0]:
                continue
            kept = (KEPT_LANES if count == present.lanes else 1.0) * (KEPT_LENGTH if k == present.draft_length else 1.0)
            worth = kept * outlook.rate(count, k)
            if worth > most * (1 + 1e-9):
                best, most = Plan(count, k), worth
        if best.draft_length == 0 < present.draft_length:
            self._give_up(now)
        elif best.draft_length > 0 == present.draft_length:
            if now < self._rest_until:
                return
            self._speculating_since = now
        rate = outlook.rate(best.lanes, best.draft_length)
        self.plan = Plan(best.lanes, best.draft_length, outlook.least(best.lanes, best.draft_length, rate))

    def _give_up(self, now: float) -> None:
        """Speculation that is given up soon after it was taken up is not tried again so soon."""
        self._rest = min(2 * self._rest, LONGEST_REST) if now - self._speculating_since < 5.0 else FIRST_REST
        self._rest_until = now + self._rest


class _Outlook:
    """What a plan would bring, by what is known now."""

    def __init__(
        self,
        verify: StepTimes,
        drafters: Sequence[DrafterState],
        agreements: Sequence[float],
        present: Plan,
        slips: Slips,
        budget: int | None,
        branching: Branching,
    ) -> None:
        self.sessions = len(agreements)
        self._verify = verify
        self._drafters = drafters
        self._agreements = agreements
        self._lengths: dict[int, list[int]] = {}
        self._gains: dict[tuple[int, float], float] = {}
        self._present = present
        self._slips = slips
        self._budget = math.inf if budget is None else float(budget)
        self._branching = branching

    def rate(self, lanes: int, k: int) -> float:
        """Tokens a second of the target."""
        gain = self._gain(k, self._fitting(lanes, k))
        return gain / (self._round(lanes, k) * self._slips.of(Setting(lanes, k)))

    def _gain(self, k: int, fitting: float) -> float:
        """Tokens of all sessions in one round of each."""
        if (k, fitting) not in self._gains:
            each = (
                expected_tokens(a, fitting * length) for a, length in zip(self._agreements, self._of(k), strict=True)
            )
            self._gains[k, fitting] = math.fsum(each)
        return self._gains[k, fitting]

    def present_round(self) -> float:
        """T of the present plan, by the formula."""
        return self._round(self._present.lanes, self._present.draft_length)

    def least(self, lanes: int, k: int, rate: float) -> float:
        """The probability at which one more draft token in the pass brings as much as the time it takes is worth."""
        size, tokens = self.sessions / lanes, self._tokens(lanes, k)
        if tokens <= size:
            return 0.0
        more = (self._verify.ms(tokens) - self._verify.ms(size)) / 1000.0 / (tokens - size)
        return min(0.99, more * rate)

    def _of(self, k: int) -> list[int]:
        """The sessions' draft lengths, at present prices."""
        if k not in self._lengths:
            plan = self._present._replace(draft_length=k)
            self._lengths[k] = [plan.length(agreement) for agreement in self._agreements]
        return self._lengths[k]

    def _fitting(self, lanes: int, k: int) -> float:
        """The share of all drafts that the budget has room for. It is reckoned as if they were cut evenly."""
        return min(1.0, self._budget * lanes / max(1, sum(self._of(k))))

    def _tokens(self, lanes: int, k: int) -> float:
        """Of a lane's pass."""
        return (self.sessions + self._fitting(lanes, k) * sum(self._of(k))) / lanes

    def _verify_seconds(self, lanes: int, k: int) -> float:
        return self._verify.ms(self._tokens(lanes, k)) / 1000.0

    def _round(self, lanes: int, k: int) -> float:
        verify = self._verify_seconds(lanes, k)
        if k == 0:
            return lanes * verify
        size = self.sessions / lanes / len(self._drafters)
        return max(self._with_drafter(drafter, lanes, size, k, verify) for drafter in self._drafters)

    def _with_drafter(self, drafter: DrafterState, lanes: int, size: float, k: int, verify: float) -> float:
        """T of lanes that wait for this drafter. What others make them wait grows with k, for others choose alike."""
        if drafter.others < 0.5:
            return _cycle(drafter, lanes, size, k, verify, 0.0, self._hits(drafter, size, k))
        usual = drafter.drafted_length.value
        waiting = max(0.0, drafter.queue.value - self._own_queue(drafter)) * min(4.0, k / usual)
        return _cycle(drafter, lanes, size, k, verify, waiting, self._hits(drafter, size, k))

    def _hits(self, drafter: DrafterState, size: float, k: int) -> float:
        """Share of a lane's rounds in which every session finds its draft made ahead."""
        if not (self._branching.outcomes and drafter.forks):
            return 0.0
        agreement = math.fsum(self._agreements) / self.sessions
        hits = ahead_hit_rate(agreement, self._branching.second_choice, k, self._branching.outcomes)
        return float(hits ** max(1.0, size))

    def _own_queue(self, drafter: DrafterState) -> float:
        """How long a lane's Draft waits behind those of the target's own other lanes, as things are."""
        lanes, k = self._present.lanes, self._present.draft_length
        size = self.sessions / lanes / len(self._drafters)
        verify = self._verify_seconds(lanes, k)
        alone = k * drafter.step.times().ms(size) / 1000.0 + drafter.rtt.value + verify
        return max(0.0, _cycle(drafter, lanes, size, k, verify, 0.0) - max(alone, lanes * verify))


def _cycle(
    drafter: DrafterState, lanes: int, size: float, k: int, verify: float, waiting: float, hits: float = 0.0
) -> float:
    """T of lanes at a drafter, which drafts for several of them together where they would else wait for one another.

    hits: share of their rounds whose drafts were made ahead.
    """
    step, rtt = drafter.step.times(), drafter.rtt.value + waiting
    one = step.ms(size) / 1000.0
    alone = round_seconds(k * one, verify, rtt, lanes=lanes, step=one, hits=hits)
    most = drafter.together(lanes, size)
    if most == 1:
        return alone
    batch, together = 1.0, alone
    for _ in range(BATCH_ROUNDS):
        draft = k * step.ms(size * batch) / 1000.0
        together = round_seconds(draft, verify, rtt, lanes=lanes, batch=most)
        batch = min(most, 1.0 + (lanes - 1) * draft / together)  # the others are there for S of each T
    return min(alone, together)
