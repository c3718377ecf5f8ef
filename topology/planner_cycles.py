"""Round times of unlike targets that share drafters: the formulas of core/costs.py where targets differ.

Each lane of a target goes round in T = max(S + R, L·V) as long as its drafters keep up. Where one does not, all of
its targets wait for their turns: max(T + W · turns, L · W · turns), with the W that it needs to keep up. With equal
targets that is T = max(N·L·S/m, S + R, L·V).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.costs import join_wait_seconds, lane_draft_seconds
from paceline.topology.planner_inputs import DrafterTimes, Group

ROUNDS = 40
UNLIKE = 0.5  # rounds of unlike lanes do not lock: a Draft comes at any moment of the turns before it
HALVINGS = 60
SETTLED = 1e-6


@dataclass(frozen=True)
class Load:
    """A group of equal targets at work. sessions: decoded in all lanes of one target; drafted: how many of them get
    drafts."""

    group: Group
    lanes: int
    k: int
    sessions: float
    drafted: float

    @property
    def filled(self) -> int:
        """Lanes that have a session."""
        return max(1, min(self.lanes, math.ceil(self.sessions - 1e-9)))

    @property
    def verified(self) -> float:
        """Draft tokens of a session in a pass: k, or what a budget has room for if it is shared out evenly."""
        budget = self.group.verify_budget
        if budget is None or not self.drafted:
            return float(self.k)
        return min(float(self.k), budget * self.filled / self.drafted)

    @property
    def tokens(self) -> float:
        """Of one pass of the target."""
        return (self.sessions + self.drafted * self.verified) / self.filled

    @property
    def verify(self) -> float:
        """V in seconds."""
        return self.group.verify.ms(self.tokens) / 1000.0


@dataclass(frozen=True)
class Cycle:
    """One lane's round in seconds. shares: of each drafter, how many of one target's lanes it drafts for on average."""

    draft: float
    verify: float
    wait: float
    seconds: float
    shares: Mapping[str, float]


def cycles(loads: Sequence[Load], drafters: Mapping[str, DrafterTimes]) -> list[Cycle]:
    """The steady state of all groups together, by iteration."""
    state = [_plain(load) for load in loads]
    served = {
        name: [i for i, load in enumerate(loads) if _drafts(load) and name in load.group.drafters] for name in drafters
    }
    rooms = {name: _room(drafters[name], [loads[i] for i in users]) for name, users in served.items() if users}
    for _ in range(ROUNDS):
        before = state
        free = [_uncontended(load, i, state, loads, drafters, served, rooms) for i, load in enumerate(loads)]
        state = _contended(free, loads, drafters, served, rooms)
        if all(_near(new, old) for new, old in zip(state, before, strict=True)):
            break
    return state


def _near(new: Cycle, old: Cycle) -> bool:
    return abs(new.seconds - old.seconds) <= SETTLED * old.seconds and abs(new.draft - old.draft) <= SETTLED * old.draft


def _drafts(load: Load) -> bool:
    return load.k > 0 and load.drafted > 0 and bool(load.group.drafters)


def _plain(load: Load) -> Cycle:
    return Cycle(0.0, load.verify, 0.0, load.filled * load.verify, {})


def _lane_sessions(load: Load) -> float:
    """Of one lane, at each of its drafters."""
    return load.drafted / load.filled / len(load.group.drafters)


def _room(drafter: DrafterTimes, users: Sequence[Load]) -> float:
    """Lanes that a draft step can hold, of those that there are."""
    lanes = sum(load.group.count * load.filled for load in users)
    sessions = sum(load.group.count * load.filled * _lane_sessions(load) for load in users)
    return max(1.0, min(drafter.messages, drafter.sequences / (sessions / lanes), float(lanes)))


def _uncontended(
    load: Load,
    index: int,
    state: Sequence[Cycle],
    loads: Sequence[Load],
    drafters: Mapping[str, DrafterTimes],
    served: Mapping[str, list[int]],
    rooms: Mapping[str, float],
) -> Cycle:
    """A lane's round where no drafter makes it wait for its turn, given how the others load the drafters now."""
    if not _drafts(load):
        return _plain(load)
    group, draft, wait = load.group, 0.0, 0.0
    shares = {}
    for name in group.drafters:
        spec, users, room = drafters[name], served[name], rooms[name]
        lanes = sum(loads[i].group.count * loads[i].filled for i in users)
        busy = sum(loads[i].group.count * state[i].shares.get(name, 0.0) for i in users)
        mine = state[index].shares.get(name, 0.0) / load.filled
        batch = min(room, 1.0 + max(0.0, busy - mine))
        b = _lane_sessions(load)
        full = group.agreement**load.k
        seconds = lane_draft_seconds(
            spec.step, b, load.k, spec.token_ms, batch=batch, most=spec.sequences, full_acceptance=full
        )
        shares[name] = seconds
        draft = max(draft, seconds)
        if room > 1.0:
            alone = lanes == load.filled
            share = mine if alone or lanes < 2 else max(0.0, busy - mine) / (lanes - 1)
            wait = max(wait, join_wait_seconds(seconds / load.k, share, lanes - 1, one_target=alone))
    cycle = max(draft + wait + group.rtt + load.verify, load.filled * load.verify)
    lane_shares = {name: load.filled * seconds / cycle for name, seconds in shares.items()}
    return Cycle(draft, load.verify, wait, cycle, lane_shares)


def _contended(
    free: Sequence[Cycle],
    loads: Sequence[Load],
    drafters: Mapping[str, DrafterTimes],
    served: Mapping[str, list[int]],
    rooms: Mapping[str, float],
) -> list[Cycle]:
    """The same where drafters are shared: rounds that a drafter cannot keep up with become longer by a wait."""
    waits = [0.0] * len(free)
    for name, users in served.items():
        if not users:
            continue
        costs = [_cost(loads[i], drafters[name]) for i in users]
        lanes = [loads[i].group.count * loads[i].filled for i in users]
        usual = math.fsum(cost * count for cost, count in zip(costs, lanes, strict=True)) / sum(lanes)
        unlike = UNLIKE if len(users) > 1 else 0.0
        queued = [
            _Queued(loads[i].group.count * free[i].shares[name], free[i].seconds, cost / usual, loads[i].filled, unlike)
            for i, cost in zip(users, costs, strict=True)
        ]
        wait = _wait(queued, rooms[name])
        for i, one in zip(users, queued, strict=True):
            waits[i] = max(waits[i], one.round(wait) - one.seconds)
    return [_longer(cycle, wait) for cycle, wait in zip(free, waits, strict=True)]


class _Queued(NamedTuple):
    """A group at a drafter: lanes that are drafted for at a time as long as nobody waits, the round then, what a Draft
    costs of the usual one (fair queueing), lanes of a target, and how much of its turn it waits among unlike ones."""

    share: float
    seconds: float
    cost: float
    lanes: int
    unlike: float

    def round(self, turn: float) -> float:
        """T where the usual Draft's turn comes every `turn` seconds."""
        return max(self.seconds + self.unlike * turn * self.cost, self.lanes * turn * self.cost)


def _cost(load: Load, drafter: DrafterTimes) -> float:
    """Tokens that a lane's Draft counts at the drafter, over its target's weight. Sessions are items of their own where
    a step counts sessions; where it counts messages the rest of one comes along with its first."""
    items = 1.0 if drafter.messages < math.inf else _lane_sessions(load)
    return items * (load.k + 2) / load.group.weight


def _wait(queued: Sequence[_Queued], room: float) -> float:
    """The W ≥ 0 with which a drafter is just busy; 0 where it keeps up without."""

    def busy(wait: float) -> float:
        return sum(one.share * one.seconds / one.round(wait) for one in queued)

    if busy(0.0) <= room * (1 + 1e-12):
        return 0.0
    low, high = 0.0, sum(one.share * one.seconds for one in queued) / room
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if busy(middle) > room else (low, middle)
    return high


def _longer(cycle: Cycle, wait: float) -> Cycle:
    """A round with so much waiting for the drafter in it."""
    factor = cycle.seconds / (cycle.seconds + wait)
    shares = {name: share * factor for name, share in cycle.shares.items()}
    return Cycle(cycle.draft, cycle.verify, cycle.wait + wait, cycle.seconds + wait, shares)
