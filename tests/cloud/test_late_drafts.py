"""Drafts that come late, twice, for another place or from another run."""

from __future__ import annotations

import pytest

from paceline.topology.wire import (
    DraftItem,
)

from .helpers import EPOCH, VOCABULARY, Bench


def test_a_late_draft_is_trimmed_and_used() -> None:
    """After a missed deadline the round goes plain; of the reply that comes then, all but the first token counts."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 1]
    assert bench.engine.statistics.fallback_rounds == 2  # the first round had no draft either
    assert not bench.engine.step()
    drafter.answer(item, text[have : have + 4])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 5]
    assert bench.engine.statistics.drafted_tokens == 3


def test_a_late_draft_that_did_not_come_true_is_dropped() -> None:
    """A reply whose first token is not what was committed is no draft; the lane waits on for the right one."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    drafter.answer(item, [(text[have] + 1) % VOCABULARY, *text[have + 1 : have + 4]])
    assert not bench.engine.step()
    drafter.answer(drafter.last(), text[have + 1 : have + 5])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 6]


@pytest.mark.parametrize("shift", [-60, -2, 1, 50])
def test_a_draft_for_another_position_changes_nothing(shift: int) -> None:
    """Positions before what was asked, or beyond what is committed, are no draft for this round."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    at = item.base + len(item.tokens) // 4
    drafter.answer(item, [9, 9, 9, 9], position=max(0, at + shift))
    assert not bench.engine.step()
    bench.clock.advance(0.101)
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 1]
    assert bench.engine.statistics.drafted_tokens == 0


def test_a_doubled_answer_is_used_once() -> None:
    """The second copy of a reply whose tokens are all committed is no draft."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    drafter.answer(item, text[have : have + 4])
    assert bench.engine.step()
    drafter.answer(item, text[have : have + 4])
    assert not bench.engine.step()
    assert bench.engine.statistics.drafted_rounds == 1
    assert bench.ids["r"] == text[: have + 5]


@pytest.mark.parametrize("wrong", ["epoch", "session", "held"])
def test_answers_of_another_run_session_or_future_are_dropped(wrong: str) -> None:
    """Another epoch, an unknown session, more held than was ever committed: nothing happens."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have, item = len(bench.ids["r"]), drafter.last()
    draft = text[have : have + 4]
    if wrong == "epoch":
        drafter.answer(item, draft, epoch=EPOCH - 1)
    elif wrong == "session":
        drafter.answer(DraftItem(item.session + 1, item.base, item.tokens, item.check, item.k), draft)
    else:
        drafter.answer(item, draft, held=10_000)
    assert not bench.engine.step()
    drafter.answer(item, draft)
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 5]
