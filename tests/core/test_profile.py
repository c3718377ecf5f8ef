"""Step times: a curve over the size of a pass."""

from __future__ import annotations

import pytest

from paceline.core.clock import ManualClock
from paceline.core.emulated import Pace, ToyLanguage, ToyModel
from paceline.core.model import Segment
from paceline.core.profile import StepTimes


@pytest.mark.parametrize(("size", "ms"), [(1, 10.0), (0, 10.0), (2, 11.0), (3, 12.0), (11, 20.0), (19, 28.0)])
def test_the_curve_is_straight_between_points_and_goes_on_beyond_them(size: float, ms: float) -> None:
    """Flat before the first point, and beyond the last as between the last two."""
    assert StepTimes(((1, 10.0), (3, 12.0), (7, 16.0))).ms(size) == pytest.approx(ms)


def test_a_single_point_is_a_constant() -> None:
    """One number holds for every size."""
    assert {StepTimes.constant(2.5).ms(size) for size in (1, 8, 4096)} == {2.5}


@pytest.mark.parametrize("points", [((1, 0.0),), ((1, 0.0), (8, 0.0)), ((1, 1.0), (8, 0.5))])
def test_no_pass_takes_no_time(points: tuple[tuple[int, float], ...]) -> None:
    """A free one takes a microsecond, and so does what a falling curve comes to: rates are finite."""
    assert StepTimes(points).ms(100) == 1e-3


@pytest.mark.parametrize(("size", "ms"), [(1, 2.0), (2, 2.2), (4, 2.42), (16, 2.9282), (3, 2.31)])
def test_doubling_costs_a_tenth_more(size: int, ms: float) -> None:
    """Ten percent more with every doubling of the batch."""
    assert StepTimes.doubling(2.0, 0.1).ms(size) == pytest.approx(ms)


def test_a_pace_adds_what_sequences_and_tokens_cost() -> None:
    """8 sequences with 12 tokens: the step's curve by sequences, the pass's by tokens, and each token."""
    pace = Pace(StepTimes.doubling(1.0, 0.5), 0.5, StepTimes(((1, 10.0), (101, 110.0))))
    assert pace.seconds(12, 8) == pytest.approx((1.5**3 + 21.0 + 6.0) / 1e3)


class FakeSleepyClock(ManualClock):
    """Not a real clock: each sleep takes 0.1 ms longer than it should."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds + 1e-4)


def test_passes_are_paced_without_drift() -> None:
    """A pass makes up for what the last one took too long; one that was much too late is not caught up with."""
    clock = FakeSleepyClock()
    model = ToyModel(ToyLanguage(16), pace=Pace(forward_ms=2.0), clock=clock)
    span = model.allocate(200)
    assert span is not None
    for place in range(100):
        model.forward([Segment(span, place, [1], 1)])
    assert clock.now() == pytest.approx(0.2 + 1e-4, abs=1e-6)
    ManualClock.sleep(clock, 0.5)
    started = clock.now()
    model.forward([Segment(span, 100, [1], 1)])
    assert clock.now() - started == pytest.approx(0.002, abs=1e-6)
