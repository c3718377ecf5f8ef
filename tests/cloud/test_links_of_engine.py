"""Links that go down and come up, sessions that move with them, and what a round costs on the wire."""

from __future__ import annotations

import pytest

from paceline.topology.wire import (
    Draft,
    Drafted,
    decode,
    encode,
    unpack_tokens,
)

from .helpers import EPOCH, Bench, FakeDrafter, always_right, ask


def test_a_drafter_whose_link_is_down_is_not_waited_for() -> None:
    """The lane goes on in the same turn, without time passing, and nothing is sent."""
    bench = Bench()
    drafter, _, text = bench.opened()
    count = len(drafter.frames)
    drafter.down()
    before = bench.clock.now()
    for _ in range(5):
        assert bench.engine.step()
    assert bench.clock.now() == before
    assert len(drafter.frames) == count
    assert bench.ids["r"] == text[: len(bench.ids["r"])]


def test_link_up_sends_open_sessions_again() -> None:
    """A drafter that is back holds nothing: all committed tokens and the sampling leave at once."""
    bench = Bench()
    drafter, request, text = bench.opened()
    drafter.down()
    assert bench.engine.step()
    again = FakeDrafter(bench, epoch=77)
    again.up()
    assert bench.engine.step()
    have = len(bench.ids["r"])
    item = again.drafts[0]
    assert (item.base, item.k, item.sampling, item.prompt_length) == (0, 0, request.sampling, 3)
    assert unpack_tokens(item.tokens).tolist() == [*request.prompt, *text[: have - 1]]
    again.answer(item)
    drafter.answer(drafter.last(), [7, 7], epoch=EPOCH)  # of the run that is gone
    assert bench.engine.step()
    have = len(bench.ids["r"])
    assert (again.last().base, again.last().k) == (len(unpack_tokens(item.tokens)), 4)
    again.answer(again.last(), text[have : have + 4])
    assert bench.engine.step()
    assert bench.ids["r"] == text[: have + 5]


def test_sessions_go_to_the_next_drafter_when_theirs_is_gone() -> None:
    """With two drafters the second takes over from the first, with the whole session."""
    bench = Bench(drafters=("d", "e"))
    second = FakeDrafter(bench, "e", epoch=5)
    drafter, request, text = bench.opened()
    second.up()
    drafter.down()
    assert bench.engine.step()
    item = second.last()
    assert (item.base, item.k, item.prompt_length, item.sampling) == (0, 0, 3, request.sampling)
    second.answer(item)  # it has read all of it
    assert bench.engine.step()
    second.answer(second.last(), text[len(bench.ids["r"]) :][:4])
    assert bench.engine.step()
    assert bench.engine.statistics.emitted_with_draft == 5


@pytest.mark.parametrize("sessions", [1, 8])
def test_a_normal_round_costs_under_100_bytes_a_session_each_way(sessions: int) -> None:
    """Five committed tokens up, four proposals down, at large epochs and session ids, length prefix included."""
    requests = [ask(f"r{i}", [i + 1], 60, seed=i) for i in range(sessions)]
    bench = Bench()
    drafter = FakeDrafter(bench)
    drafter.oracle = always_right(requests)
    drafter.up()
    bench.submit(*requests)
    down: list[int] = []
    arrived = bench.engine.drafting.arrived

    def measured(name: str, message: Drafted, now: float) -> object:
        if all(len(item.tokens) == 16 for item in message.items):
            down.append(len(encode(message)) + 4)
        return arrived(name, message, now)

    bench.engine.drafting.arrived = measured  # type: ignore[method-assign,assignment]
    bench.finish()
    ups = [decode(frame) for frame in drafter.frames]
    normal = [
        m for m in ups if isinstance(m, Draft) and all(i.base and i.k == 4 and len(i.tokens) == 20 for i in m.items)
    ]
    assert len(normal) > 3 and len(down) > 3
    assert max((len(encode(m)) + 4) / len(m.items) for m in normal) < 100
    assert max(down) / sessions < 100
    assert min(len(encode(m)) for m in normal) > 20
