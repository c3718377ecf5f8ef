"""A drafter's service under two authenticated targets that send whatever decodes."""

from __future__ import annotations

from paceline.core.clock import ManualClock
from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.core.errors import WireError
from paceline.edge.events import Limits, PeerDown, PeerUp, Received
from paceline.edge.runtimes.emulated import EmulatedRuntime
from paceline.edge.service import DrafterService
from paceline.edge.sessions import CLOSED_IDS
from paceline.edge.strategies.base import Strategy
from paceline.edge.strategies.draft_model import DraftModel
from paceline.edge.strategies.ngram import NGram
from paceline.topology.wire import Close, Draft, DraftItem, Hello, Message, Ping, decode, encode

from . import messages
from .supply import Supply

VOCABULARY = 16
LIMITS = Limits(max_sessions=3, max_batch=2, max_queue=2, chunk=8, idle_seconds=0.2)
TARGETS = ("a", "b")
EPOCH = 7


class Bench:
    """The service, its clock, and checks on what it holds and says."""

    def __init__(self, supply: Supply) -> None:
        self.supply = supply
        self.clock = ManualClock()
        self.model = ToyModel(ToyLanguage(VOCABULARY, 8, 0.7), max_context=40, kv_slots=110, clock=self.clock)
        form = supply.below(4)
        strategy: Strategy = NGram(max_context=40) if form == 3 else DraftModel(EmulatedRuntime(self.model))
        self.strategy = strategy
        self.service = DrafterService(strategy, self.clock, LIMITS, self._reply, EPOCH)
        self.replies = 0
        for name in TARGETS:
            self._up(name)

    def _reply(self, name: str, message: Message) -> None:
        assert name in TARGETS
        assert decode(encode(message)) == message
        self.replies += 1

    def _up(self, name: str) -> None:
        size = self.supply.choose((VOCABULARY, VOCABULARY, 5, 0, -3, 1 << 62))
        self.service.inbox.put(PeerUp(name, Hello(1, 0, "test", name, bytes(32), "", size)))

    def _put(self, name: str, message: Message | None) -> None:
        if message is not None:
            self.service.inbox.put(Received(name, message))

    def play(self) -> None:
        """One thing that happens."""
        supply = self.supply
        name = supply.choose(TARGETS)
        form = supply.below(12)
        if form < 5:
            self._put(name, self._draft(name))
        elif form == 5:
            self._put(name, messages.received(Close(self._epoch(), self._sessions())))
        elif form == 6:
            self._put(name, messages.received(Ping(supply.number(), self._sessions())))
        elif form == 7:
            self.clock.advance(supply.choose((0.0, 0.01, 0.3, 100.0)))
        elif form == 8:
            (self._up if supply.below(2) else lambda name: self.service.inbox.put(PeerDown(name)))(name)
        elif form == 9:
            self._put(name, _decoded(supply.bytes(supply.below(200))))
        else:
            for _ in range(1 + supply.below(4)):
                self.service.step()
            self._check()

    def _draft(self, name: str) -> Message | None:
        items = []
        for _ in range(1 + self.supply.below(3)):
            number = self.supply.choose((1, 2, 3, 4, 5, 1 << 63))
            session = self.service.sessions.get(name, number)
            held = session.committed if session is not None else ()
            items.append(
                DraftItem(*messages.draft_item(self.supply, number, held, VOCABULARY, self.supply.choose((9, 44))))
            )
        return messages.received(Draft(self._epoch(), items))

    def _epoch(self) -> int:
        return EPOCH if self.supply.below(16) else self.supply.number()

    def _sessions(self) -> list[int]:
        return [self.supply.choose((1, 2, 3, 4, 5, 1 << 63)) for _ in range(self.supply.below(4))]

    def _check(self) -> None:
        sessions = list(self.service.sessions)
        assert len(sessions) <= LIMITS.max_sessions
        assert self.model._used <= self.model.kv_slots
        for session in sessions:
            assert len(session.committed) < self.service.max_context
            assert len(session.committed) + len(session.tail) <= session.span.size
            assert all(fork.valid <= len(session.committed) + len(session.tail) for fork in session.forks)
        spans = sum(1 + len(session.forks) for session in sessions) + len(self.service.sessions.cache)
        assert not self.strategy.keeps_kv or spans == len(self.model._states), "a span is lost"
        assert all(len(closed) <= CLOSED_IDS for closed in self.service.sessions._closed.values())

    def end(self) -> None:
        """All that was asked gets done, and when everybody has gone nothing is held."""
        for _ in range(2000):
            if not self.service.step() and not self.service.busy:
                break
        else:
            raise AssertionError("the service never comes to rest")
        self._check()
        for name in TARGETS:
            self.service.inbox.put(PeerDown(name))
        self.service.step()
        while self.service.sessions.cache.evict():
            pass
        assert len(self.service.sessions) == self.model._used == len(self.model._states) == 0
        assert not self.service.sessions._closed and not self.service.busy


def _decoded(frame: bytes) -> Message | None:
    try:
        return decode(frame)
    except WireError:
        return None


def one(data: bytes) -> None:
    """Nothing a target sends raises, keeps the service busy for ever, or stays in memory after it left."""
    bench = Bench(Supply(data))
    while bench.supply.left:
        bench.play()
    bench.end()
