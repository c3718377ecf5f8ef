"""How long a round waits for its draft, and what misses and late replies change."""

from __future__ import annotations

import pytest

from paceline.cloud.drafters import DrafterState
from paceline.topology.wire import Drafted, DraftedItem, Welcome, pack_tokens

from .helpers import VOCABULARY, Bench, ask, plain


def miss(bench: Bench, times: int) -> None:
    for _ in range(times):
        assert not bench.engine.step()
        bench.clock.advance(0.101)
        assert bench.engine.step()


def test_three_misses_make_a_lane_plain_with_one_probe_a_second() -> None:
    """Two misses still wait; after the third nothing is waited for and one Draft a second leaves."""
    bench = Bench()
    drafter, _, text = bench.opened(ask(max_tokens=400))
    miss(bench, 3)
    count = len(drafter.drafts)
    for _ in range(50):
        assert bench.engine.step()
        bench.clock.advance(0.01)
    assert len(drafter.drafts) == count  # the third round's own request was the probe
    bench.clock.advance(0.6)
    assert bench.engine.step() and bench.engine.step()
    assert len(drafter.drafts) == count + 1
    assert drafter.last().k == 4
    assert bench.ids["r"] == text[: len(bench.ids["r"])]


def test_two_misses_and_a_draft_begin_the_count_anew() -> None:
    """A draft in time between misses keeps the lane waiting."""
    bench = Bench()
    drafter, _, text = bench.opened(ask(max_tokens=400))
    miss(bench, 2)
    have = len(bench.ids["r"])
    drafter.answer(drafter.last(), text[have : have + 4])
    assert bench.engine.step()
    miss(bench, 2)
    assert not bench.engine.step()


@pytest.mark.parametrize("useful", [True, False])
def test_an_answer_to_the_probe_ends_plain_decoding(useful: bool) -> None:
    """A late draft that can be used, or one that came in time and could not, makes the lane wait again."""
    bench = Bench()
    drafter, _, text = bench.opened(ask(max_tokens=400))
    miss(bench, 3)
    assert bench.engine.step()
    have, item = len(bench.ids["r"]), drafter.last()
    at = item.base + len(item.tokens) // 4 - 3  # in the output
    if useful:
        bench.clock.advance(30.0)
        drafter.answer(item, text[at : at + 4])
    else:
        bench.clock.advance(0.05)
        drafter.answer(item, [(text[at] + 1) % VOCABULARY])
    assert bench.engine.step()
    assert len(bench.ids["r"]) > have
    assert drafter.last().base + len(drafter.last().tokens) // 4 == 3 + len(bench.ids["r"])
    assert not bench.engine.step()


def test_a_useless_answer_past_the_deadline_leaves_the_lane_plain() -> None:
    """A drafter that is slower than its deadline and never right in time is not waited for."""
    bench = Bench()
    drafter, _, text = bench.opened(ask(max_tokens=400))
    miss(bench, 3)
    assert bench.engine.step()
    item = drafter.last()
    at = item.base + len(item.tokens) // 4 - 3
    bench.clock.advance(0.2)
    drafter.answer(item, [(text[at] + 1) % VOCABULARY])
    assert bench.engine.step() and bench.engine.step() and bench.engine.step()


def test_deadline_is_twice_the_p99_of_arrivals_within_bounds() -> None:
    """1 s until 16 samples, then 2 × p99, 5 ms at least and 2 s at most; a fixed one is fixed."""
    state = DrafterState("d", None)
    for _ in range(15):
        state.arrivals.add(0.02)
    assert state.deadline() == 1.0
    state.arrivals.add(0.02)
    assert state.deadline() == pytest.approx(0.04)
    for value, expected in ((0.0001, 0.005), (9.0, 2.0), (0.1, 0.2)):
        for _ in range(256):
            state.arrivals.add(value)
        assert state.deadline() == pytest.approx(expected)
    assert DrafterState("d", 0.3).deadline() == 0.3


def test_a_late_reply_has_the_deadline_measured_anew_at_once() -> None:
    """When a link becomes slow, the third late reply moves the p99 of 256, and the deadline with it."""
    state = DrafterState("d", None)
    for _ in range(256):
        state.answered(0.01)
    assert state.deadline() == pytest.approx(0.02)
    for expected in (0.02, 0.02, 0.1):
        state.answered(0.05)
        assert state.deadline() == pytest.approx(expected)


def test_late_replies_count_towards_the_deadline() -> None:
    """A reply after the round has gone is still a measurement of send→arrival."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    bench.clock.advance(0.05)
    drafter.answer(item, text[have : have + 4])
    assert bench.engine.step()
    arrivals = bench.engine.drafting.drafters["d"].arrivals
    assert arrivals.percentile(100) == pytest.approx(0.151)


def test_a_drafter_that_answers_every_third_time_is_not_waited_for_for_long() -> None:
    """Never three misses in a row, yet half of the rounds are lost: the lane decodes plainly soon."""
    bench = Bench()
    drafter, _, text = bench.opened(ask(max_tokens=400))
    for _ in range(4):
        miss(bench, 2)
        have = len(bench.ids["r"])
        if not bench.engine.drafting.drafters["d"].suspect:
            drafter.answer(drafter.last(), text[have : have + 4])
            assert bench.engine.step()
    waited = bench.clock.now()
    for _ in range(40):
        assert bench.engine.step()
    assert bench.clock.now() == waited
    assert bench.ids["r"] == text[: len(bench.ids["r"])]


def test_misses_that_cost_much_time_make_a_drafter_suspect_sooner() -> None:
    """At a deadline of a second the second miss is one too many; at 5 ms only the third is."""
    for deadline, misses in ((1.0, 2), (0.005, 3)):
        state = DrafterState("d", deadline)
        for count in range(1, misses + 1):
            assert not state.suspect
            state.missed(float(count))
        assert state.suspect


def test_an_answer_to_an_older_version_is_no_measurement_after_a_newer_one() -> None:
    """A drafter that names a Draft of long ago does not stretch the deadline."""
    bench = Bench()
    drafter, _, text = bench.opened()
    old = drafter.last()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    drafter.answer(drafter.last(), text[len(bench.ids["r"]) :][:4])
    assert bench.engine.step()
    count = bench.engine.drafting.drafters["d"].arrivals.count
    bench.clock.advance(1.5)
    drafter.answer(old, [0])
    bench.engine.step()
    assert bench.engine.drafting.drafters["d"].arrivals.count == count


def test_answers_of_a_drafter_that_had_stopped_do_not_stretch_the_deadline() -> None:
    """It hung for ten seconds and then answered all at once: the next hang costs what the first one did."""
    state = DrafterState("d", None)
    for _ in range(64):
        state.answered(0.02)
    assert state.deadline() == pytest.approx(0.04)
    for count in range(3):
        state.missed(float(count))
    for _ in range(8):
        state.answered(10.0)
    state.kept_up()
    assert state.deadline() == pytest.approx(0.04)


def test_a_longer_draft_than_lately_is_waited_for_longer() -> None:
    """Twenty answers of four tokens came after 45 ms, 10 ms a token; sixteen tokens may take what they need, twice."""
    state = DrafterState("d", None)
    state.link_up(Welcome(1, "m", "s", 99, 4096, 16), lambda message: True, 0.0)
    for _ in range(20):
        state.answered(0.045)
        state.drafted(Drafted(1, [DraftedItem(1, 0, 0, 0, pack_tokens(range(4)))], 0, 40_000), 0.045)
    assert state.patience(4) == state.deadline() == pytest.approx(0.09)
    assert state.patience(16) == pytest.approx(2 * (0.005 + 0.16))
    state.fixed_deadline = 0.05
    assert state.patience(16) == 0.05


def test_how_long_a_prompt_is_read_says_nothing_about_drafts() -> None:
    """A session is opened and answered at once, without proposals: that is no sample; its first draft is one."""
    bench = Bench(deadline=None)
    drafter, _, text = bench.opened()
    assert len(bench.engine.drafting.drafters["d"].arrivals) == 0
    bench.clock.advance(0.05)
    drafter.answer(drafter.last(), text[1:5])
    assert bench.engine.step()
    assert bench.engine.drafting.drafters["d"].arrivals.percentile(99) == pytest.approx(0.05)


def test_who_joins_a_waiting_lane_does_not_make_it_wait_longer() -> None:
    """The lane goes when its first wait is over; the newcomer's drafter, whose time was not up, has missed nothing."""
    bench = Bench(drafters=("d", "e"), deadline=0.1, policy="spread")
    _, _, text = bench.opened(ask(max_tokens=30))
    started = bench.clock.now()
    bench.clock.advance(0.06)
    other = ask("s", prompt=(9, 9))
    bench.submit(other)
    assert bench.engine.step()  # its prompt; it joins the lane
    bench.clock.advance(0.05)
    assert bench.clock.now() > started + 0.1
    assert bench.engine.step()
    assert len(bench.model.passes[-1]) == 2
    assert [state._misses for state in bench.engine.drafting.drafters.values()] == [1, 0]
    bench.finish()
    assert bench.ids["r"] == text and bench.ids["s"] == plain(other)
