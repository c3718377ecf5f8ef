"""Emulated nodes in real time: the same engines and drafters as on virtual time, each on its thread, with links that
take their time. What it measures is to be what virtual time says."""

from __future__ import annotations

import asyncio
import bisect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from emulated_cases import Case

from paceline.cloud.engine import Engine
from paceline.cloud.events import Arrived, LinkUp, Stop, Submit
from paceline.cloud.requests import Delta
from paceline.cloud.target import engine_config, load_target
from paceline.core.clock import RealClock
from paceline.edge.drafter import limits_of, load_strategy
from paceline.edge.events import PeerUp, Received
from paceline.edge.events import Stop as StopDrafter
from paceline.edge.service import DrafterService
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


async def _run(case: Case, lanes: Any, draft_length: Any, last: int) -> Progress:
    topology, clock, loop = case.topology(lanes, draft_length), RealClock(), asyncio.get_running_loop()
    (target,), (drafter,) = topology.targets, topology.drafters
    one_way, progress = case.rtt_ms / 2000.0, Progress()

    def deliver(put: Callable[[Any], None], event: Any) -> None:
        def arrive() -> None:
            put(event._replace(at=clock.now()))

        if one_way:
            loop.call_soon_threadsafe(loop.call_later, one_way, arrive)
        else:
            arrive()

    model, vocabulary = load_target(target, clock)
    engine = Engine(
        model,
        vocabulary.token_bytes,
        engine_config(target, topology.drafters_of(target)),
        lambda deltas: progress.published(deltas, clock.now()),
        clock,
    )
    strategy, limits = load_strategy(drafter, clock).strategy, limits_of(topology, drafter)
    service = DrafterService(
        strategy, clock, limits, lambda name, message: deliver(engine.inbox.put, Arrived(drafter.name, message))
    )

    def send(message: Message) -> bool:
        deliver(service.inbox.put, Received(target.name, message))
        return True

    hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "real", target.name, bytes(32), "", vocabulary.size)
    service.inbox.put(PeerUp(target.name, hello))
    engine.inbox.put(LinkUp(drafter.name, welcome_of(drafter, strategy, limits, service.epoch), send))
    for request in case.requests(0):
        progress.texts[request.id] = []
        engine.inbox.put(Submit(request))
    threads = [threading.Thread(target=engine.run), threading.Thread(target=service.run)]
    for thread in threads:
        thread.start()
    try:
        while progress.total < last and engine.failure is None:
            await asyncio.sleep(POLL_SECONDS)
    finally:
        engine.inbox.put(Stop())
        service.inbox.put(StopDrafter())
        for thread in threads:
            thread.join()
    if engine.failure is not None:
        raise engine.failure
    return progress
