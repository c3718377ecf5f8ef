"""Does any token differ? A target and its drafters over links that lose, double, reorder and delay.

    python benchmarks/identity.py --tokens 1000000

Real engine, real drafter services, real frames; emulated float64 models and a virtual clock. A world is one target
with one to three drafters, random lanes, draft lengths (0..16), policies, deadlines, memory and fault rates, and some
dozens of requests with random sampling parameters, prompts, lengths and seeds. Drafters restart under a new epoch,
sessions move between them, are evicted, requests are cancelled, and some proposals are replaced by nonsense. Every
request's ids, text and end are compared with plain decoding by a sampler that knows nothing of rounds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from emulated_world import TOKEN_BYTES, Outcome, World
from random_worlds import random_plan

from paceline.cloud.commit import Output
from paceline.cloud.requests import Request
from paceline.core.emulated import ToyLanguage
from paceline.core.sampling import History, adjust, choose


def plain(language: ToyLanguage, requests: Sequence[Request], token_bytes: Sequence[bytes]) -> dict[str, Outcome]:
    """Every request's output by the rule alone, many requests a numpy call."""
    expected = {request.id: Outcome() for request in requests}
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


def compare_world(world: World) -> Result:
    """Every output against plain decoding; a cancelled one must be a beginning of it."""
    result = Result(faults=world.seen)
    expected = plain(world.language, world.requests, TOKEN_BYTES)
    for request in world.requests:
        ours, theirs = world.outputs[request.id], expected[request.id]
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
            result.failures.append(f"world {world.plan.seed}, {request.id}: {ours} is not {theirs}")
    result.faults["branches taken"] += world.engine.drafting.ahead.hits
    statistics = world.engine.statistics
    result.rounds, result.drafted_rounds = statistics.rounds, statistics.drafted_rounds
    result.emitted_with_draft = statistics.emitted_with_draft
    return result


def compare(tokens: int, seed: int = 0, requests: int = 48, progress: bool = False) -> Result:
    """Worlds of so many requests until so many tokens are compared. Leaks count as failures."""
    total = Result()
    for number in itertools.count(seed):
        world = World(random_plan(number), requests)
        world.run()
        total.add(compare_world(world))
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
