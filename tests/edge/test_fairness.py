"""One target's long prompts must not cost another target its rounds; nobody's share depends on how much it asks."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.core.clock import ManualClock
from paceline.core.emulated import Pace
from paceline.edge.events import Limits
from paceline.edge.fairness import FairQueueing
from paceline.topology.wire import Drafted, Status

from .helpers import Bench, item

VERIFY_SECONDS = 0.020
PROMPT = [(7 * i) % 61 for i in range(4000)]


def test_shares_follow_weights_whatever_the_items_cost() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 1.0}
    turns = FairQueueing[str](weight=weights.__getitem__)
    costs = {"a": 5, "b": 256, "c": 40}
    served = Counter[str]()
    for _ in range(20_000):
        key = turns.next(costs)
        served[key] += costs[key]
    assert served["b"] / served["a"] == pytest.approx(2.0, rel=0.02)
    assert served["c"] / served["a"] == pytest.approx(1.0, rel=0.02)


def test_nobody_saves_up_turns_while_it_wants_nothing() -> None:
    turns = FairQueueing[str]()
    for _ in range(1000):
        assert turns.next({"a": 10}) == "a"
    first = [turns.next({"a": 10, "b": 10}) for _ in range(40)]
    assert 16 <= first.count("b") <= 24


def test_equal_targets_that_come_and_go_are_served_in_the_order_in_which_they_came() -> None:
    """Each leaves when it is served and comes back a little later: nobody is passed over."""
    turns = FairQueueing[str]()
    waiting = list("abcdef")
    served = []
    for _ in range(60):
        served.append(turns.next(dict.fromkeys(waiting, 8)))
        waiting.remove(served[-1])
        if len(served) >= 3:
            waiting.append(served[-3])
    assert served[:6] == list("abcdef")
    assert Counter(served) == dict.fromkeys("abcdef", 10)


def test_what_rides_along_is_a_debt() -> None:
    turns = FairQueueing[str]()
    turns.next({"a": 1, "b": 1})
    turns.charge("b", 320)
    assert "b" not in [turns.next({"a": 32, "b": 32}) for _ in range(9)]


class Rounds:
    """A target in a closed loop: it asks for drafts, verifies for 20 ms, commits, and asks again."""

    def __init__(self, bench: Bench, name: str, sessions: int) -> None:
        self.bench, self.name = bench, name
        self.tokens = {number: [number, 1, 2] for number in range(sessions)}
        self.held = dict.fromkeys(self.tokens, 0)
        self.missing: set[int] = set()
        self.due = 0.0
        self.rounds = 0
        bench.up(name)

    def ask(self) -> None:
        self.missing = set(self.tokens)
        drafts = [item(n, tokens, base=self.held[n]) for n, tokens in self.tokens.items()]
        self.bench.draft(self.name, *drafts)

    def answered(self, message: Drafted) -> None:
        for answer in message.items:
            assert answer.status == Status.OK
            self.missing.discard(answer.session)
            self.held[answer.session] = answer.held
        if not self.missing:
            self.rounds += 1
            self.due = self.bench.clock.now() + VERIFY_SECONDS
            for number, tokens in self.tokens.items():
                del tokens[600:]
                tokens += [number, self.rounds % 61]


class Opener:
    """A target that always has two sessions with a 4 000-token prompt on their way, and closes them once read."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, self.name = bench, name
        self.next = 0
        bench.up(name)

    def open(self) -> None:
        self.next += 1
        prompt = [(token + self.next) % 61 for token in PROMPT]  # never a prefix that is kept already
        self.bench.draft(self.name, item(self.next, prompt, k=0))

    def turn(self) -> None:
        sessions = self.bench.service.sessions
        live = [session for session in sessions if session.target == self.name]
        for session in live:
            if not session.behind:
                self.bench.close(self.name, session.id)
        for _ in range(2 - sum(bool(session.behind) for session in live)):
            self.open()


LINEAR = Pace(2.0, 0.05)


def rounds_in(seconds: float, sessions: int, beside: bool, pace: Pace = LINEAR) -> tuple[int, int]:
    """How many rounds a target does, and how many tokens of prompts are read beside it."""
    clock = ManualClock()
    limits = Limits(max_sessions=64)
    bench = Bench(limits, clock, pace=pace, kv_slots=40_000, max_context=4096)
    target = Rounds(bench, "rounds", sessions)
    opener = Opener(bench, "opener") if beside else None
    waiting = False
    while clock.now() < seconds:
        if not waiting and clock.now() >= target.due:
            target.ask()
            waiting = True
        if opener is not None:
            opener.turn()
        seen = len(bench.sent)
        worked = bench.service.step()
        for name, message in bench.sent[seen:]:
            if name == target.name and isinstance(message, Drafted):
                target.answered(message)
                waiting = bool(target.missing)
        if not worked and not bench.service.busy and not waiting:
            clock.advance(max(target.due - clock.now(), 1e-4))
    return target.rounds, bench.service.statistics.tokens_read


@pytest.mark.parametrize("sessions", [1, 8])
def test_a_target_keeps_four_fifths_of_its_rounds_beside_one_that_keeps_opening_long_prompts(sessions: int) -> None:
    alone, _ = rounds_in(6.0, sessions, beside=False)
    beside, read = rounds_in(6.0, sessions, beside=True)
    assert beside / alone >= 0.8
    assert read > 20_000  # and the prompts are read all the same


def test_where_a_larger_pass_takes_no_longer_prompts_are_read_in_whole_chunks() -> None:
    """As on a GPU: a pass over 256 tokens that costs what one over 32 costs is not cut into eight."""
    flat = Pace(2.0, 0.001)
    alone, _ = rounds_in(3.0, 4, False, flat)
    beside, read = rounds_in(3.0, 4, True, flat)
    assert beside / alone >= 0.7
    assert read > 150_000


def test_two_targets_share_the_places_of_a_batch_though_one_asks_for_much_more() -> None:
    bench = Bench(Limits(max_batch=2))
    bench.up("many")
    bench.up("few")
    bench.draft("many", *[item(number, [number, 1]) for number in range(20)])
    bench.draft("few", *[item(number, [number, 2]) for number in range(4)])
    order = [name for name, _ in bench.settle()]
    assert max(place for place, name in enumerate(order) if name == "few") < 14


def test_one_message_at_a_time_where_the_profile_says_so() -> None:
    bench = Bench(Limits(max_batch=8, max_messages=1))
    bench.up("a")
    bench.up("b")
    bench.draft("a", item(1, [1, 2]), item(2, [3]))
    bench.draft("b", item(1, [4, 5]), item(2, [6]))
    bench.settle()
    assert [(name, len(message.items)) for name, message in bench.sent] == [("a", 2), ("b", 2)]  # type: ignore[union-attr]
    assert bench.model.forwards == [(2, 1), (1, 1), (1, 1), (1, 1)] * 2


def test_an_equal_weight_reader_gets_through_while_another_target_never_pauses() -> None:
    """Drafting that fills all the time takes turns with reading, so no session warms for ever."""
    bench = Bench(Limits(), max_context=4096, kv_slots=30_000)
    bench.up("busy")
    bench.up("reader")
    bench.draft("reader", item(1, PROMPT, k=0))
    for number in range(4000):
        bench.draft("busy", item(number % 8, [number % 61] * (3 + number // 8)))
        bench.service.step()
        if not bench.service.sessions.get("reader", 1).behind:  # type: ignore[union-attr]
            return
    raise AssertionError("the prompt was never read")
