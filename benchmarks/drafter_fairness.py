"""What long prompts of one target cost another one at the same drafter, and what a batch of 8 costs against one.

The drafter's service runs the torch runtime. One target does rounds in a closed loop (drafts for its sessions, then
VERIFY milliseconds of its own, then again), alone and beside a target that always has two 4 000-token prompts on
their way; the two cases take turns. On a machine that other work keeps busy a process that computes all the time gets
a smaller share of a core than one that sleeps now and then, which says nothing about the drafter: `--clock cpu`
measures in this process's own processor time.

    python benchmarks/drafter_fairness.py [--clock real|cpu] [--seconds 1.5] [--repeats 7] [--sessions 4] [--verify 30]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import torch
from common import DRAFTER, median, verdict

from paceline.core.clock import Clock, RealClock
from paceline.core.lm.loading import load, wrap
from paceline.core.sampling import Sampling
from paceline.edge.events import Limits, PeerUp, Received
from paceline.edge.runtimes.torch import TorchRuntime
from paceline.edge.service import DrafterService
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.wire import (
    Close,
    Draft,
    Drafted,
    DraftItem,
    Hello,
    Message,
    check_hash,
    pack_tokens,
    unpack_tokens,
)

PROMPT_TOKENS, CONTEXT, K, EPOCH = 4000, 4224, 4, 1
ROUND_TOKENS = 256  # where the looping target's sessions start
LEAST_RATIO, MOST_BATCH_COST = 0.8, 3.0


class Rounds:
    """A target in a closed loop over `sessions` sessions; two tokens of each round are new."""

    def __init__(self, name: str, sessions: int, verify: float) -> None:
        self.name = name
        self.verify = verify
        self.done = 0
        self.draft_times: list[float] = []
        self._count = sessions
        self._first = 0
        self._tokens: dict[int, list[int]] = {}
        self._base: dict[int, int] = {}
        self._check: dict[int, int] = {}
        self._missing: set[int] = set()
        self._drafts: dict[int, list[int]] = {}
        self._asked = 0.0
        self._due = 0.0

    def act(self, service: DrafterService, now: float) -> None:
        """Asks for the next drafts when verification is over."""
        if self._missing or now < self._due:
            return
        if not self._tokens or len(self._tokens[self._first]) > CONTEXT - 8:
            self._open(service)
        items = []
        for number, tokens in self._tokens.items():
            base = self._base[number]
            new = tokens[base:]
            opening = Sampling(temperature=0.0) if base == 0 else None
            items.append(DraftItem(number, base, pack_tokens(new), self._check[number], K, opening, ROUND_TOKENS))
            self._check[number] = check_hash(new, self._check[number])
            self._base[number] = len(tokens)
        self._missing = set(self._tokens)
        self._asked = now
        service.inbox.put(Received(self.name, Draft(EPOCH, items)))

    def _open(self, service: DrafterService) -> None:
        service.inbox.put(Received(self.name, Close(EPOCH, list(self._tokens))))
        self._first += self._count
        self._tokens = {n: noise(n, ROUND_TOKENS) for n in range(self._first, self._first + self._count)}
        self._base = dict.fromkeys(self._tokens, 0)
        self._check = dict.fromkeys(self._tokens, 0)

    def answered(self, message: Drafted, now: float) -> None:
        for item in message.items:
            self._drafts[item.session] = list(unpack_tokens(item.tokens))
            self._missing.discard(item.session)
        if not self._missing:
            self.done += 1
            self.draft_times.append(now - self._asked)
            self._due = now + self.verify
            for number, tokens in self._tokens.items():
                tokens += [*self._drafts.get(number, [])[:1], self.done % 1000]


class Opener:
    """A target that always has two long prompts on their way and closes each one when it is read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.opened = 0

    def act(self, service: DrafterService) -> None:
        mine = [session for session in service.sessions if session.target == self.name]
        read = [session.id for session in mine if not session.behind]
        if read:
            service.inbox.put(Received(self.name, Close(EPOCH, read)))
        for _ in range(2 - (len(mine) - len(read))):
            self.opened += 1
            item = DraftItem(self.opened, 0, pack_tokens(noise(self.opened, PROMPT_TOKENS)), 0, 0, None, PROMPT_TOKENS)
            service.inbox.put(Received(self.name, Draft(EPOCH, [item])))


NOISE = random.Random(0).choices(range(1000), k=PROMPT_TOKENS)


def noise(seed: int, count: int) -> list[int]:
    """Tokens that share no prefix with another seed's."""
    start = 37 * seed % PROMPT_TOKENS
    return (NOISE[start:] + NOISE[:start])[:count]


class CpuClock:
    """This process's processor time, and what it waited for on purpose."""

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return time.process_time() + self._waited

    def sleep(self, seconds: float) -> None:
        self._waited += seconds


def hello(name: str) -> Hello:
    return Hello(1, 0, "benchmark", name, b"", "", 0)


def measure(
    runtime: TorchRuntime, clock: Clock, seconds: float, sessions: int, verify: float, beside: bool
) -> dict[str, Any]:
    """One service, one window: rounds a second, seconds of a round's drafting, prompt tokens read a second."""
    replies: list[tuple[str, Message]] = []
    limits = Limits(max_sessions=32)
    service = DrafterService(DraftModel(runtime), clock, limits, lambda n, m: replies.append((n, m)), EPOCH)
    target = Rounds("rounds", sessions, verify)
    service.inbox.put(PeerUp(target.name, hello(target.name)))
    opener = Opener("opener") if beside else None
    if opener is not None:
        service.inbox.put(PeerUp(opener.name, hello(opener.name)))
    warm_up, start, begin = 0.5, clock.now(), 0.0
    before = (0, 0)
    while True:
        now = clock.now()
        if not begin and now - start > warm_up:
            begin, before = now, (target.done, service.statistics.tokens_read)
            target.draft_times.clear()
        if begin and now - begin > seconds:
            break
        target.act(service, now)
        if opener is not None:
            opener.act(service)
        if not service.step():
            clock.sleep(0.0002)
            continue
        for name, message in replies:
            if name == target.name and isinstance(message, Drafted):
                target.answered(message, clock.now())
        replies.clear()
    for session in list(service.sessions):
        service.sessions.release(session, keep=False)
    while service.sessions.cache.evict():
        pass
    return {
        "rounds": (target.done - before[0]) / seconds,
        "draft": median(target.draft_times),
        "read": (service.statistics.tokens_read - before[1]) / seconds,
    }


def runtime_of(sessions: int) -> tuple[str, TorchRuntime]:
    """The embedded draft model, or a random one of its shape where it is not there."""
    slots = sessions * CONTEXT * 2
    if (DRAFTER / "config.json").is_file():
        return DRAFTER.name, TorchRuntime(load(DRAFTER, threads=1, kv_slots=slots, max_context=CONTEXT))
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    return "random weights", TorchRuntime(wrap(module, kv_slots=slots, max_context=CONTEXT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", choices=["real", "cpu"], default="real")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one window")
    parser.add_argument("--repeats", type=int, default=7, help="windows of each kind")
    parser.add_argument("--sessions", type=int, default=4, help="sessions of the looping target")
    parser.add_argument("--verify", type=float, default=30.0, help="milliseconds the looping target verifies for")
    arguments = parser.parse_args()
    clock: Clock = RealClock() if arguments.clock == "real" else CpuClock()
    name, runtime = runtime_of(16)
    print(f"drafter: {name}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), {arguments.clock} clock")
    alone, beside, one, eight = [], [], [], []
    for _ in range(arguments.repeats):
        for found, busy in ((alone, False), (beside, True)):
            found.append(measure(runtime, clock, arguments.seconds, arguments.sessions, arguments.verify / 1000, busy))
        for draws, sessions in ((one, 1), (eight, 8)):
            draws.append(measure(runtime, clock, arguments.seconds / 2, sessions, 0.0, False)["draft"])
    rates = [median([window["rounds"] for window in windows]) for windows in (alone, beside)]
    print(f"rounds/s: {rates[0]:.1f} alone, {rates[1]:.1f} beside prompts read at "
          f"{median([window['read'] for window in beside]):.0f} tokens/s")  # fmt: skip
    print(f"drafting k = {K}: {median(one) * 1e3:.2f} ms for one session, {median(eight) * 1e3:.2f} ms for 8")
    kept = median([b["rounds"] / a["rounds"] for a, b in zip(alone, beside, strict=True)])
    cost = median([b / a for a, b in zip(one, eight, strict=True)])
    print(verdict("rounds kept beside long prompts", kept, LEAST_RATIO))
    print(verdict("a batch of 8 against one", cost, MOST_BATCH_COST, at_least=False))
    return 0 if kept >= LEAST_RATIO and cost <= MOST_BATCH_COST else 1


if __name__ == "__main__":
    sys.exit(main())
