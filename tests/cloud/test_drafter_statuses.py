"""Answers that are no drafts: unknown, full, beyond, warming."""

from __future__ import annotations

import pytest

from paceline.topology.wire import (
    MAX_FRAME_BYTES,
    Status,
    check_hash,
    unpack_tokens,
)

from .helpers import Bench, FakeDrafter, always_right, ask, plain


@pytest.mark.parametrize("held", [0, 2, 4])
def test_unknown_is_answered_from_what_is_held(held: int) -> None:
    """The tokens after `held` leave at once, with the hash of those before it; the lane does not wait."""
    bench = Bench()
    drafter, request, text = bench.opened()
    have = len(bench.ids["r"])
    committed = [*request.prompt, *text[:have]]
    bench.engine.drafting.sessions[drafter.last().session].drafts.acknowledged = 3
    drafter.answer(drafter.last(), status=Status.UNKNOWN, held=held)
    assert bench.engine.step()
    again = drafter.last()
    assert (again.base, unpack_tokens(again.tokens).tolist()) == (held, committed[held:])
    assert (again.check, again.k) == (check_hash(committed[:held]), 4)
    assert (again.sampling is not None) == (held == 0)
    assert bench.ids["r"] == text[: have + 1]
    drafter.answer(again, text[have : have + 4])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 5]


def test_unknown_twice_at_the_same_place_starts_over() -> None:
    """The drafter holds that many tokens, but others: the session is sent whole with the next round."""
    bench = Bench()
    drafter, request, _ = bench.opened()
    session = bench.engine.drafting.sessions[drafter.last().session]
    count = len(drafter.drafts)
    drafter.answer(drafter.last(), status=Status.UNKNOWN, held=session.drafts.acknowledged)
    assert bench.engine.step()
    item = drafter.last()
    assert len(drafter.drafts) == count + 1
    assert (item.base, item.check, item.sampling) == (0, 0, request.sampling)
    assert unpack_tokens(item.tokens).tolist() == [*request.prompt, *bench.ids["r"]]


def test_full_is_asked_again_after_its_time() -> None:
    """For retry_after_ms the session decodes plainly without waiting or asking; then it is asked again."""
    bench = Bench()
    drafter, _, text = bench.opened()
    drafter.answer(drafter.last(), status=Status.FULL, retry_after_ms=500)
    count = len(drafter.drafts)
    for _ in range(10):
        assert bench.engine.step()
    assert len(drafter.drafts) == count
    bench.clock.advance(0.501)
    assert bench.engine.step()
    assert len(drafter.drafts) == count + 1
    assert drafter.last().k == 4
    assert bench.ids["r"] == text[: len(bench.ids["r"])]


def test_beyond_is_never_asked_again_and_concerns_that_session_alone() -> None:
    """Past the drafter's window a session decodes plainly for good; another one is drafted for."""
    bench = Bench()
    drafter, _, text = bench.opened()
    drafter.answer(drafter.last(), status=Status.BEYOND)
    count = len(drafter.drafts)
    for _ in range(5):
        assert bench.engine.step()
        bench.clock.advance(3.0)
    assert len(drafter.drafts) == count
    bench.submit(ask("other", [5, 5], seed=4))
    assert bench.engine.step()
    assert drafter.last().prompt_length == 2
    bench.finish()
    assert bench.ids["r"] == text


def test_a_session_longer_than_the_drafters_context_asks_for_less() -> None:
    """k shrinks to what fits in the drafter's window, then the session is no longer asked for."""
    bench = Bench()
    request = ask(max_tokens=20)
    drafter = FakeDrafter(bench, context=11)
    drafter.oracle = always_right([request])
    drafter.up()
    bench.submit(request)
    bench.finish()
    assert bench.ids["r"] == plain(request)
    assert max(item.base + len(item.tokens) // 4 + item.k for item in drafter.drafts) == 11


def test_warming_is_not_waited_for() -> None:
    """A drafter that still reads is not waited for, until it has answered a draft."""
    bench = Bench()
    drafter, _, text = bench.opened()
    have = len(bench.ids["r"])
    drafter.answer(drafter.last(), status=Status.WARMING)
    assert bench.engine.step() and bench.engine.step()
    assert bench.ids["r"] == text[: have + 2]
    drafter.answer(drafter.last(), text[have + 1 : have + 5])
    assert bench.engine.step()
    assert bench.engine.statistics.drafted_rounds == 1
    assert bench.ids["r"] == text[: have + 6]
    assert not bench.engine.step()  # it is waited for again


def test_a_drafter_that_lacks_tokens_again_and_again_is_sent_them_once_a_round() -> None:
    """Alternating answers of `unknown` cost one Draft each round, not one each."""
    bench = Bench()
    drafter, _, text = bench.opened()
    count = len(drafter.drafts)
    for held in (1, 2, 1, 2, 1, 2, 1, 2):
        drafter.answer(drafter.last(), status=Status.UNKNOWN, held=held)
        bench.engine.step()
    rounds = bench.engine.statistics.rounds
    assert len(drafter.drafts) - count <= rounds + 2
    drafter.oracle = None
    bench.finish()
    assert bench.ids["r"] == text


def test_sessions_that_do_not_fit_into_one_draft_go_in_several() -> None:
    """A drafter comes up while many long sessions are open: no Draft is larger than a frame, and all get there."""
    bench = Bench(drafters="d", slots=1 << 20, max_sessions=128, prefill_chunk=6000)
    bench.submit(*[ask(f"r{i}", [(i + t) % 64 for t in range(6000)], 40, seed=i) for i in range(100)])
    for _ in range(4):
        bench.engine.step()
    drafter = FakeDrafter(bench, context=8192)
    drafter.up()
    bench.engine.step()
    opened = [item for item in drafter.drafts if item.base == 0]
    assert len({item.session for item in opened}) == 100
    assert max(map(len, drafter.frames)) < MAX_FRAME_BYTES / 2
    assert sum(map(len, drafter.frames)) > MAX_FRAME_BYTES / 2
