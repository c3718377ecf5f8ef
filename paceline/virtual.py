"""A topology of emulated nodes on virtual time, in one thread: the real engines, drafter services and messages.

Each node has a clock of its own. The node whose next action is due first takes one step: what has arrived by then is
put into its inbox, its loop turns once, and its clock moves on by what the emulated pass took. What it sends meanwhile
arrives after the link's one-way time, in order. So nodes overlap exactly as processes would, at no cost in real time,
and a run repeats itself to the last token.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.cloud.engine import Engine
from paceline.cloud.events import Arrived, LinkUp, Room, Submit
from paceline.cloud.requests import Delta, Request
from paceline.cloud.target import engine_config, load_target
from paceline.core.clock import ManualClock
from paceline.edge.drafter import capabilities_of, limits_of, load_strategy
from paceline.edge.events import Limits, PeerUp, Received
from paceline.edge.service import DrafterService
from paceline.edge.strategies.base import Strategy
from paceline.topology.spec import DrafterSpec, TargetSpec, Topology
from paceline.topology.wire import (
    MAX_DRAFT_LENGTH,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Drafted,
    Hello,
    Message,
    Ping,
    Pong,
    Welcome,
)

BEAT_SECONDS = 1.0


class Node(Protocol):
    """What the world steps."""

    clock: ManualClock

    def due(self) -> float | None:
        """When the node would act by itself; None: only when something arrives."""

    def take(self, event: Any) -> None:
        """Something arrives."""

    def step(self) -> bool:
        """One turn of its loop; False when there was nothing to do."""


@dataclass
class Answer:
    """What became of a request; times in virtual seconds."""

    request: Request
    sent: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    ended: float | None = None
    error: str | None = None


class VirtualTarget:
    """A target's engine on its own clock."""

    def __init__(self, world: VirtualWorld, topology: Topology, spec: TargetSpec) -> None:
        self.name = spec.name
        self.clock = ManualClock()
        self._world = world
        model, vocabulary = load_target(spec, self.clock)
        config = engine_config(spec, topology.drafters_of(spec))
        self.engine = Engine(model, vocabulary.token_bytes, config, self._publish, self.clock)
        self.vocabulary_size = vocabulary.size
        self.answers: dict[str, Answer] = {}
        self._under_way = False
        self.on_end: Callable[[Answer], None] = lambda answer: None

    def submit(self, request: Request) -> None:
        """A user's request arrives now."""
        self.answers[request.id] = Answer(request, self.clock.now())
        self._world.at(self.clock.now(), self, Submit(request))

    def due(self) -> float | None:
        at_once = self._under_way or not self.engine.inbox.empty()
        return self.clock.now() if at_once else self.engine.wake_at()

    def take(self, event: Any) -> None:
        self.engine.inbox.put(event)

    def step(self) -> bool:
        """A forward, or what follows it: what arrives during the forward is in the inbox then, as in a process."""
        if self._under_way:
            self.engine.finish()
            self._under_way = False
            return True
        self._under_way = self.engine.begin()
        return self._under_way

    def _publish(self, deltas: list[Delta]) -> None:
        now = self.clock.now()
        for delta in deltas:
            answer = self.answers[delta.request_id]
            answer.token_ids += delta.token_ids
            if delta.token_ids:
                answer.arrivals.append((now, len(delta.token_ids)))
            if delta.finish_reason is not None:
                answer.ended, answer.error = now, delta.error
                self.on_end(answer)


def welcome_of(spec: DrafterSpec, strategy: Strategy, limits: Limits, epoch: int) -> Welcome:
    """What a drafter greets its targets with."""
    return Welcome(
        epoch,
        spec.model or "",
        spec.strategy,
        spec.max_sessions,
        strategy.max_context,
        MAX_DRAFT_LENGTH,
        max_batch=limits.max_batch,
        max_messages=limits.max_messages,
        capabilities=list(capabilities_of(strategy)),
    )


class VirtualDrafter:
    """A drafter's service on its own clock."""

    def __init__(self, world: VirtualWorld, topology: Topology, spec: DrafterSpec) -> None:
        self.name = spec.name
        self.clock = ManualClock()
        self._world = world
        strategy = load_strategy(spec, self.clock).strategy
        self.max_sessions = spec.max_sessions
        limits = limits_of(topology, spec)
        self.service = DrafterService(strategy, self.clock, limits, self._reply)
        self.welcome = welcome_of(spec, strategy, limits, self.service.epoch)

    def due(self) -> float | None:
        return self.clock.now() if self.service.busy or not self.service.inbox.empty() else None

    def take(self, event: Any) -> None:
        self.service.inbox.put(event)

    def step(self) -> bool:
        return self.service.step()

    def pong(self) -> Pong:
        return Pong(0, max(0, self.max_sessions - len(self.service.sessions)))

    def _reply(self, target: str, message: Message) -> None:
        assert isinstance(message, Drafted)
        self._world.send(self, self._world.targets[target], Arrived(self.name, message))


class VirtualWorld:
    """All nodes of a topology whose models are emulated, and the links between them.

    rtt: seconds there and back on every link.
    """

    def __init__(self, topology: Topology, rtt: float = 0.0) -> None:
        self._one_way = rtt / 2
        self._arrivals: list[tuple[float, int, Node, Any]] = []
        self._order = itertools.count()
        self._last: dict[tuple[int, int], float] = {}  # by link and direction: what is sent later arrives no sooner
        self.targets = {spec.name: VirtualTarget(self, topology, spec) for spec in topology.targets}
        self.drafters = {spec.name: VirtualDrafter(self, topology, spec) for spec in topology.drafters}
        self._nodes: list[Node] = [*self.targets.values(), *self.drafters.values()]
        for spec in topology.targets:
            for name in spec.drafters.names:
                self._link(self.targets[spec.name], self.drafters[name])
        self._beat_at = BEAT_SECONDS

    def _link(self, target: VirtualTarget, drafter: VirtualDrafter) -> None:
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "virtual", target.name, bytes(32), "", target.vocabulary_size)
        self.at(0.0, drafter, PeerUp(target.name, hello))

        def send(message: Message) -> bool:
            self.send(target, drafter, Received(target.name, message))
            return True

        self.at(0.0, target, LinkUp(drafter.name, drafter.welcome, send))

    def send(self, sender: Node, receiver: Node, event: Any) -> None:
        """Puts an event on its way at the sender's present time."""
        link = (id(sender), id(receiver))
        due = max(sender.clock.now() + self._one_way, self._last.get(link, 0.0))
        self._last[link] = due
        if isinstance(event, (Arrived, Received)):
            event = event._replace(at=due)
        heapq.heappush(self._arrivals, (due, next(self._order), receiver, event))

    def at(self, time: float, node: Node, event: Any) -> None:
        """An event that comes from outside."""
        heapq.heappush(self._arrivals, (time, next(self._order), node, event))

    def run(self, until: float | Callable[[], bool]) -> float:
        """Steps nodes until that time (or until it says so, or nothing is left to do). Returns the time reached."""
        limit = until if not callable(until) else float("inf")
        stop = until if callable(until) else lambda: False
        awake: list[tuple[float, int, Node]] = [
            (due, next(self._order), node) for node in self._nodes if (due := node.due()) is not None
        ]
        heapq.heapify(awake)
        planned = {id(node): due for due, _, node in awake}
        now = 0.0

        def plan(node: Node, due: float | None) -> None:
            if due is not None and due < planned.get(id(node), float("inf")):
                planned[id(node)] = due
                heapq.heappush(awake, (due, next(self._order), node))

        while not stop():
            next_arrival = self._arrivals[0][0] if self._arrivals else float("inf")
            next_step = awake[0][0] if awake else float("inf")
            now = min(next_arrival, next_step)
            if now > limit or now == float("inf"):
                return min(now, limit)
            if now >= self._beat_at:
                self._beat(now)
            if next_arrival <= next_step:
                _, _, node, event = heapq.heappop(self._arrivals)
                node.take(event)
                plan(node, max(now, node.clock.now()))
                continue
            _, _, node = heapq.heappop(awake)
            if planned.get(id(node)) != now:
                continue  # it was planned again for an earlier time
            del planned[id(node)]
            if node.clock.now() < now:
                node.clock.advance(now - node.clock.now())
            worked = node.step()
            plan(node, node.clock.now() if worked else _later(node))
        return now

    def _beat(self, now: float) -> None:
        self._beat_at = now + BEAT_SECONDS
        for target in self.targets.values():
            for name in target.engine.drafting.drafters:
                drafter = self.drafters[name]
                live = target.engine.drafting.live(name)
                self.at(now + self._one_way, drafter, Received(target.name, Ping(0, live)))
                self.at(now + 2 * self._one_way, target, Room(name, drafter.pong().free_sessions))


def _later(node: Node) -> float | None:
    """When a node that found nothing to do would act by itself, never the present moment again."""
    due = node.due()
    return None if due is None else max(due, node.clock.now() + 1e-9)
