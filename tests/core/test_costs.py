"""The cost model: each formula against cases worked out by hand, and what must hold for all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import costs
from paceline.core.costs import Situation
from paceline.core.profile import StepTimes

V20 = StepTimes.constant(20.0)
ONE = Situation(StepTimes.constant(2.0), V20, agreement=0.8)  # S = 8 ms at k = 4, V = 20 ms, no link


@pytest.mark.parametrize(
    ("agreement", "k", "tokens"), [(0.8, 0, 1.0), (0.8, 1, 1.8), (0.5, 3, 1.875), (0.0, 8, 1.0), (1.0, 4, 5.0)]
)
def test_a_round_brings_a_geometric_series_of_tokens(agreement: float, k: int, tokens: float) -> None:
    """1 + a + a² + … + a^k."""
    assert costs.expected_tokens(agreement, k) == pytest.approx(tokens)


def test_rounds_to_an_end_are_counted_exactly() -> None:
    """Two tokens at k = 1 and a = 0.5: one round with probability a half, else two."""
    assert costs.expected_rounds(2, 0.5, 1) == pytest.approx(1.5)
    assert costs.expected_rounds(0, 0.5, 4) == 0.0
    assert costs.expected_rounds(7, 0.9, 0) == 7.0
    assert costs.expected_rounds(10, 1.0, 4) == 2.0


def test_long_outputs_take_their_length_over_a() -> None:
    """The part of a round at the end vanishes beside the rest."""
    assert costs.expected_rounds(5000, 0.8, 4) == pytest.approx(5000 / costs.expected_tokens(0.8, 4), rel=1e-3)


def test_drafting_is_k_passes_of_which_the_first_catches_up() -> None:
    """Three passes over 8 sequences, and 0.5 ms for each of their tokens; one more to read where all was accepted."""
    step = StepTimes.doubling(1.0, 0.5)
    assert costs.draft_seconds(step, 8, 3) == pytest.approx(3 * 1.5**3 / 1e3)
    assert costs.draft_seconds(step, 8, 3, 0.5, full_acceptance=0.25) == pytest.approx(
        (3 * 1.5**3 + (3 + 0.25) * 0.5 * 8) / 1e3
    )


def test_a_lane_larger_than_a_step_goes_in_several() -> None:
    """12 sessions, 8 at a time: one and a half batches of 8."""
    seconds = costs.lane_draft_seconds(StepTimes(((1, 1.0), (8, 2.0))), 12, 4, most=8)
    assert seconds == pytest.approx(1.5 * 4 * 2.0 / 1e3)


@pytest.mark.parametrize(
    ("targets", "lanes", "batch", "rtt", "seconds"),
    [
        (1, 1, 1, 0.0, 0.028),  # S + R
        (1, 1, 1, 0.080, 0.108),
        (8, 1, 1, 0.0, 0.064),  # N·S
        (1, 2, 1, 0.0, 0.040),  # L·V
        (4, 2, 1, 0.0, 0.064),  # N·L·S
        (16, 1, 4, 0.0, 0.032),  # four at a time
    ],
)
def test_a_round_is_the_longest_of_three(targets: int, lanes: int, batch: int, rtt: float, seconds: float) -> None:
    """The drafter's turn, the lane's own way, the target's turn; S = 8 ms, V = 20 ms."""
    assert costs.round_seconds(0.008, 0.020, rtt, targets=targets, lanes=lanes, batch=batch) == pytest.approx(seconds)


def test_plain_lanes_wait_for_the_target_only() -> None:
    """k = 0: three lanes of one pass each, wherever the drafter is."""
    assert costs.cycle_seconds(replace(ONE, sessions=3, lanes=3, rtt=1.0), 0) == pytest.approx(0.060)


@pytest.mark.parametrize(
    ("draft", "rtt", "lanes", "full"),
    [(0.008, 0.0, 1, 4), (0.020, 0.0, 1, 2), (0.020, 0.0, 2, 1), (0.002, 0.02, 1, 21)],
)
def test_n_full_by_hand(draft: float, rtt: float, lanes: int, full: int) -> None:
    """⌈(1 + R/S)/L⌉ with V = 20 ms."""
    assert costs.full_targets(draft, 0.020, rtt, lanes=lanes) == full


@given(st.floats(0.001, 0.1), st.floats(0.001, 0.1), st.floats(0.0, 0.1), st.integers(1, 4))
def test_n_full_is_the_first_number_without_idle_time(draft: float, verify: float, rtt: float, lanes: int) -> None:
    """By brute force: from there on N·L·S is no shorter than a lane's way round, one target earlier it is."""

    def idle(targets: int) -> bool:
        return targets * lanes * draft < (draft + rtt + verify) * (1 - 1e-6)

    full = costs.full_targets(draft, verify, rtt, lanes=lanes)
    assert not idle(full)
    assert full == 1 or idle(full - 1) or targets_are_close(full - 1, lanes, draft, verify, rtt)


def targets_are_close(targets: int, lanes: int, draft: float, verify: float, rtt: float) -> bool:
    """The exact tie, where the last bits decide."""
    return math.isclose(targets * lanes * draft, draft + rtt + verify, rel_tol=1e-5)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0])
def test_two_lanes_gain_s_plus_v_over_the_longer(ratio: float) -> None:
    """On a fast link, at equal lane size; twice at S = V."""
    assert costs.two_lane_gain(ratio * 0.02, 0.02) == pytest.approx((ratio + 1) / max(ratio, 1))


def test_throughput_of_one_session() -> None:
    """3.3616 tokens in 28 ms, against one in 20 ms."""
    assert costs.throughput(ONE, 4) == pytest.approx(3.3616 / 0.028)
    assert costs.plain_throughput(ONE) == pytest.approx(50.0)


def test_the_best_draft_length_by_brute_force() -> None:
    """The maximum over k, for a grid of situations."""
    for agreement in (0.3, 0.6, 0.9):
        for rtt in (0.0, 0.02, 0.08):
            for targets in (1, 4, 16):
                case = replace(ONE, agreement=agreement, rtt=rtt, targets=targets)
                rates = [costs.throughput(case, k) for k in range(17)]
                assert rates[costs.best_draft_length(case)] == max(rates)


def test_no_speculation_where_it_loses() -> None:
    """A drafter that is always wrong, or 80 ms away from one request, is worth nothing."""
    assert costs.best_draft_length(replace(ONE, agreement=0.0)) == 0
    assert costs.best_setting(replace(ONE, rtt=0.2)) == (1, 0)


def test_two_lanes_are_best_where_the_target_counts_tokens() -> None:
    """8 sessions, V = 10 ms + 0.25 ms a token: two half lanes hide the drafting, and the search finds them."""
    step, verify = StepTimes(((1, 1.5), (1001, 501.5))), StepTimes(((1, 10.25), (1001, 260.25)))
    case = Situation(step, verify, agreement=0.9, sessions=8)
    assert costs.best_setting(case) == (2, 5)
    rates = [costs.throughput(replace(case, lanes=count), k) for count in range(1, 9) for k in range(1, 17)]
    assert costs.throughput(replace(case, lanes=2), 5) == max(rates) > 1.5 * costs.plain_throughput(case)


def test_n_break_even_by_brute_force() -> None:
    """The largest N at which A/T is more than 1/t_plain, for several draft lengths and link times."""
    for k in (1, 2, 4, 8):
        for rtt in (0.0, 0.02, 0.2):
            case = replace(ONE, rtt=rtt)
            pays = [n for n in range(1, 200) if costs.throughput(replace(case, targets=n), k) > 50.0]
            assert costs.break_even_targets(case, k) == max(pays, default=0)
    assert costs.break_even_targets(replace(ONE, messages=math.inf), 4, most=1000) == 1000


@given(
    st.integers(1, 16),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.1),
    st.integers(1, 32),
    st.integers(1, 4),
    st.integers(1, 32),
)
def test_more_distance_more_targets_and_less_agreement_never_help(
    k: int, agreement: float, rtt: float, targets: int, lanes: int, messages: int
) -> None:
    """One target's rate falls, or stays, with each of them."""
    case = Situation(
        StepTimes.doubling(2.0, 0.1), V20, agreement, rtt, sessions=8, targets=targets, lanes=lanes, messages=messages
    )
    rate = costs.throughput(case, k)
    assert costs.throughput(replace(case, rtt=rtt + 0.01), k) <= rate * 1.001
    assert costs.throughput(replace(case, agreement=agreement * 0.9), k) <= rate * 1.001
    assert costs.throughput(replace(case, targets=2 * targets), k) <= rate * 1.001


def test_batching_serves_more_than_a_serial_drafter() -> None:
    """16 targets, a step that costs 10 % more with each doubling: at least 2.5 times the serial star."""
    serial = replace(ONE, step=StepTimes.doubling(2.0, 0.1), targets=16)
    assert costs.throughput(replace(serial, messages=16), 4) > 2.5 * costs.throughput(serial, 4)


def test_a_lane_that_joins_a_running_step_loses_half_of_it() -> None:
    """Two lanes of one target that are drafted for at the same time two thirds of the time; never when they are not."""
    assert costs.join_wait_seconds(0.002, 2 / 3, 1, one_target=True) == pytest.approx(0.001)
    assert costs.join_wait_seconds(0.002, 0.5, 1, one_target=True) == 0.0
    assert costs.join_wait_seconds(0.002, 0.5, 2, one_target=False) == pytest.approx(0.00075)
    assert costs.join_wait_seconds(0.002, 0.5, 0, one_target=True) == 0.0


def test_the_likeliest_outcomes_are_counted() -> None:
    """Full acceptance a^(k+1), a rejection at j with the right second choice a^j (1 − a) s, the largest first."""
    assert costs.ahead_hit_rate(0.8, 0.4, 4, 16) == pytest.approx(0.8**5 + 0.4 * (1 - 0.8**4))
    assert costs.ahead_hit_rate(0.8, 0.4, 4, 1) == pytest.approx(0.8**5)
    assert costs.ahead_hit_rate(0.3, 0.4, 2, 1) == pytest.approx(0.7 * 0.4)
    assert costs.ahead_hit_rate(0.8, 0.4, 0, 5) == costs.ahead_hit_rate(0.8, 0.4, 4, 0) == 0.0


def test_a_draft_made_ahead_saves_the_way_there_and_back() -> None:
    """A hit lasts V; one after another waits for its branch where S + round trip is more; a miss half a step more."""
    assert costs.way_round_seconds(0.008, 0.016, 0.008) == pytest.approx(0.032)
    half = 0.5 * 0.016 + 0.5 * 0.033
    assert costs.way_round_seconds(0.008, 0.016, 0.008, step=0.002, hits=0.5) == pytest.approx(half)
    assert costs.way_round_seconds(0.008, 0.016, 0.08, step=0.002, hits=1.0) == pytest.approx(0.088)
    assert costs.round_seconds(0.008, 0.016, 0.008, lanes=2, step=0.002, hits=0.5) == pytest.approx(0.032)


@pytest.mark.parametrize(("agreement", "k"), [(0.3, 1), (0.8, 4), (0.95, 8)])
def test_an_acceptance_length_says_what_the_agreement_was(agreement: float, k: int) -> None:
    """The formula of a round's tokens, solved for agreement; lengths that no agreement has give the nearest."""
    assert costs.agreement_of(costs.expected_tokens(agreement, k), k) == pytest.approx(agreement, abs=1e-5)
    assert costs.agreement_of(0.5, k) == pytest.approx(0.0, abs=1e-5)
    assert costs.agreement_of(k + 2.0, k) == pytest.approx(1.0, abs=1e-5)
