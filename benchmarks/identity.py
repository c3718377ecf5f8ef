"""Does any token differ? Target and drafter over a link that loses, doubles, reorders, delays; against plain decoding.

    python benchmarks/identity.py --tokens 1000000

Real engine, real drafter service, real frames; emulated float64 models and a virtual clock. A world is one target with
random lanes, draft lengths (0..16), deadlines, memory and fault rates, and some dozens of requests with random sampling
parameters, prompts, lengths and seeds. Drafters restart under a new epoch, sessions are evicted, requests are
cancelled, and some proposals are replaced by nonsense. Every request's ids, text and end are compared with a sampler
that knows nothing of rounds.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from paceline.cloud.commit import Output
from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Arrived, Cancel, Engine, EngineConfig, LinkDown, LinkUp, Submit
from paceline.cloud.requests import Delta, Request
from paceline.core.clock import ManualClock
from paceline.core.emulated import ToyLanguage, ToyModel
from paceline.core.sampling import History, Sampling, adjust, choose
from paceline.edge.events import Limits, PeerUp, Received
from paceline.edge.runtimes.emulated import EmulatedRuntime
from paceline.edge.service import DrafterService
from paceline.edge.strategies.draft_model import DraftModel
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

VOCABULARY = 64
TICK = 0.001  # seconds of virtual time a turn of both loops takes
TOKEN_BYTES = [bytes([97 + token % 26]) for token in range(48)] + [b"", "é".encode(), b"\xe2\x82", b"\xac"] * 4


# --- what is expected ------------------------------------------------------------------------------


@dataclass
class Expected:
    """What plain decoding gives: one token at a time, no rounds, no drafts."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


def plain(language: ToyLanguage, requests: Sequence[Request], token_bytes: Sequence[bytes]) -> dict[str, Expected]:
    """Every request's output by the rule alone, many requests a numpy call."""
    expected = {request.id: Expected() for request in requests}
    outputs = {request.id: Output(request, token_bytes) for request in requests}
    histories = {request.id: History(request.prompt, len(request.prompt)) for request in requests}
    states = {}
    for request in requests:
        states[request.id] = 0
        for token in request.prompt:
            states[request.id] = language.next_state(states[request.id], token)
    going = list(requests)
    while going:
        rows = language.rows([states[request.id] for request in going])
        for index, request in enumerate(going):
            if request.sampling.adjusts:
                rows[index] = adjust(rows[index], request.sampling, histories[request.id])
        positions = [len(request.prompt) + len(expected[request.id].token_ids) for request in going]
        tokens = choose(rows, [request.sampling for request in going], positions).tolist()
        for request, token in zip(going, tokens, strict=True):
            done, this = outputs[request.id].commit([token]), expected[request.id]
            this.token_ids.append(token)
            this.text += done.text
            this.finish_reason = done.finish_reason
            states[request.id] = language.next_state(states[request.id], token)
            if request.sampling.adjusts:
                histories[request.id].extend([token])
        going = [request for request in going if expected[request.id].finish_reason is None]
    return expected


# --- the world -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """Probabilities a message, or a millisecond where said so."""

    loss: float = 0.0
    doubling: float = 0.0
    nonsense: float = 0.0  # a proposal is replaced by random ids, some outside every vocabulary
    slow: float = 0.0  # a message takes up to 0.3 s, so later ones overtake it
    latency: float = 0.0  # seconds, one way, jittered
    restart: float = 0.0  # a ms: a new epoch
    outage: float = 0.0  # a ms: the link is gone for up to 0.3 s
    cancellation: float = 0.0  # a request


@dataclass(frozen=True)
class Plan:
    """One world."""

    seed: int
    faults: Faults
    lanes: int = 1
    deadline: float | None = None
    agreement: float = 0.7
    target_sessions: int = 32
    target_slots: int = 1 << 15
    prefill_chunk: int = 256
    max_tokens_in_draft: int = 16_384
    drafter_context: int = 4096
    limits: Limits = field(default_factory=Limits)


def random_plan(seed: int) -> Plan:
    """Every kind of fault in some world, and some worlds without any."""
    random = Random(seed)

    def sometimes(highest: float) -> float:
        return random.choice([0.0, highest / 10, highest])

    faults = Faults(
        loss=sometimes(0.1),
        doubling=sometimes(0.2),
        nonsense=sometimes(0.1),
        slow=sometimes(0.1),
        latency=random.choice([0.0, 0.001, 0.01]),
        restart=sometimes(0.005),
        outage=sometimes(0.004),
        cancellation=sometimes(0.2),
    )
    return Plan(
        seed=seed,
        faults=faults,
        lanes=random.randint(1, 4),
        deadline=random.choice([None, None, None, 0.02, 0.1, 0.004]),
        agreement=random.choice([0.0, 0.5, 0.8, 0.95, 1.0]),
        target_sessions=random.choice([3, 16, 32]),
        target_slots=random.choice([1200, 8192]),
        prefill_chunk=random.choice([5, 64]),
        max_tokens_in_draft=random.choice([24, 16_384]),
        drafter_context=random.choice([120, 4096, 4096, 4096]),
        limits=Limits(
            max_sessions=random.choice([4, 64, 64, 64]),
            max_batch=random.choice([1, 8, 32]),
            max_messages=random.choice([0, 1]),
            max_queue=random.choice([4, 256, 256, 256]),
            chunk=random.choice([32, 256]),
            idle_seconds=random.choice([0.02, 10.0]),
        ),
    )


def random_request(random: Random, name: str) -> Request:
    """Any sampling parameters; prompts share beginnings, so that kept KV is used again."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * random.randint(0, 6) + [
        random.randrange(VOCABULARY) for _ in range(random.randint(1, 40))
    ]
    penalties = random.random() < 0.2
    sampling = Sampling(
        seed=random.getrandbits(64),
        temperature=random.choice([0.0, 0.3, 0.8, 1.0, 1.5]),
        top_p=random.choice([1.0, 1.0, 0.9, 0.5]),
        top_k=random.choice([0, 0, 5, 40]),
        min_p=random.choice([0.0, 0.0, 0.05]),
        presence_penalty=random.choice([0.0, 0.6]) if penalties else 0.0,
        frequency_penalty=random.choice([0.0, 0.3]) if penalties else 0.0,
        repetition_penalty=random.choice([1.0, 1.2]) if penalties else 1.0,
        logit_bias={random.randrange(VOCABULARY): random.uniform(-4, 4)} if random.random() < 0.1 else {},
    )
    return Request(
        name,
        tuple(prompt),
        sampling,
        max_tokens=random.randint(1, 400),
        stop=random.choice([(), (), ("ab",), ("xyz", "q€")]),
        stop_token_ids=random.choice([frozenset(), frozenset(), frozenset({0})]),
        log_probs=random.choice([None, None, None, 2]),
    )


class World:
    """One target, one drafter and everything that goes wrong between them; time is virtual."""

    def __init__(self, plan: Plan, requests: int = 48) -> None:
        self.plan = plan
        self.random = Random(plan.seed ^ 0x5EED)
        self.clock = ManualClock()
        self.seen: Counter[str] = Counter()
        self.language = ToyLanguage(VOCABULARY, seed=plan.seed)
        self.model = ToyModel(self.language, kv_slots=plan.target_slots, clock=self.clock)
        drafting = DraftingConfig(("d",), deadline=plan.deadline, max_tokens=plan.max_tokens_in_draft)
        self.engine = Engine(
            self.model,
            TOKEN_BYTES,
            EngineConfig(plan.lanes, plan.target_sessions, plan.prefill_chunk, drafting),
            self._publish,
            self.clock,
        )
        self.requests = [random_request(self.random, f"r{index}") for index in range(requests)]
        self.outputs: dict[str, Expected] = {request.id: Expected() for request in self.requests}
        self._unsubmitted = list(self.requests)
        self._cancel_at: list[tuple[float, str]] = []
        self._wires: list[tuple[float, int, int, bool, bytes]] = []  # due, order, link, to the drafter, frame
        self._order = itertools.count()
        self._link = 0
        self._up_at: float | None = 0.0
        self._pinged_at = 0.0
        self.epoch = 0
        self.service = self._start_drafter()

    # --- the drafter and its link

    def _start_drafter(self) -> DrafterService:
        self.epoch += 1
        language = replace(self.language, agreement=self.plan.agreement)
        draft_model = ToyModel(language, max_context=self.plan.drafter_context, kv_slots=1 << 15, clock=self.clock)
        strategy = DraftModel(EmulatedRuntime(draft_model))
        return DrafterService(strategy, self.clock, self.plan.limits, self._reply, self.epoch)

    def _link_up(self) -> None:
        self._link += 1
        link = self._link
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "identity", "t", bytes(32), "", VOCABULARY)
        self.service.inbox.put(PeerUp("t", hello))
        welcome = Welcome(
            self.epoch,
            "emulated",
            "draft_model",
            self.plan.limits.max_sessions,
            self.service.max_context,
            MAX_DRAFT_LENGTH,
        )
        self.engine.inbox.put(LinkUp("d", welcome, lambda message: self._carry(message, link, True)))
        self._up_at = None

    def _reply(self, name: str, message: Message) -> None:
        self._carry(self._spoiled(message), self._link, False)

    def _spoiled(self, message: Message) -> Message:
        if not isinstance(message, Drafted) or self.random.random() >= self.plan.faults.nonsense:
            return message
        self.seen["nonsense"] += 1
        items = []
        for item in message.items:
            tokens = list(unpack_tokens(item.tokens))[: self.random.randint(0, 16)]
            tokens += [self.random.choice([5, 63, 64, 65, 2**31, 2**32 - 1]) for _ in range(self.random.randint(0, 16))]
            items.append(replace_item(item, tokens[:MAX_DRAFT_LENGTH]))
        return Drafted(message.epoch, items)

    def _carry(self, message: Message, link: int, to_drafter: bool) -> bool:
        if link != self._link or self._up_at is not None:
            return False
        faults, random = self.plan.faults, self.random
        self.seen["messages"] += 1
        copies = 1
        if random.random() < faults.loss:
            copies = 0
            self.seen["lost"] += 1
        elif random.random() < faults.doubling:
            copies = random.randint(2, 3)
            self.seen["doubled"] += 1
        frame = encode(message)
        for _ in range(copies):
            delay = faults.latency * random.uniform(0.5, 1.5)
            if random.random() < faults.slow:
                delay += random.uniform(0.0, 0.3)
                self.seen["delayed"] += 1
            heapq.heappush(self._wires, (self.clock.now() + delay, next(self._order), link, to_drafter, frame))
        return True

    def _deliver(self) -> None:
        now = self.clock.now()
        while self._wires and self._wires[0][0] <= now:
            _, _, link, to_drafter, frame = heapq.heappop(self._wires)
            message = decode(frame)
            if to_drafter:
                self.service.inbox.put(Received("t", message))  # also of an older link: epochs must tell
            elif isinstance(message, Drafted):
                self.seen["old link"] += link != self._link
                self.engine.inbox.put(Arrived("d", message))

    # --- time

    def run(self) -> None:
        """Until every request has ended."""
        while self._unsubmitted or self.engine.live_sessions or self.engine.queued:
            self.turn()
        self.turn()

    def turn(self) -> None:
        """A millisecond: what goes wrong, what arrives, and both loops."""
        self._misfortune()
        self._arrivals()
        self._deliver()
        self.engine.drafting.config = replace(
            self.engine.drafting.config, draft_length=self.random.choice([0, 1, 2, 4, 4, 6, 8, 16])
        )
        self.engine.step()
        for _ in range(4):
            if not self.service.step():
                break
        self.clock.advance(TICK)

    def _misfortune(self) -> None:
        random, faults, now = self.random, self.plan.faults, self.clock.now()
        if self._up_at is not None:
            if now >= self._up_at:
                self._link_up()
        elif random.random() < faults.restart:
            self.seen["restarts"] += 1
            self.service = self._start_drafter()
            if random.random() < 0.5:
                self.engine.inbox.put(LinkDown("d"))
            self._link_up()
        elif random.random() < faults.outage:
            self.seen["outages"] += 1
            self.engine.inbox.put(LinkDown("d"))
            self._up_at = now + random.uniform(0.0, 0.3)
        if now - self._pinged_at >= 1.0:
            self._pinged_at = now
            self._carry(Ping(int(now * 1e6), self.engine.drafting.live()), self._link, True)

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

    def compare(self) -> Result:
        """Every output against plain decoding; a cancelled one must be a beginning of it."""
        result = Result(faults=self.seen)
        expected = plain(self.language, self.requests, TOKEN_BYTES)
        for request in self.requests:
            ours, theirs = self.outputs[request.id], expected[request.id]
            count = len(ours.token_ids)
            result.tokens += count
            result.requests += 1
            differing = sum(a != b for a, b in zip(ours.token_ids, theirs.token_ids, strict=False))
            if ours.finish_reason == "cancelled":
                result.faults["cancelled"] += 1
                whole = count <= len(theirs.token_ids) and theirs.text.startswith(ours.text)
            else:
                whole = ours == theirs
            if differing or not whole:
                result.differing += max(differing, 1)
                result.failures.append(f"world {self.plan.seed}, {request.id}: {ours} is not {theirs}")
        statistics = self.engine.statistics
        result.rounds, result.drafted_rounds = statistics.rounds, statistics.drafted_rounds
        result.emitted_with_draft = statistics.emitted_with_draft
        return result

    def leaks(self) -> list[str]:
        """What is still held at either end once a last Ping has arrived."""
        self.service.inbox.put(Received("t", Ping(0, self.engine.drafting.live())))
        while self.service.step():
            pass
        held = {
            "sessions at the target": self.engine.live_sessions,
            "spans at the target": len(self.model._states),
            "soft states at the target": len(self.engine.drafting.sessions),
            "sessions at the drafter": len(self.service.sessions),
        }
        return [f"world {self.plan.seed}: {count} {what}" for what, count in held.items() if count]


def replace_item(item: DraftedItem, tokens: list[int]) -> DraftedItem:
    """The item with other tokens."""
    return type(item)(item.session, item.status, item.held, item.position, pack_tokens(tokens), item.retry_after_ms)


# --- the command -----------------------------------------------------------------------------------


@dataclass
class Result:
    """What was compared."""

    tokens: int = 0
    differing: int = 0
    requests: int = 0
    rounds: int = 0
    drafted_rounds: int = 0
    emitted_with_draft: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        for name in ("tokens", "differing", "requests", "rounds", "drafted_rounds", "emitted_with_draft"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults.update(other.faults)
        self.failures.extend(other.failures)


def compare(tokens: int, seed: int = 0, requests: int = 48, progress: bool = False) -> Result:
    """Worlds of so many requests until so many tokens are compared. Leaks count as failures."""
    total = Result()
    for number in itertools.count(seed):
        world = World(random_plan(number), requests)
        world.run()
        total.add(world.compare())
        total.failures.extend(world.leaks())
        if progress:
            sys.stderr.write(f"\r{total.tokens} of {tokens} tokens, {total.differing} differing ")
        if total.tokens >= tokens:
            return total
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="how many to compare at least")
    parser.add_argument("--seed", type=int, default=0, help="the first world's number")
    options = parser.parse_args()
    started = time.monotonic()
    result = compare(options.tokens, options.seed, progress=sys.stderr.isatty())
    seconds = time.monotonic() - started
    length = result.emitted_with_draft / max(1, result.drafted_rounds)
    print(f"tokens compared  {result.tokens}\ndiffering        {result.differing}\nseconds          {seconds:.1f}")
    print(f"requests         {result.requests}\nrounds           {result.rounds}, {result.drafted_rounds} with a draft")
    print(f"acceptance       {length:.2f} tokens a round with a draft (emulated)")
    print("faults           " + ", ".join(f"{count} {name}" for name, count in sorted(result.faults.items())))
    for failure in result.failures[:10]:
        print(failure)
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
