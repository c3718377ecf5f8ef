"""The simulation: equal to the formulas where nothing is left to chance, and what they cannot say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.core.costs import Situation, cycle_seconds, expected_tokens, throughput
from paceline.core.profile import StepTimes
from paceline.topology.simulation import simulate
from paceline.topology.simulation_world import (
    Fault,
    Outcome,
    Requests,
    SimulatedDrafter,
    SimulatedTarget,
    World,
)

ENDLESS = 10**9
STEP, K = StepTimes.constant(2.0), 4


def star(
    *,
    verify_ms: float = 20.0,
    targets: int = 1,
    lanes: int = 1,
    sessions: int = 1,
    rtt: float = 0.0,
    messages: int = 1,
    agreement: float = 1.0,
    seconds: float = 6.0,
    output: int = ENDLESS,
) -> World:
    """Equal targets on one drafter, from the first second on."""
    target = SimulatedTarget(
        StepTimes.constant(verify_ms),
        (0,),
        agreement=agreement,
        draft_length=K,
        lanes=lanes,
        rtt=rtt,
        requests=Requests(((1, output),), in_flight=sessions),
    )
    return World((SimulatedDrafter(STEP, max_messages=messages),), (target,) * targets, seconds, warm_up=1.0)


def situation(world: World) -> Situation:
    """The same for the formulas."""
    target, drafter = world.targets[0], world.drafters[0]
    return Situation(
        drafter.step,
        target.verify,
        target.agreement,
        rtt=target.rtt,
        sessions=target.requests.in_flight,
        targets=len(world.targets),
        lanes=target.lanes,
        messages=drafter.max_messages,
    )


@pytest.mark.parametrize("verify_ms", [4.0, 8.0, 16.0, 32.0])
@pytest.mark.parametrize("rtt", [0.0, 0.01, 0.08])
@pytest.mark.parametrize(("targets", "lanes"), [(1, 1), (1, 2), (1, 3), (2, 1), (4, 1), (4, 2), (16, 1)])
def test_a_serial_drafter_without_chance_is_what_the_formula_says(
    verify_ms: float, rtt: float, targets: int, lanes: int
) -> None:
    """S/V from 1/4 to 2, three distances, stars and lanes: rounds within 1 %, drafter use and tokens as well."""
    world = star(verify_ms=verify_ms, rtt=rtt, targets=targets, lanes=lanes, sessions=lanes)
    outcome, case = simulate(world), situation(world)
    cycle = cycle_seconds(case, K)
    assert outcome.groups[""].round_ms.mean == pytest.approx(cycle * 1e3, rel=0.01)
    assert outcome.utilization[0] == pytest.approx(targets * lanes * 0.008 / cycle, rel=0.02)
    one_round = lanes * (K + 1) / cycle / (5.0 / cycle)  # tokens that may fall on either side of the window's edges
    expected = throughput(case, K)
    assert outcome.total_tokens_per_s / targets == pytest.approx(expected, rel=0.01, abs=one_round)


@pytest.mark.parametrize(("targets", "lanes", "verify_ms"), [(1, 2, 4.0), (2, 1, 10.0), (8, 1, 20.0), (16, 1, 40.0)])
def test_a_batching_drafter_is_near_what_the_formula_says(targets: int, lanes: int, verify_ms: float) -> None:
    """Where steps are shared, the formula takes half a step for the wait to join one: within 5 %."""
    world = star(verify_ms=verify_ms, targets=targets, lanes=lanes, sessions=lanes, messages=64)
    varied = replace(world, variation=0.02, seconds=8.0)
    cycle = cycle_seconds(situation(world), K) * 1e3
    assert simulate(varied).groups[""].round_ms.mean == pytest.approx(cycle, rel=0.05)


@pytest.mark.parametrize("agreement", [0.3, 0.8, 0.95])
def test_chance_brings_the_expected_tokens(agreement: float) -> None:
    """The mean of many random rounds is A, at 64 sessions."""
    outcome = simulate(star(agreement=agreement, sessions=64, seconds=12.0))
    assert outcome.groups[""].bunch.mean == pytest.approx(expected_tokens(agreement, K), rel=0.01)


def test_the_same_world_has_the_same_outcome_and_another_seed_another() -> None:
    """Chance comes from the seed alone."""
    world = replace(star(agreement=0.7, targets=3, output=40), variation=0.1, jitter=0.001)
    assert simulate(world) == simulate(world)
    assert simulate(world) != simulate(replace(world, seed=1))


def test_requests_end_after_their_number() -> None:
    """Five requests of 21 tokens, two at a time: a first pass of 20 ms and four rounds of 28 ms each. The rate is
    that of the time in which both places were taken, two requests' worth from each."""
    world = star(sessions=2, output=21, seconds=600.0)
    target = replace(world.targets[0], requests=Requests(((5, 21),), in_flight=2, count=5))
    outcome = simulate(replace(world, targets=(target,), warm_up=0.0))
    assert outcome.groups[""].e2e_ms.count == 5
    assert outcome.seconds == pytest.approx(3 * (0.020 + 4 * 0.028))
    assert outcome.total_tokens_per_s == pytest.approx(2 * 2 * 21 / (2 * (0.020 + 4 * 0.028)))


def test_the_first_token_takes_the_prompts_chunks() -> None:
    """600 tokens in chunks of 256 at 10 ms + 0.1 ms a token: three passes."""
    verify = StepTimes(((1, 10.1), (101, 20.1)))
    target = SimulatedTarget(verify, requests=Requests(((600, 1),), count=1))
    outcome = simulate(World((), (target,)))
    assert outcome.groups[""].ttft_ms.mean == pytest.approx(3 * 10 + 60)


def test_a_poisson_process_brings_its_rate() -> None:
    """20 requests a second, for 50 seconds."""
    target = SimulatedTarget(StepTimes.constant(1.0), requests=Requests(((1, 1),), per_second=20.0))
    outcome = simulate(World((), (target,), seconds=50.0))
    assert outcome.groups[""].e2e_ms.count == pytest.approx(1000, abs=4 * math.sqrt(1000))


def test_variation_leaves_the_mean_and_spreads_the_rounds() -> None:
    """Passes that vary by 20 % make a single target's rounds vary and leave their mean."""
    calm, varied = simulate(star()), simulate(replace(star(seconds=30.0), variation=0.2))
    assert varied.groups[""].round_ms.mean == pytest.approx(calm.groups[""].round_ms.mean, rel=0.02)
    assert varied.groups[""].round_ms.std > 20 * max(calm.groups[""].round_ms.std, 0.05)


def test_a_long_message_waits_longer_unless_its_target_has_weight() -> None:
    """30 sessions of 6 tokens are 180, beside one of 24: its turn comes later, and sooner at twice the weight."""
    world = star(targets=8, messages=0, sessions=30, seconds=20.0)
    drafter = replace(world.drafters[0], max_sequences=30)
    small = replace(world.targets[0], requests=Requests(((1, ENDLESS),), in_flight=4), group="small")
    heavy = replace(world.targets[0], weight=2.0, group="heavy")
    groups = simulate(replace(world, drafters=(drafter,), targets=(*world.targets, small, heavy))).groups
    assert groups["small"].round_ms.mean < 0.6 * groups[""].round_ms.mean
    assert groups["heavy"].round_ms.mean < 0.85 * groups[""].round_ms.mean


def rate(outcome: Outcome) -> float:
    return outcome.total_tokens_per_s


def test_without_a_drafter_the_target_goes_on_plainly() -> None:
    """A drafter that is gone for good costs the speed of drafting and nothing else."""
    world = star()
    gone = replace(world.drafters[0], faults=(Fault(0.5, 1e9),))
    assert rate(simulate(replace(world, drafters=(gone,)))) == pytest.approx(50.0, rel=0.01)


def test_a_drafter_that_returns_is_used_again() -> None:
    """Gone from second 2 to 4 of 6: the rate is that of its parts."""
    world = replace(star(), warm_up=0.0)
    fault = replace(world.drafters[0], faults=(Fault(2.0, 4.0),))
    expected = (4 * 5 / 0.028 + 2 * 50.0) / 6
    assert rate(simulate(replace(world, drafters=(fault,)))) == pytest.approx(expected, rel=0.03)


def test_failover_keeps_the_rate() -> None:
    """With a second drafter only the moment of the change is lost, and the first one gets its sessions back."""
    world = replace(star(), warm_up=0.0)
    first = replace(world.drafters[0], faults=(Fault(2.0, 4.0),))
    target = replace(world.targets[0], drafters=(0, 1))
    outcome = simulate(replace(world, drafters=(first, world.drafters[0]), targets=(target,)))
    assert rate(outcome) == pytest.approx(5 / 0.028, rel=0.03)
    assert outcome.utilization[1] == pytest.approx(2 / 6 * 0.008 / 0.028, rel=0.1)
    assert outcome.utilization[0] == pytest.approx(4 / 6 * 0.008 / 0.028, rel=0.1)


def test_spread_uses_all_drafters() -> None:
    """Sessions go to where most room is: evenly, with equal drafters."""
    world = star(sessions=8, lanes=2)
    target = replace(world.targets[0], drafters=(0, 1, 2, 3), policy="spread")
    drafter = replace(world.drafters[0], max_sessions=16)
    outcome = simulate(replace(world, drafters=(drafter,) * 4, targets=(target,)))
    assert max(outcome.utilization) == pytest.approx(min(outcome.utilization), rel=0.01)


def test_a_drafter_that_hangs_costs_three_deadlines_and_then_nothing() -> None:
    """Its links stay up: the target gives up three times, decodes plainly, and finds it again by a probe."""
    world = replace(star(seconds=20.0), warm_up=0.0)
    hung = replace(world.drafters[0], faults=(Fault(5.0, 10.0, "hung"),))
    outcome = simulate(replace(world, drafters=(hung,)))
    assert outcome.missed == 3
    found_at_once = 15.0 * 5 / 0.028 + 5.0 * 50.0
    found_a_second_later = 14.0 * 5 / 0.028 + 6.0 * 50.0
    assert found_a_second_later * 0.98 < rate(outcome) * 20 < found_at_once * 1.01


def test_sessions_that_a_drafter_has_no_room_for_are_decoded_plainly() -> None:
    """Room for two of four sessions: half of the rounds have no draft."""
    world = star(sessions=4)
    outcome = simulate(replace(world, drafters=(replace(world.drafters[0], max_sessions=2),)))
    assert outcome.plain_rounds == pytest.approx(0.5, abs=0.02)


def test_late_messages_make_rounds_longer_by_what_they_are_late() -> None:
    """1 ms each way on average."""
    outcome = simulate(replace(star(seconds=30.0), jitter=0.001))
    assert outcome.groups[""].round_ms.mean == pytest.approx(30.0, rel=0.02)


def test_groups_have_figures_of_their_own() -> None:
    """A fast and a slow target on one drafter."""
    world = star(targets=2)
    fast, slow = world.targets[0], replace(world.targets[1], verify=StepTimes.constant(80.0), group="slow")
    groups = simulate(replace(world, targets=(fast, slow))).groups
    assert groups[""].round_ms.mean < 40 < 80 < groups["slow"].round_ms.mean


def test_a_large_star_is_simulated_quickly() -> None:
    """1 000 targets on 10 drafters for one second: some tens of thousands of events, each within 100 µs."""
    import time

    world = star(targets=100)
    targets = tuple(replace(world.targets[0], drafters=(i % 10,)) for i in range(1000))
    began = time.process_time()
    outcome = simulate(replace(world, drafters=world.drafters * 10, targets=targets, seconds=1.0, warm_up=0.0))
    assert outcome.events > 5000
    assert (time.process_time() - began) / outcome.events < 1e-4
