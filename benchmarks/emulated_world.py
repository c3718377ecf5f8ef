"""Real engine, drafter service and frames; emulated models, a virtual clock, and between them a link with faults."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

from random_worlds import VOCABULARY, Plan, random_request

from paceline.cloud.drafters import Policy
from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Arrived, Cancel, LinkDown, LinkUp, Reconfigure, Room, Submit
from paceline.cloud.requests import Delta
from paceline.core.clock import ManualClock
from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.edge.events import PeerUp, Received
from paceline.edge.runtimes.emulated import EmulatedRuntime
from paceline.edge.service import DrafterService
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.handshake import DRAFT_AHEAD
from paceline.topology.wire import (
    MAX_DRAFT_LENGTH,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Drafted,
    DraftedItem,
    Hello,
    Message,
    Ping,
    Welcome,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)

TICK = 0.001  # seconds of virtual time a turn of both loops takes
TOKEN_BYTES = [bytes([97 + token % 26]) for token in range(48)] + [b"", "é".encode(), b"\xe2\x82", b"\xac"] * 4


@dataclass
class Outcome:
    """What became of a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


class Remote:
    """One drafter and the link to it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.link = 0
        self.up_at: float | None = 0.0
        self.epoch = 0
        self.service = self._start()

    def _start(self) -> DrafterService:
        world = self.world
        self.epoch += 1
        language = replace(world.language, agreement=world.plan.agreement)
        context = world.plan.drafter_context
        self.model = ToyModel(language, max_context=context, kv_slots=1 << 15, clock=world.clock)
        strategy = DraftModel(EmulatedRuntime(self.model))
        return DrafterService(strategy, world.clock, world.plan.limits, self._reply, self.epoch)

    def _link_up(self) -> None:
        self.link += 1
        link, limits = self.link, self.world.plan.limits
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "identity", "t", bytes(32), "", VOCABULARY)
        self.service.inbox.put(PeerUp("t", hello))
        welcome = Welcome(
            self.epoch,
            "emulated",
            "draft_model",
            limits.max_sessions,
            self.service.max_context,
            MAX_DRAFT_LENGTH,
            [DRAFT_AHEAD],
        )
        self.world.put(LinkUp(self.name, welcome, lambda message: self.carry(message, link, True)))
        self.up_at = None

    def _reply(self, name: str, message: Message) -> None:
        self.carry(self.world.spoiled(message), self.link, False)

    def carry(self, message: Message, link: int, to_drafter: bool) -> bool:
        """Puts a message on its way, if the link is up."""
        if link != self.link or self.up_at is not None:
            return False
        self.world.send(self, encode(message), link, to_drafter)
        return True

    def leaked_spans(self) -> int:
        """Spans that neither a session nor its forks nor the cache holds."""
        held = sum(1 + len(session.forks) for session in self.service.sessions)
        return len(self.model._states) - held - len(self.service.sessions.cache)

    def misfortune(self) -> None:
        """What goes wrong in this millisecond."""
        world, random, faults, now = self.world, self.world.random, self.world.plan.faults, self.world.clock.now()
        if self.up_at is not None:
            if now >= self.up_at:
                self._link_up()
        elif random.random() < faults.restart:
            world.seen["restarts"] += 1
            self.service = self._start()
            if random.random() < 0.5:
                world.put(LinkDown(self.name))
            self._link_up()
        elif random.random() < faults.outage:
            world.seen["outages"] += 1
            world.put(LinkDown(self.name))
            self.up_at = now + random.uniform(0.0, 0.3)
        elif random.random() < faults.room:
            world.seen["claims of room"] += 1
            world.put(Room(self.name, random.randint(-2, world.plan.limits.max_sessions + 2)))

    def ping(self) -> None:
        live = self.world.engine.drafting.live(self.name)
        self.carry(Ping(int(self.world.clock.now() * 1e6), live), self.link, True)


class World:
    """One target, its drafters and everything that goes wrong between them; time is virtual."""

    def __init__(self, plan: Plan, requests: int = 48) -> None:
        self.plan = plan
        self.random = Random(plan.seed ^ 0x5EED)
        self.clock = ManualClock()
        self.seen: Counter[str] = Counter()
        self.language = ToyLanguage(VOCABULARY, seed=plan.seed)
        self.model = ToyModel(self.language, kv_slots=plan.target_slots, clock=self.clock)
        names = tuple("d" * (index + 1) for index in range(plan.drafters))
        drafting = DraftingConfig(
            names,
            deadline=plan.deadline,
            max_tokens=plan.max_tokens_in_draft,
            policy=plan.policy,
            draft_ahead=plan.draft_ahead,
        )
        self.engine = Engine(
            self.model,
            TOKEN_BYTES,
            EngineConfig(plan.lanes, plan.target_sessions, plan.prefill_chunk, drafting),
            self._publish,
            self.clock,
        )
        self.put = self.engine.inbox.put
        self.requests = [random_request(self.random, f"r{index}") for index in range(requests)]
        self.outputs: dict[str, Outcome] = {request.id: Outcome() for request in self.requests}
        self._unsubmitted = list(self.requests)
        self._cancel_at: list[tuple[float, str]] = []
        self._wires: list[tuple[float, int, Remote, int, bool, bytes]] = []  # due, order, …, link, to it, frame
        self._order = itertools.count()
        self._pinged_at = 0.0
        self.remotes = [Remote(self, name) for name in names]

    # --- links

    def spoiled(self, message: Message) -> Message:
        """The message, or nonsense in its place."""
        if not isinstance(message, Drafted) or self.random.random() >= self.plan.faults.nonsense:
            return message
        self.seen["nonsense"] += 1
        items = []
        for item in message.items:
            tokens = list(unpack_tokens(item.tokens))[: self.random.randint(0, 16)]
            tokens += [self.random.choice([5, 63, 64, 65, 2**31, 2**32 - 1]) for _ in range(self.random.randint(0, 16))]
            items.append(replace_item(item, tokens[:MAX_DRAFT_LENGTH]))
        if message.branches is None:
            return Drafted(message.epoch, items)
        drafts = [item.tokens for item in items]
        branches = [
            [(self.random.randint(0, 16), token, draft) for _, token, _ in branches]
            for branches, draft in zip(message.branches, drafts, strict=True)
        ]
        return Drafted(message.epoch, message.items, branches=branches)

    def send(self, remote: Remote, frame: bytes, link: int, to_drafter: bool) -> None:
        """A frame leaves: not at all, once or several times, sooner or later."""
        faults, random = self.plan.faults, self.random
        self.seen["messages"] += 1
        copies = 1
        if random.random() < faults.loss:
            copies = 0
            self.seen["lost"] += 1
        elif random.random() < faults.doubling:
            copies = random.randint(2, 3)
            self.seen["doubled"] += 1
        for _ in range(copies):
            delay = faults.latency * random.uniform(0.5, 1.5)
            if random.random() < faults.slow:
                delay += random.uniform(0.0, 0.3)
                self.seen["delayed"] += 1
            due = self.clock.now() + delay
            heapq.heappush(self._wires, (due, next(self._order), remote, link, to_drafter, frame))

    def _deliver(self) -> None:
        now = self.clock.now()
        while self._wires and self._wires[0][0] <= now:
            _, _, remote, link, to_drafter, frame = heapq.heappop(self._wires)
            message = decode(frame)
            if to_drafter:
                remote.service.inbox.put(Received("t", message))  # also of an older link: epochs must tell
            elif isinstance(message, Drafted):
                self.seen["old link"] += link != remote.link
                self.put(Arrived(remote.name, message))

    # --- time

    def run(self) -> None:
        """Until every request has ended."""
        while self._unsubmitted or self.engine.live_sessions or self.engine.queued:
            self.turn()
        self.turn()

    def turn(self) -> None:
        """A millisecond: what goes wrong, what arrives, and both loops."""
        for remote in self.remotes:
            remote.misfortune()
        self._reconfigure()
        self._arrivals()
        self._deliver()
        self.engine.drafting.config = replace(
            self.engine.drafting.config, draft_length=self.random.choice([0, 1, 2, 4, 4, 6, 8, 16])
        )
        if self.engine.begin():
            self._deliver()  # what arrives during the forward
            self.engine.finish()
        for remote in self.remotes:
            for _ in range(4):
                if not remote.service.step():
                    break
        self.clock.advance(TICK)

    def _reconfigure(self) -> None:
        """Pings, and now and then another order of drafters, another policy."""
        now = self.clock.now()
        if now - self._pinged_at >= 1.0:
            self._pinged_at = now
            for remote in self.remotes:
                remote.ping()
        if self.random.random() < self.plan.faults.reconfiguration:
            self.seen["reconfigurations"] += 1
            names = self.random.sample([remote.name for remote in self.remotes], len(self.remotes))
            policy: Policy = self.random.choice(["failover", "spread"])
            drafting = replace(self.engine.config.drafting, drafters=tuple(names), policy=policy)
            self.put(Reconfigure(replace(self.engine.config, drafting=drafting)))

    def _arrivals(self) -> None:
        now = self.clock.now()
        for _ in range(self.random.choice([0, 0, 0, 1, 4])):
            if self._unsubmitted and self.engine.queued < 8:
                request = self._unsubmitted.pop(0)
                self.engine.inbox.put(Submit(request))
                if self.random.random() < self.plan.faults.cancellation:
                    heapq.heappush(self._cancel_at, (now + self.random.uniform(0, 0.3), request.id))
        while self._cancel_at and self._cancel_at[0][0] <= now:
            self.engine.inbox.put(Cancel(heapq.heappop(self._cancel_at)[1]))

    # --- what came out

    def _publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            output = self.outputs[delta.request_id]
            if output.finish_reason is not None:
                raise AssertionError(f"{delta.request_id}: output after its end")
            output.token_ids.extend(delta.token_ids)
            output.text += delta.text
            output.finish_reason = delta.finish_reason

    def leaks(self) -> list[str]:
        """What is still held at either end once a last Ping has arrived."""
        for remote in self.remotes:
            remote.service.inbox.put(Received("t", Ping(0, self.engine.drafting.live(remote.name))))
            while remote.service.step():
                pass
        held = {
            "sessions at the target": self.engine.live_sessions,
            "spans at the target": len(self.model._states),
            "soft states at the target": len(self.engine.drafting.sessions),
            "spans at drafters that nobody holds": sum(remote.leaked_spans() for remote in self.remotes),
            "sessions at drafters": sum(len(remote.service.sessions) for remote in self.remotes),
        }
        return [f"world {self.plan.seed}: {count} {what}" for what, count in held.items() if count]


def replace_item(item: DraftedItem, tokens: list[int]) -> DraftedItem:
    """The item with other tokens."""
    return type(item)(item.session, item.status, item.held, item.position, pack_tokens(tokens), item.retry_after_ms)
