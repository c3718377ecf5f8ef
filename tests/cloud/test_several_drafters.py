"""Several drafters: who serves a session, who takes over, and when it goes back."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.cloud.drafter_log import DrafterLog
from paceline.cloud.drafters import RETURN_SECONDS, DrafterState
from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import EngineConfig
from paceline.cloud.events import Reconfigure, Room
from paceline.topology.wire import Draft, Status, decode, unpack_tokens

from .helpers import Bench, FakeDrafter, always_right, ask, plain


def opened_at(drafters: dict[str, FakeDrafter]) -> Counter[str]:
    """How many sessions each drafter was asked to open."""
    return Counter({name: sum(item.base == 0 for item in d.drafts) for name, d in drafters.items()})


def fakes(bench: Bench, names: str, **welcome: int) -> dict[str, FakeDrafter]:
    made = {name: FakeDrafter(bench, name, epoch=index + 1, **welcome) for index, name in enumerate(names)}
    for drafter in made.values():
        drafter.up()
    return made


def test_failover_uses_the_first_that_is_up() -> None:
    """All sessions are at the first of three; nothing leaves for the others."""
    bench = Bench(drafters="abc")
    drafters = fakes(bench, "abc")
    bench.submit(*[ask(f"r{i}", [i + 1]) for i in range(6)])
    bench.engine.step()
    assert opened_at(drafters) == {"a": 6, "b": 0, "c": 0}


def test_sessions_return_to_the_preferred_drafter_once_it_has_stayed() -> None:
    """It is back: for a second they stay where they are; then they move, opened anew, and the other forgets them."""
    bench = Bench(drafters="ab")
    drafters = fakes(bench, "ab")
    request = ask(max_tokens=300)
    text = plain(request)
    bench.submit(request)
    bench.engine.step()
    drafters["a"].down()
    assert bench.engine.step()
    second = drafters["b"].last()
    drafters["a"].up()
    drafters["b"].answer(second)
    assert bench.engine.step()
    assert opened_at(drafters) == {"a": 1, "b": 1}
    bench.clock.advance(RETURN_SECONDS)
    drafters["b"].answer(drafters["b"].last(), text[len(bench.ids["r"]) :][:4])
    assert bench.engine.step()
    assert drafters["b"].closed == [second.session]
    item = drafters["a"].last()
    assert item.base == 0 and item.session != second.session
    assert unpack_tokens(item.tokens).tolist() == [*request.prompt, *text[: len(bench.ids["r"])]]
    bench.finish()
    assert bench.ids["r"] == text


def test_a_session_that_moves_keeps_its_text_and_ignores_the_old_drafter() -> None:
    """A late answer of the drafter it left, under its old id, is not used."""
    bench = Bench(drafters="ab")
    drafter, _, text = bench.opened_first("a")
    other = FakeDrafter(bench, "b", epoch=9)
    other.up()
    stale = drafter.last()
    drafter.down()
    drafter.up()
    bench.engine.step()
    drafter.answer(stale, [0, 0, 0, 0])
    bench.finish()
    assert bench.ids["r"] == text


def test_spread_opens_sessions_where_the_largest_share_is_free() -> None:
    """Room for 4, 8 and 4: of eight sessions half go to the larger one."""
    bench = Bench(drafters="abc", policy="spread")
    sizes = {"a": 4, "b": 8, "c": 4}
    drafters = {name: FakeDrafter(bench, name, sessions=size) for name, size in sizes.items()}
    for drafter in drafters.values():
        drafter.up()
    bench.submit(*[ask(f"r{i}", [i + 1]) for i in range(8)])
    bench.engine.step()
    assert opened_at(drafters) == {"a": 2, "b": 4, "c": 2}


def test_spread_makes_way_for_the_sessions_of_other_targets() -> None:
    """A drafter that says again and again that others fill it gets nothing."""
    bench = Bench(drafters="ab", policy="spread")
    drafters = fakes(bench, "ab", sessions=16)
    for _ in range(20):
        bench.put(Room("a", 0))
        bench.put(Room("b", 16))
    bench.submit(*[ask(f"r{i}", [i + 1]) for i in range(8)])
    bench.engine.step()
    assert opened_at(drafters) == {"a": 0, "b": 8}


@pytest.mark.parametrize("said", [-1, 17, 10**9])
def test_room_that_cannot_be_is_ignored(said: int) -> None:
    """A peer's number is a claim: outside 0..max_sessions it changes nothing."""
    bench = Bench(drafters="ab", policy="spread")
    drafters = fakes(bench, "ab", sessions=16)
    bench.put(Room("a", said))
    bench.put(Room("nobody", 3))
    bench.submit(*[ask(f"r{i}", [i + 1]) for i in range(8)])
    bench.engine.step()
    assert opened_at(drafters) == {"a": 4, "b": 4}


def test_a_killed_drafters_sessions_are_opened_elsewhere_in_the_same_turn() -> None:
    """The link is down: what it held goes to the others before anything else happens."""
    bench = Bench(drafters="abc", policy="spread")
    drafters = fakes(bench, "abc", sessions=16)
    bench.submit(*[ask(f"r{i}", [i + 1], 200) for i in range(9)])
    bench.engine.step()
    assert opened_at(drafters) == {"a": 3, "b": 3, "c": 3}
    drafters["a"].down()
    before = bench.clock.now()
    bench.engine.step()
    assert bench.clock.now() == before
    assert sum(opened_at(drafters).values()) == 12
    assert max(opened_at(drafters)["b"], opened_at(drafters)["c"]) == 5


def test_a_full_drafter_passes_the_session_on() -> None:
    """`full` is no end: another drafter with room takes it; without one it waits for the time that was said."""
    bench = Bench(drafters="ab")
    drafters = fakes(bench, "ab")
    request = ask(max_tokens=100)
    bench.submit(request)
    bench.engine.step()
    drafters["a"].answer(drafters["a"].last(), status=Status.FULL, held=0, retry_after_ms=5000)
    assert bench.engine.step()
    assert opened_at(drafters) == {"a": 1, "b": 1}
    drafters["b"].answer(drafters["b"].last(), status=Status.FULL, held=0, retry_after_ms=9000)
    for _ in range(5):
        assert bench.engine.step()
    assert opened_at(drafters) == {"a": 1, "b": 1}
    bench.clock.advance(5.0)
    assert bench.engine.step() and bench.engine.step()
    assert opened_at(drafters) == {"a": 2, "b": 1}
    bench.finish()
    assert bench.ids["r"] == plain(request)


def test_past_the_context_of_one_drafter_the_next_longer_one_takes_over() -> None:
    """Windows of 8 and 4096 tokens: the session moves when it outgrows the first, and is never sent back."""
    bench = Bench(drafters="ab")
    short = FakeDrafter(bench, "a", epoch=1, context=8)
    long = FakeDrafter(bench, "b", epoch=2)
    request = ask(max_tokens=60)
    for drafter in (short, long):
        drafter.oracle = always_right([request])
        drafter.up()
    bench.submit(request)
    bench.finish()
    assert bench.ids["r"] == plain(request)
    assert opened_at({"a": short, "b": long}) == {"a": 1, "b": 1}
    assert bench.engine.statistics.drafted_rounds >= 9


def test_a_drafter_that_misses_three_rounds_loses_its_sessions_to_another() -> None:
    """Up but silent: after the third miss the session moves, and the silent one is not waited for again."""
    bench = Bench(drafters="ab")
    drafter, request, text = bench.opened_first("a")
    other = FakeDrafter(bench, "b", epoch=9)
    other.oracle = always_right([request])
    other.up()
    for _ in range(3):
        assert not bench.engine.step()
        bench.clock.advance(0.101)
        assert bench.engine.step()
    assert other.drafts and drafter.closed
    spent = bench.clock.now()
    bench.finish()
    assert bench.clock.now() - spent < 0.2
    assert bench.ids["r"] == text


def test_a_drafter_that_answers_late_and_never_right_loses_its_sessions_too() -> None:
    """Always just before the deadline, always wrong: it has not missed a round, and yet another one takes over."""
    bench = Bench(drafters="ab", deadline=1.0)
    drafter, request, text = bench.opened_first("a")
    other = FakeDrafter(bench, "b", epoch=9)
    other.oracle = always_right([request])
    other.up()
    for _ in range(6):
        if drafter.closed:
            break
        bench.clock.advance(0.45)
        drafter.answer(drafter.last(), [(text[len(bench.ids["r"])] + 1) % 64] * 4)
        bench.engine.step()
    assert drafter.closed and other.drafts
    bench.finish()
    assert bench.ids["r"] == text


def test_suspicion_doubles_and_ends() -> None:
    """Two seconds after its third miss a drafter is tried again; one more miss and it is four."""
    bench = Bench(drafters="ab")
    state = bench.engine.drafting.drafters["a"]
    fakes(bench, "ab")
    bench.engine.step()
    now = bench.clock.now()
    for _ in range(3):
        state.missed(now)
    assert not state.reliable(now + 1.9) and state.reliable(now + 2.0)
    state.missed(now + 2.0)
    assert not state.reliable(now + 5.9) and state.reliable(now + 6.0)
    state.kept_up()
    state.missed(now + 6.0)
    assert state.reliable(now + 6.0)


def test_a_lane_waits_for_several_drafters_at_once() -> None:
    """One drafter answers, the other does not: the lane waits; with both it goes and both drafts count."""
    bench = Bench(drafters="ab", policy="spread")
    requests = [ask(f"r{i}", [i + 1], 100) for i in range(2)]
    drafters = fakes(bench, "ab", sessions=16)
    bench.submit(*requests)
    assert bench.engine.step()
    for drafter in drafters.values():
        drafter.answer(drafter.last())
    assert bench.engine.step()
    assert not bench.engine.step()
    texts = {request.prompt: plain(request) for request in requests}
    emitted = bench.engine.statistics.emitted_with_draft
    for drafter in drafters.values():
        prompt = tuple(unpack_tokens(drafter.drafts[0].tokens).tolist())
        name = next(request.id for request in requests if request.prompt == prompt)
        assert not bench.engine.step()
        drafter.answer(drafter.last(), texts[prompt][len(bench.ids[name]) :][:4])
    assert bench.engine.step()
    assert bench.engine.statistics.emitted_with_draft - emitted == 10


def test_a_ping_lists_the_sessions_of_that_drafter_only() -> None:
    """What another drafter holds is nobody's business here."""
    bench = Bench(drafters="ab", policy="spread")
    drafters = fakes(bench, "ab", sessions=16)
    bench.submit(*[ask(f"r{i}", [i + 1], 200) for i in range(4)])
    bench.engine.step()
    for name, drafter in drafters.items():
        assert bench.engine.drafting.live(name) == [item.session for item in drafter.drafts]
    assert len(bench.engine.drafting.live()) == 4


def test_reconfiguring_moves_sessions_and_changes_the_draft_length() -> None:
    """Drafter a leaves the list, b joins it, k becomes 2: the session moves to b and is asked for two."""
    bench = Bench(drafters="a")
    _, request, text = bench.opened_first("a")
    drafting = DraftingConfig(("b",), draft_length=2, deadline=0.1)
    bench.put(Reconfigure(EngineConfig(drafting=drafting)))
    bench.engine.step()
    other = FakeDrafter(bench, "b", epoch=9)
    other.oracle = always_right([request])
    other.up()
    bench.finish()
    assert bench.ids["r"] == text
    asked = {item.k for frame in other.frames if isinstance(m := decode(frame), Draft) for item in m.items}
    assert asked == {0, 1, 2}


def test_sessions_that_move_and_a_drafter_that_lags_are_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    """Five sessions leave a drafter that is gone: one line; one that becomes suspect and is trusted again: one each."""
    caplog.set_level("INFO")
    bench = Bench(drafters="ab")
    drafters = fakes(bench, "ab")
    bench.submit(*[ask(f"r{i}", [i + 1]) for i in range(5)])
    bench.engine.step()
    drafters["a"].down()
    bench.engine.step()
    assert caplog.messages == ["5 sessions move from a to others"]
    moved = caplog.records[0].__dict__
    assert (moved["event"], moved["drafter"], moved["sessions"]) == ("sessions_moved", "a", 5)
    state, now = bench.engine.drafting.drafters["b"], bench.clock.now()
    for suspect, second in ((True, 0.0), (True, 1.0), (False, 2.0), (True, 3.0), (True, 40.0), (False, 41.0)):
        state.suspect = suspect
        bench.engine.drafting.said_room("b", 0, now + second)
    told = [record.__dict__["event"] for record in caplog.records[1:]]
    assert told == ["drafter_suspect", "drafter_trusted"] * 2  # one that wavers is told of every half minute
    assert caplog.messages[2] == "drafter b is trusted again"


def test_the_log_names_the_target(caplog: pytest.LogCaptureFixture) -> None:
    """Several of them may run in one process."""
    state = DrafterState("d", None)
    state.suspect = True
    DrafterLog("chat-a").tell({"d": state}, 0.0)
    assert caplog.messages[0].startswith("chat-a: drafter d is suspect: its drafts come too late;")
