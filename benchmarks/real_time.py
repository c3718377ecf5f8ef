"""Emulated nodes in real time: the same engines and drafters as on virtual time, each on its thread, with links that
take their time. What it measures is to be what virtual time says."""

from __future__ import annotations

import asyncio
import bisect
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from emulated_cases import Case

from paceline.cloud.engine import Engine
from paceline.cloud.events import Arrived, LinkUp, Stop, Submit
from paceline.cloud.requests import Delta
from paceline.cloud.target import engine_config, load_target
from paceline.core.clock import Clock, RealClock
from paceline.edge.drafter import limits_of, load_strategy
from paceline.edge.events import PeerUp, Received
from paceline.edge.events import Stop as StopDrafter
from paceline.edge.service import DrafterService
from paceline.topology.process import settle_runtime
from paceline.topology.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, Message
from paceline.virtual import welcome_of

POLL_SECONDS = 0.02


@dataclass
class Progress:
    """Tokens of all requests over time, as they were published."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.tokens[-1] if self.tokens else 0

    def published(self, deltas: list[Delta], now: float) -> None:
        """A round's deltas."""
        for delta in deltas:
            self.texts[delta.request_id] += delta.token_ids
        more = sum(len(delta.token_ids) for delta in deltas)
        self.times.append(now)
        self.tokens.append(self.total + more)

    def rate(self, first: int, last: int) -> float:
        """Tokens a second from the pass that reached the first count to the one that reached the last."""
        begin, end = (bisect.bisect_left(self.tokens, count) for count in (first, last))
        return (self.tokens[end] - self.tokens[begin]) / (self.times[end] - self.times[begin])


def run(case: Case, lanes: Any, draft_length: Any, stretch: tuple[int, int]) -> Progress:
    """Serves a case of one target until so many tokens are out. Takes as long as it says."""
    return asyncio.run(_run(case, lanes, draft_length, stretch[1]))


class Wire(threading.Thread):
    """One direction of a link: what is sent arrives so many seconds later, in order. A thread's sleep is exact to some
    0.1 ms, a loop's timer to 1 ms and more."""

    def __init__(self, seconds: float, put: Callable[[Any], None], clock: Clock) -> None:
        super().__init__(daemon=True)
        self._seconds, self._put, self._clock = seconds, put, clock
        self._sent: queue.SimpleQueue[tuple[float, Any] | None] = queue.SimpleQueue()

    def send(self, event: Any) -> None:
        self._sent.put((self._clock.now() + self._seconds, event))

    def close(self) -> None:
        self._sent.put(None)
        self.join()

    def run(self) -> None:
        while (one := self._sent.get()) is not None:
            due, event = one
            self._clock.sleep(max(0.0, due - self._clock.now()))
            self._put(event._replace(at=self._clock.now()))


async def _run(case: Case, lanes: Any, draft_length: Any, last: int) -> Progress:
    topology, clock = case.topology(lanes, draft_length), RealClock()
    (target,), (drafter,) = topology.targets, topology.drafters
    one_way, progress = case.rtt_ms / 2000.0, Progress()
    settle_runtime()
    model, vocabulary = load_target(target, clock)
    engine = Engine(
        model,
        vocabulary.token_bytes,
        engine_config(target, topology.drafters_of(target)),
        lambda deltas: progress.published(deltas, clock.now()),
        clock,
    )
    strategy, limits = load_strategy(drafter, clock).strategy, limits_of(topology, drafter)
    down = Wire(one_way, engine.inbox.put, clock)
    service = DrafterService(strategy, clock, limits, lambda name, message: down.send(Arrived(drafter.name, message)))
    up = Wire(one_way, service.inbox.put, clock)

    def send(message: Message) -> bool:
        up.send(Received(target.name, message))
        return True

    hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "real", target.name, bytes(32), "", vocabulary.size)
    service.inbox.put(PeerUp(target.name, hello))
    engine.inbox.put(LinkUp(drafter.name, welcome_of(drafter, strategy, limits, service.epoch), send))
    for request in case.requests(0):
        progress.texts[request.id] = []
        engine.inbox.put(Submit(request))
    threads = [threading.Thread(target=engine.run), threading.Thread(target=service.run)]
    for thread in [*threads, up, down]:
        thread.start()
    try:
        while progress.total < last and engine.failure is None:
            await asyncio.sleep(POLL_SECONDS)
    finally:
        engine.inbox.put(Stop())
        service.inbox.put(StopDrafter())
        for thread in threads:
            thread.join()
        up.close()
        down.close()
    if engine.failure is not None:
        raise engine.failure
    return progress
