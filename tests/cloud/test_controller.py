"""The controller: which draft length and how many lanes follow from what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cloud.agreement import Agreement, Prior
from paceline.cloud.ahead import NO_BRANCHES, Branching
from paceline.cloud.controller import Controller, Freedom, Plan
from paceline.cloud.drafters import DrafterState
from paceline.cloud.sessions import Session
from paceline.core.costs import Situation, best_setting, cycle_seconds, throughput
from paceline.core.measured import Average, Curve
from paceline.core.model import Span
from paceline.core.profile import StepTimes
from paceline.topology.wire import Drafted, DraftedItem, Welcome, pack_tokens

from .helpers import TOKEN_BYTES, ask


def drafter(step: float, rtt: float, sizes: list[int], k: int = 4, queue: float = 0.0) -> DrafterState:
    """One that has answered often: so many seconds a step, for Drafts of those sizes."""
    state = DrafterState("d", None)
    state.link_up(Welcome(1, "m", "s", 99, 4096, 16), lambda message: True, 0.0)
    for size in sizes:
        items = [DraftedItem(number, 0, 0, 0, pack_tokens(range(k))) for number in range(size)]
        message = Drafted(1, items, int(queue * 1e6), int(step * k * 1e6))
        for _ in range(20):
            state.drafted(message, rtt + queue + step * k)
    return state


def sessions(count: int, right: int = 8, tried: int = 10) -> list[Session]:
    """Sessions whose drafts were right so often, for long."""
    made = [Session(number, ask(f"r{number}"), TOKEN_BYTES, Span(number, 0, 64)) for number in range(count)]
    for session in made:
        for _ in range(60):
            session.drafts.agreement.add(right, tried)
    return made


def decided(
    controller: Controller,
    open_sessions: list[Session],
    drafters: list[DrafterState],
    now: float = 1.0,
    branching: Branching = NO_BRANCHES,
) -> Plan:
    for _ in range(3):
        for _ in range(10):
            controller.verified(1, controller.verify.times().ms(1) / 1000, len(open_sessions))
        plan = controller.decide(open_sessions, drafters, now, branching)
    return plan


def measured(verify: StepTimes, freedom: Freedom | None = None) -> Controller:
    controller = Controller(freedom or Freedom(None, None))
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for _ in range(20):
            controller.verified(size, verify.ms(size) / 1000, 1)
    return controller


@pytest.mark.parametrize("rtt", [0.0, 0.02, 0.08])
@pytest.mark.parametrize("step", [0.001, 0.004, 0.02])
@pytest.mark.parametrize("count", [1, 8, 16])
def test_the_plan_is_the_best_setting_of_the_cost_model(count: int, step: float, rtt: float) -> None:
    """With everything measured it chooses as the planner would, but for what is worth less than a hundredth."""
    verify = StepTimes(((1, 20.0), (64, 30.0), (256, 80.0)))
    plan = decided(measured(verify), sessions(count), [drafter(step, rtt, [1, 2, 4, 8, 16])])
    case = Situation(StepTimes.constant(1000 * step), verify, 0.8, rtt=rtt, sessions=count)
    lanes, k = best_setting(case, lanes=(1, 2, 3, 4, 6, 8))
    assert (plan.draft_length == 0) == (k == 0)
    if k:
        best = throughput(replace(case, lanes=lanes), k)
        assert throughput(replace(case, lanes=plan.lanes), plan.draft_length) >= 0.98 * best


def test_a_session_whose_drafts_are_wrong_gets_none() -> None:
    """Where a place in the pass has a price, sessions with agreement below it decode plainly, the others go on."""
    verify = StepTimes(((1, 10.0), (64, 60.0)))
    good, bad = sessions(4, 9, 10), sessions(4, 0, 10)
    controller = measured(verify)
    plan = decided(controller, [*good, *bad], [drafter(0.0005, 0.0, [1, 2, 4, 8])])
    assert plan.draft_length >= 2
    assert controller.length(good[0]) > 1 and controller.length(bad[0]) == 0


def test_drafts_made_ahead_make_speculation_pay_where_it_would_not() -> None:
    """Agreement 0.4, a link of half a pass: plain without branches, two or three tokens with all of them."""
    link = drafter(0.002, 0.008, [1])
    link.forks = True
    one = sessions(1, 4, 10)
    assert decided(measured(StepTimes.constant(16)), one, [link]).draft_length == 0
    assert decided(measured(StepTimes.constant(16)), one, [link], branching=Branching(8, 0.6)).draft_length in (2, 3)


def test_what_is_fixed_stays_fixed() -> None:
    """A number in the topology is kept whatever was measured; only what is auto is chosen."""
    slow = [drafter(0.2, 0.5, [1, 2, 4, 8])]
    assert decided(measured(StepTimes.constant(10), Freedom(2, 3)), sessions(8), slow)[:2] == (2, 3)
    assert decided(measured(StepTimes.constant(10), Freedom(2, None)), sessions(8), slow)[:2] == (2, 0)


def test_without_a_reliable_drafter_there_is_one_lane() -> None:
    """Several passes over parts only hide drafting."""
    controller = measured(StepTimes.constant(10), Freedom(4, 3))
    down = DrafterState("d", None)
    assert controller.decide(sessions(8), [down], 0.0).lanes == 1
    assert controller.decide(sessions(8), [drafter(0.001, 0.0, [1])], 0.0).lanes == 4


def test_a_gain_under_a_hundredth_changes_nothing() -> None:
    """Hysteresis: the plan stays until another one promises enough more."""
    controller = measured(StepTimes.constant(20))
    state = [drafter(0.004, 0.0, [1, 2, 4, 8])]
    plan = decided(controller, sessions(1), state)
    for right in (81, 80, 79, 81, 80):
        assert decided(controller, sessions(1, right, 100), state) == plan


def test_a_setting_that_disappoints_is_left_for_the_next_best() -> None:
    """Its rounds take a quarter longer than the model says, as when lanes keep meeting at the drafter."""
    verify, step = StepTimes(((1, 20.0), (64, 30.0))), StepTimes.constant(5.0)
    controller, state, open_sessions = measured(verify), [drafter(0.005, 0.0, [1, 2, 4, 8])], sessions(8)
    case = Situation(step, verify, 0.8, sessions=8, messages=8)
    now, worst, chosen = 1.0, None, []
    for _ in range(12):
        plan = controller.plan
        seconds = cycle_seconds(replace(case, lanes=plan.lanes), plan.draft_length)
        for _ in range(8 * plan.lanes):
            controller.verified(8 // plan.lanes, verify.ms(8 // plan.lanes) / 1000, 8 // plan.lanes)
        now += 8 * seconds * (1.25 if plan[:2] == worst else 1.0)
        chosen.append(controller.decide(open_sessions, state, now)[:2])
        worst = chosen[0]
    assert chosen[0] == chosen[1] != chosen[-1]
    assert throughput(replace(case, lanes=chosen[-1][0]), chosen[-1][1]) > 0.9 * throughput(
        replace(case, lanes=worst[0]), worst[1]
    )


def test_speculation_that_fails_at_once_is_tried_again_later_and_later() -> None:
    """Given up twice within seconds: the second rest is longer than the first."""
    controller = measured(StepTimes.constant(20))
    good, bad = [drafter(0.001, 0.0, [1])], [drafter(0.3, 0.0, [1])]
    assert decided(controller, sessions(1), good, 0.0).draft_length > 0
    rests = []
    now = 1.0
    for _ in range(2):
        assert decided(controller, sessions(1), bad, now).draft_length == 0
        start = now
        while decided(controller, sessions(1), good, now).draft_length == 0:
            now += 0.1
        rests.append(now - start)
        now += 0.5
    assert rests[1] > 1.5 * rests[0] > 0.4


def test_times_of_a_peer_are_taken_within_what_passed_here() -> None:
    """A drafter that claims an hour of drafting in a round of 10 ms is believed 10 ms."""
    state = DrafterState("d", None)
    state.drafted(Drafted(1, [DraftedItem(1, 0, 0, 0, pack_tokens([1, 2]))], 3_600_000_000, 3_600_000_000), 0.01)
    state.drafted(Drafted(1, [DraftedItem(1, 0, 0, 0, pack_tokens([1, 2]))], -5, -5), 0.01)
    assert state.step.times().ms(1) <= 5.0 and 0 <= state.queue.value <= 0.01 and 0 <= state.rtt.value <= 0.01


def test_a_curve_never_falls_and_averages_fade() -> None:
    """Noise does not make larger passes look quicker; an average follows a change within its window."""
    curve = Curve()
    for size, seconds in ((1, 0.010), (8, 0.009), (64, 0.020)):
        curve.add(size, seconds)
    times = curve.times()
    assert times.ms(1) == times.ms(8) == pytest.approx(10.0) and times.ms(64) == pytest.approx(20.0)
    average = Average(4)
    for sample in (1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0):
        average.add(sample)
    assert 4.5 < average.value < 5.0


def test_agreement_counts_what_was_compared() -> None:
    """Three right and then a wrong one is three of four; a prior fills in for a new session."""
    agreement = Agreement(window=1000)
    assert agreement.value(Prior(0.6, 8.0)) == pytest.approx(0.6)
    agreement.add(3, 4)
    assert agreement.value(Prior(0.6, 0.0)) == pytest.approx(0.75)
    assert 0.6 < agreement.value(Prior(0.6, 8.0)) < 0.75


def test_with_a_budget_drafts_are_no_longer_than_it_has_room_for() -> None:
    """What is drafted and not verified costs time and brings nothing."""
    verify, state = StepTimes(((1, 20.0), (256, 24.0))), [drafter(0.002, 0.0, [1, 2, 4, 8, 16])]
    free = decided(measured(verify, Freedom(1, None)), sessions(16), state)
    bound = decided(measured(verify, Freedom(1, None, verify_budget=32)), sessions(16), state)
    assert bound.draft_length == 2 < free.draft_length
