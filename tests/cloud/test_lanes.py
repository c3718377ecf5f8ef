"""Lanes: prompt chunks between their rounds, their balance, and each waiting for its own drafts."""

from __future__ import annotations

from collections import defaultdict

import pytest

from paceline.topology.wire import (
    pack_tokens,
)

from .helpers import VOCABULARY, Bench, FakeDrafter, always_right, ask, plain


@pytest.mark.parametrize("lanes", [1, 2])
def test_one_prompt_chunk_between_two_rounds_of_a_lane(lanes: int) -> None:
    """While others decode, a long prompt takes at most one chunk a round; alone it takes chunk after chunk."""
    bench = Bench(drafters=(), lanes=lanes, prefill_chunk=8)
    bench.submit(*[ask(f"r{i}", [i], 100, seed=i) for i in range(4)])
    for _ in range(3):
        bench.engine.step()
    bench.submit(ask("long", [t % VOCABULARY for t in range(60)], 30))
    bench.model.passes.clear()
    for _ in range(40):
        bench.engine.step()
    chunks = [[s for s in segments if len(s.tokens) > 1] for segments in bench.model.passes]
    assert max(len(some) for some in chunks) == 1
    assert sum(len(some) for some in chunks) == 8
    assert [len(some[0].tokens) for some in chunks if some] == [8] * 7 + [4]
    between: dict[int, int] = defaultdict(int)  # chunks since the last round of each session
    for segments in bench.model.passes:
        carried = sum(len(s.tokens) > 1 for s in segments)
        rounds = [s.span.key for s in segments if len(s.tokens) == 1]
        for key in (1, 2, 3, 4):  # the spans of the sessions that decode
            between[key] += carried
            assert between[key] <= 1
            if key in rounds:
                between[key] = 0
    alone = Bench(drafters=(), prefill_chunk=8)
    alone.submit(ask(prompt=[0] * 60))
    for _ in range(8):
        assert alone.engine.step()
    assert len(alone.ids["r"]) == 1


def test_new_sessions_join_the_smaller_lane_and_lanes_stay_in_balance() -> None:
    """Four sessions are two and two; when both of one lane end, one of the others moves over after its round."""
    bench = Bench(lanes=2)
    requests = [ask(f"r{i}", [i], length, seed=i) for i, length in enumerate([200, 4, 200, 4])]
    drafter = FakeDrafter(bench)
    drafter.oracle = always_right(requests)
    drafter.up()
    bench.submit(*requests)
    bench.engine.step()
    sizes = [len(lane.sessions) for lane in bench.engine._lanes]
    assert sizes == [2, 2]
    while len(bench.ends) < 2:
        bench.engine.step()
    for _ in range(3):
        bench.engine.step()
    assert sorted(len(lane.sessions) for lane in bench.engine._lanes) == [1, 1]
    bench.finish()
    assert bench.ids["r0"] == plain(ask("r0", [0], 200, seed=0))
    assert bench.ids["r2"] == plain(ask("r2", [2], 200, seed=2))


def test_without_a_drafter_all_sessions_go_in_one_pass() -> None:
    """Lanes hide drafting; where nobody drafts, several passes would only cost time. With the drafter they return."""
    bench = Bench(lanes=2)
    requests = [ask(f"r{i}", [i], 400, seed=i) for i in range(4)]
    drafter = FakeDrafter(bench)
    drafter.oracle = always_right(requests)
    drafter.up()
    bench.submit(*requests)
    bench.engine.step()
    assert [len(lane.sessions) for lane in bench.engine._lanes] == [2, 2]
    drafter.down()
    for _ in range(3):
        bench.engine.step()
    bench.model.passes.clear()
    for _ in range(3):
        assert bench.engine.step()
    assert [len(segments) for segments in bench.model.passes] == [4, 4, 4]
    drafter.up()
    bench.engine.step()
    bench.engine.step()
    assert [len(lane.sessions) for lane in bench.engine._lanes] == [2, 2]
    bench.finish()
    assert {r.id: bench.ids[r.id] for r in requests} == {r.id: plain(r) for r in requests}


def test_a_session_that_moves_to_another_lane_is_drafted_for() -> None:
    """Moving costs no draft: the session is asked for in the lane it moved to."""
    bench = Bench(lanes=2)
    requests = [ask(f"r{i}", [i + 1], length, seed=i) for i, length in enumerate([60, 6, 60, 6])]
    drafter = FakeDrafter(bench)
    drafter.oracle = always_right(requests)
    drafter.up()
    bench.submit(*requests)
    while len(bench.ends) < 2:
        if not bench.engine.step():
            bench.clock.advance(0.01)
    statistics = bench.engine.statistics
    assert sorted(len(lane.sessions) for lane in bench.engine._lanes) == [0, 2]
    plain_before = statistics.rounds - statistics.drafted_rounds
    while sorted(len(lane.sessions) for lane in bench.engine._lanes) != [1, 1]:
        bench.engine.step()
    for _ in range(8):
        bench.engine.step()
    assert statistics.rounds - statistics.drafted_rounds == plain_before
    bench.finish()
    assert {r.id: bench.ids[r.id] for r in requests} == {r.id: plain(r) for r in requests}


def test_lanes_wait_each_for_its_own_drafts() -> None:
    """While one lane awaits its drafts the other one goes, turn by turn."""
    bench = Bench(lanes=2)
    requests = [ask("a", [1], seed=1), ask("b", [2], seed=2)]
    drafter = FakeDrafter(bench)
    drafter.up()
    bench.submit(*requests)
    bench.engine.step()
    for item in list(drafter.drafts):
        drafter.answer(item)
    while bench.engine.step():
        pass
    a, b = (next(i.session for i in drafter.drafts if i.prompt_length and i.tokens == pack_tokens([t])) for t in (1, 2))
    have = len(bench.ids["b"])
    for _ in range(3):
        drafter.answer(drafter.last(a), plain(requests[0])[len(bench.ids["a"]) :][:4])
        assert bench.engine.step()
        assert not bench.engine.step()
    assert len(bench.ids["b"]) == have
    drafter.answer(drafter.last(b), plain(requests[1])[have : have + 4])
    assert bench.engine.step()
    assert bench.ids["b"] == plain(requests[1])[: have + 5]
