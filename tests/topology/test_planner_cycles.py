"""Steady rates of equal and of unlike targets: against the formulas of core/costs.py, and against the simulation."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from paceline.core.costs import Situation, throughput
from paceline.core.profile import StepTimes
from paceline.topology.planner_inputs import Conditions, DrafterTimes, Group, Inputs
from paceline.topology.planner_mix import world
from paceline.topology.planner_steady import (
    PLAIN,
    Setting,
    best_settings,
    choices_of,
    n_break_even,
    n_full,
    steady,
    total,
)
from paceline.topology.simulation import simulate

GROUP = Group(
    names=("t",),
    count=1,
    drafters=("d",),
    verify=StepTimes.constant(20.0),
    agreement=0.8,
    rtt=0.0,
    in_flight=1,
    lanes=1,
    draft_length=4,
    max_sessions=1024,
    prefill_chunk=256,
    weight=1.0,
    policy="failover",
    deadline=None,
)
SERIAL = DrafterTimes("d", StepTimes.constant(2.0), 0.0, 1, math.inf, 1 << 20)
FOUR = Setting(1, 4)


@pytest.mark.parametrize(("messages", "growing"), list(itertools.product((1, 4), (False, True))))
def test_equal_targets_follow_the_formulas(messages: int, growing: bool) -> None:
    """A grid of stars, lanes, sessions and distances, within 1 % of core/costs.py."""
    verify = StepTimes(((1, 20.0), (64, 24.0), (512, 80.0))) if growing else GROUP.verify
    for ratio, rtt, sessions, lanes, targets in itertools.product((0.25, 1, 2), (0, 0.08), (1, 4, 64), (1, 2), (1, 16)):
        drafter = replace(SERIAL, step=StepTimes.doubling(5.0 * ratio, 0.1), messages=messages)
        group = replace(GROUP, verify=verify, rtt=rtt, in_flight=sessions, count=targets)
        case = Situation(drafter.step, verify, 0.8, rtt, sessions, targets, lanes, messages)
        planned = steady([group], {"d": drafter}, [Setting(lanes, 4)])[0].tokens_per_s
        assert planned == pytest.approx(throughput(case, 4), rel=0.01)


@pytest.mark.parametrize("fast", [1, 4, 12])
def test_unlike_targets_follow_the_simulation(fast: int) -> None:
    """A quick target's rounds are short and a slow one's long, whether the drafter keeps up with them or not."""
    groups = (
        replace(GROUP, names=("fast",), count=fast, verify=StepTimes.constant(15.0), in_flight=2),
        replace(GROUP, names=("slow",), count=3, verify=StepTimes.constant(80.0), agreement=0.5),
    )
    settings = [Setting(2, 4), Setting(1, 2)]
    inputs = Inputs(groups, {"d": SERIAL}, Conditions(1, 10**9), emulated=True)
    outcome = simulate(replace(world(inputs, settings, seconds=30.0, warm_up=5.0), variation=0.02))
    for group, one in zip(groups, steady(groups, inputs.drafters, settings), strict=True):
        figures = outcome.groups[group.names[0]]
        assert one.cycle.seconds * 1e3 == pytest.approx(figures.round_ms.mean, rel=0.12)
        assert one.tokens_per_s == pytest.approx(figures.tokens_per_s, rel=0.12)


def test_a_real_drafter_counts_sessions() -> None:
    """A lane of 12 sessions at 8 a step takes one and a half batches; weight decides who waits where turns are long."""
    drafter = replace(SERIAL, messages=math.inf, sequences=8)
    one = steady([replace(GROUP, in_flight=12)], {"d": drafter}, [FOUR])[0]
    assert one.cycle.draft == pytest.approx(0.012)
    many = replace(GROUP, in_flight=24, count=8)
    light, heavy = steady([many, replace(many, names=("h",), count=1, weight=4.0)], {"d": drafter}, [FOUR, FOUR])
    assert heavy.cycle.seconds < 0.5 * light.cycle.seconds


def test_spread_divides_sessions_evenly_and_failover_takes_the_first() -> None:
    """Each of two drafters drafts for half a lane; with a step that costs by its sequences that is quicker."""
    step = StepTimes(((1, 1.0), (9, 9.0)))
    drafters = {name: replace(SERIAL, name=name, step=step) for name in ("d", "e")}
    both = replace(GROUP, in_flight=8, drafters=("d", "e"), policy="spread")
    alone = steady([replace(both, drafters=("d",))], drafters, [FOUR])[0]
    spread = steady([both], drafters, [FOUR])[0]
    assert alone.cycle.draft == pytest.approx(4 * 0.008)
    assert spread.cycle.draft == pytest.approx(4 * 0.004)
    assert set(spread.cycle.shares) == {"d", "e"}
    assert set(alone.cycle.shares) == {"d"}


def test_sessions_without_room_bring_one_token_a_round() -> None:
    """Room for half of the sessions of two targets."""
    group = replace(GROUP, in_flight=4, count=2)
    one = steady([group], {"d": replace(SERIAL, max_sessions=4)}, [FOUR])[0]
    assert one.drafted == 0.5
    assert one.tokens_per_s == pytest.approx((2 * 3.3616 + 2) / one.cycle.seconds)


def test_n_full_and_n_break_even_by_brute_force() -> None:
    """Idle time ends at N_full; the rate falls under plain decoding's after N_break-even."""
    drafters = {"d": SERIAL}

    def many(count: int) -> Group:
        return replace(GROUP, count=count)

    idle = [n for n in range(1, 40) if _busy(steady([many(n)], drafters, [FOUR])[0], n) < 1 - 1e-9]
    assert n_full(steady([GROUP], drafters, [FOUR])[0], drafters) == max(idle) + 1
    pays = [n for n in range(1, 40) if total([many(n)], steady([many(n)], drafters, [FOUR])) > 50.0 * n]
    assert n_break_even(GROUP, FOUR, drafters) == max(pays)
    assert n_break_even(replace(GROUP, rtt=1.0), FOUR, drafters) == 0
    assert n_break_even(GROUP, FOUR, {"d": replace(SERIAL, messages=math.inf)}) is None
    assert n_full(steady([GROUP], drafters, [PLAIN])[0], drafters) is None


def _busy(one: object, count: int) -> float:
    return count * one.cycle.shares["d"]  # type: ignore[attr-defined, no-any-return]


def test_the_best_settings_are_those_of_all_groups_together() -> None:
    """16 targets share a serial drafter: a short draft for all beats the length that is best for one alone."""
    drafters = {"d": SERIAL}
    assert best_settings([GROUP], drafters)[0].draft_length == 6
    assert best_settings([replace(GROUP, count=16)], drafters)[0].draft_length == 1
    assert best_settings([replace(GROUP, rtt=0.5)], drafters) == [PLAIN]


def test_auto_leaves_open_what_a_number_fixes() -> None:
    """auto for lanes, at most one for each request; auto for k; both; neither."""
    assert choices_of(GROUP) == [FOUR]
    assert {one.lanes for one in choices_of(replace(GROUP, lanes=None, in_flight=3))} == {1, 2, 3}
    assert [one.draft_length for one in choices_of(replace(GROUP, draft_length=None))] == list(range(17))
