"""A target that sends what is dear, below all limits on frames and bytes: it waits behind itself, and others go on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest

from paceline.core.clock import RealClock
from paceline.core.emulated import Pace, ToyModel
from paceline.edge.events import Limits, PeerUp, Received, Stop, Tally
from paceline.edge.mail import Mail
from paceline.edge.runtimes.emulated import EmulatedRuntime
from paceline.edge.service import DrafterService
from paceline.edge.sessions import CLOSED_IDS
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.limits import work
from paceline.topology.wire import (
    MAX_ITEMS,
    MAX_SESSIONS_LISTED,
    Close,
    Draft,
    Drafted,
    DraftItem,
    Message,
    Ping,
    Status,
)

from .helpers import EPOCH, LANGUAGE, PROMPT, Bench, hello, item, items, opened, proposals, toy_greedy

DEAR: dict[str, Callable[[int], Message]] = {
    "close": lambda turn: Close(EPOCH, list(range(turn << 16, (turn << 16) + MAX_SESSIONS_LISTED))),
    "ping": lambda turn: Ping(0, list(range(MAX_SESSIONS_LISTED))),
    "unknown": lambda turn: Draft(EPOCH, [DraftItem(session, 1, b"", 0, 0) for session in range(MAX_ITEMS)]),
    "new": lambda turn: Draft(EPOCH, [DraftItem(session, 0, b"\1\0\0\0", 0, 4) for session in range(MAX_ITEMS)]),
}


@pytest.mark.parametrize("kind", ["close", "unknown", "new"])
def test_between_two_steps_so_much_is_looked_at_and_no_more(kind: str) -> None:
    """A draft that is being made goes on after each turn, though a hundred long messages wait."""
    bench = Bench()
    bench.up("flooder")
    bench.up("honest")
    bench.draft("honest", item(1, PROMPT))
    bench.service.step()
    waiting = 100 * work(DEAR[kind](0))
    for turn in range(100):
        bench.put("flooder", DEAR[kind](turn))
    bench.draft("honest", item(1, [*PROMPT, 7], base=6))
    done = 0
    while not any(name == "honest" and a.position == 7 for name, a in items(bench.sent)):
        assert bench.service.step()
        done += 1
    left = sum(piece.work for piece in bench.service._mail._boxes["flooder"].pieces)
    assert done <= 12  # of its target's Draft and the 4 tokens, in turn with the flooder's
    assert waiting - left <= 400 * done
    (answer,) = [a for name, a in items(bench.sent) if name == "honest" and a.position == 7]
    assert proposals(answer) == toy_greedy([*PROMPT, 7], 4)


def test_targets_take_turns_by_work() -> None:
    """Short messages are looked at before somebody else's long one is through, each target's own in order."""
    mail = Mail()
    for name in ("long", "short", "gone"):
        mail.open(name, Tally())
    mail.put("long", DEAR["unknown"](0))
    for number in range(200):
        mail.put("short", Ping(number, []))
    mail.put("gone", Ping(0, []))
    mail.put("stranger", Ping(0, []))
    mail.close("gone")
    order = []
    while mail:
        target, piece = mail.take()
        order.append((target, piece.work, piece.message))
    short = [place for place, (target, _, _) in enumerate(order) if target == "short"]
    before = sum(work for target, work, _ in order[: short[-1]] if target == "long")
    assert before <= 2 * 200
    assert [order[place][2].time_us for place in short] == list(range(200))  # type: ignore[union-attr]
    seen = [i.session for target, _, m in order if target == "long" for i in m.items]  # type: ignore[union-attr]
    assert seen == list(range(MAX_ITEMS))


def test_a_draft_in_pieces_is_one_message() -> None:
    """Its sessions are drafted for together where a drafter counts messages, and it is counted once."""
    bench = opened(limits=Limits(max_sessions=1000, max_batch=1000, max_messages=1, max_queue=1000), max_context=32)
    answers = bench.ask("a", *[item(session, PROMPT) for session in range(600)])
    assert [a.status for a in answers] == [Status.OK] * 600
    assert bench.service.statistics.drafts_received == 1
    assert max(len(forward) for forward in bench.model.forwards) > 256


def test_a_close_costs_the_same_whatever_was_closed_before() -> None:
    """Sixty of the longest a second are a small part of it, and the last ids are those that are remembered."""
    sessions = opened().service.sessions
    seconds = []
    for turn in range(12):
        start = time.perf_counter()
        sessions.close("a", range(turn << 16, (turn + 1) << 16))
        seconds.append(time.perf_counter() - start)
    assert min(seconds[6:]) < 0.2
    assert list(sessions._closed["a"]) == list(range((12 << 16) - CLOSED_IDS, 12 << 16))


def test_stop_is_heard_before_what_waits() -> None:
    """It came last, and no message is looked at any more."""
    bench = opened()
    bench.draft("a", item(1 << 20, PROMPT))
    for turn in range(4):
        bench.put("a", DEAR["close"](turn))
    bench.service.inbox.put(Stop())
    bench.service.run()
    assert bench.sent == [] and len(bench.service.sessions) == 0


@pytest.mark.parametrize("kind", DEAR)
def test_others_keep_their_rounds(kind: str) -> None:
    """A target with rounds of 50 ms has its drafts in time, while another sends sixty long messages a second."""
    replies: queue.SimpleQueue[Drafted] = queue.SimpleQueue()

    def reply(name: str, message: Message) -> None:
        if name == "honest":
            assert isinstance(message, Drafted)
            replies.put(message)

    model = ToyModel(LANGUAGE, pace=Pace(0.2), clock=RealClock())
    service = DrafterService(DraftModel(EmulatedRuntime(model)), RealClock(), Limits(max_sessions=16), reply, EPOCH)
    thread = threading.Thread(target=service.run)
    thread.start()
    dear = [DEAR[kind](turn) for turn in range(3)]
    in_time = 0
    try:
        for name in ("flooder", "honest"):
            service.inbox.put(PeerUp(name, hello(name)))
        service.inbox.put(Received("flooder", Draft(EPOCH, [item(1, PROMPT)])))
        tokens = list(PROMPT)
        base = 0
        for _ in range(30):
            for message in dear:
                service.inbox.put(Received("flooder", message))
            begin = time.monotonic()
            service.inbox.put(Received("honest", Draft(EPOCH, [item(1, tokens, base=base)])))
            (answer,) = replies.get(timeout=10).items
            in_time += time.monotonic() - begin < 0.05
            assert answer.status == Status.OK
            base = len(tokens)
            tokens += proposals(answer)[:2]
            time.sleep(max(0.0, begin + 0.05 - time.monotonic()))
    finally:
        service.inbox.put(Stop())
        thread.join(timeout=1)
    assert not thread.is_alive()
    assert in_time >= 24
