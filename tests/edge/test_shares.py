"""Places of a full drafter: a target below its share may take one from the target most above, and keeps it."""

from __future__ import annotations

import random
from collections import Counter

from paceline.edge.events import Limits, PeerUp, Reconfigure, Stop, Tally
from paceline.topology.wire import Status

from .helpers import PROMPT, Bench, hello, item, proposals, toy_greedy


def connected(*names: str, **limits: object) -> Bench:
    bench = Bench(limits=Limits(**limits))  # type: ignore[arg-type]
    for name in names:
        bench.up(name)
    return bench


def held(bench: Bench) -> Counter[str]:
    return Counter(session.target for session in bench.service.sessions)


def test_one_target_cannot_fill_a_drafter() -> None:
    """The second target gets half of the places, one Draft at a time, from the sessions idle longest."""
    bench = connected("a", "b", max_sessions=4)
    for session in (1, 2, 3, 4):
        bench.ask("a", item(session, PROMPT))
        bench.clock.sleep(0.1)
    bench.ask("a", item(1, [*PROMPT, 1], base=6))  # now 2 is idle longest
    for session in (1, 2):
        (answer,) = bench.ask("b", item(session, PROMPT))
        assert proposals(answer) == toy_greedy(PROMPT, 4)
    assert sorted((s.target, s.id) for s in bench.service.sessions) == [("a", 1), ("a", 4), ("b", 1), ("b", 2)]
    for name in ("a", "b"):
        (answer,) = bench.ask(name, item(5, PROMPT))
        assert answer.status == Status.FULL and answer.retry_after_ms > 5000
    (answer,) = bench.ask("a", item(2, [*PROMPT, 1, 2], base=7))
    assert (answer.status, answer.held) == (Status.UNKNOWN, 0)  # soft state: it is told where to begin again


def test_alone_it_may_have_all() -> None:
    """A share is one of the connected targets' only, and grows when another leaves."""
    bench = connected("a", max_sessions=3)
    assert [a.status for a in bench.ask("a", *[item(n, PROMPT) for n in range(4)])].count(Status.OK) == 3
    bench.up("b")
    bench.ask("b", item(1, PROMPT))
    assert held(bench) == {"a": 2, "b": 1}
    bench.down("b")
    bench.settle()
    bench.ask("a", item(9, PROMPT))
    assert held(bench) == {"a": 3}


def test_shares_go_by_weight_and_change_with_it() -> None:
    """At weights 3 : 1 of eight places, six and two; after a reload at 1 : 1 four and four."""
    bench = connected("a", "b", max_sessions=8, weights={"a": 3.0})
    for session in range(8):
        bench.ask("b", item(session, PROMPT))
    for session in range(8):
        bench.ask("a", item(session, PROMPT))
    assert held(bench) == {"a": 6, "b": 2}
    bench.service.inbox.put(Reconfigure(Limits(max_sessions=8)))
    for session in range(10, 18):
        bench.ask("b", item(session, PROMPT))
    assert held(bench) == {"a": 4, "b": 4}


def test_a_session_at_work_is_not_taken() -> None:
    """While each of the rich target's sessions waits for its draft, the other one is to ask again soon."""
    bench = connected("a", "b", max_sessions=2)
    bench.draft("a", item(1, PROMPT), item(2, PROMPT))
    bench.draft("b", item(1, PROMPT))
    answers = bench.settle()
    full = next(answer for name, answer in answers if name == "b")
    assert full.status == Status.FULL and 0 < full.retry_after_ms <= 100
    assert [answer.status for name, answer in answers if name == "a"] == [Status.OK] * 2
    (answer,) = bench.ask("b", item(1, PROMPT))
    assert answer.status == Status.OK and held(bench) == {"a": 1, "b": 1}


def test_places_do_not_wander_back_and_forth() -> None:
    """Three targets that all want more than there is: each ends with its share, and then no place changes hands."""
    choose = random.Random(5)
    bench = connected("a", "b", "c", max_sessions=16)
    for session in range(16):
        bench.ask("a", item(session, PROMPT))
    for session in range(100, 200):
        bench.ask(choose.choice("abc"), item(session, PROMPT))
    assert min(held(bench).values()) >= 5
    before = {(s.target, s.id) for s in bench.service.sessions}
    for session in range(200, 300):
        (answer,) = bench.ask(choose.choice("abc"), item(session, PROMPT))
        assert answer.status == Status.FULL
    assert {(s.target, s.id) for s in bench.service.sessions} == before


def test_what_is_in_the_batch_is_answered_before_the_end() -> None:
    """Stop comes while drafts are being made: they still leave, whole, and nothing that waits behind them."""
    bench = connected("a", max_batch=1)
    bench.draft("a", item(1, PROMPT), item(2, PROMPT))
    assert bench.service.step()
    bench.service.inbox.put(Stop())
    bench.service.run()
    ((_, message),) = bench.sent
    assert [(i.session, proposals(i)) for i in message.items] == [(1, toy_greedy(PROMPT, 4))]  # type: ignore[union-attr]


def test_it_does_not_finish_the_batch_where_there_is_no_time() -> None:
    """Once the drafter has said goodbye nobody waits for an answer."""
    bench = connected("a", max_batch=1)
    bench.draft("a", item(1, PROMPT))
    assert bench.service.step()
    bench.service.abandon()
    bench.service.inbox.put(Stop())
    bench.service.run()
    assert bench.sent == []


def test_messages_that_were_looked_at_are_counted() -> None:
    """The loop bounds by it what may wait here, target by target."""
    bench, tallies = Bench(), {name: Tally() for name in ("a", "b")}
    for name, tally in tallies.items():
        bench.service.inbox.put(PeerUp(name, hello(name), tally))
    bench.ask("a", *[item(session, PROMPT) for session in range(1000)])
    bench.ping("a", 1)
    bench.close("b", 7)
    bench.settle()
    assert [tally.messages for tally in tallies.values()] == [2, 1]
