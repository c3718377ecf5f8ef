"""How often the embedded pair's fp32 text differs with a drafter, and by how much: at most 1 token in 10⁵.

Real engine, real drafter service and both real models in one process, message by message, without sockets.
Texts of plain decoding one at a time are compared with texts of speculative rounds, eight in flight. Where a
text differs first, the token's position is shown and the margin by which it was chosen (noise included); what
follows a difference has another context and is not compared.

    python benchmarks/identity_fp32.py [--tokens 200000]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from common import DRAFTER, TARGET, prompts

from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Arrived, LinkUp, Submit
from paceline.cloud.requests import Delta, Request
from paceline.core.clock import RealClock
from paceline.core.lm.loading import load
from paceline.core.lm.model import LanguageModel
from paceline.core.model import Segment
from paceline.core.sampling import Sampling, gumbel, row_key
from paceline.core.vocabulary import Vocabulary
from paceline.edge.events import Limits, PeerUp, Received
from paceline.edge.runtimes.torch import TorchRuntime
from paceline.edge.service import DrafterService
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.wire import MAX_DRAFT_LENGTH, Drafted, Hello, Welcome

LENGTH, IN_FLIGHT, CONTEXT = 256, 8, 640


class Generator:
    """An engine with or without a drafter; runs requests to their end."""

    def __init__(
        self, target: LanguageModel, vocabulary: Vocabulary, drafter: LanguageModel | None, lanes: int
    ) -> None:
        names = ("drafter",) if drafter else ()
        config = EngineConfig(lanes, IN_FLIGHT, 256, DraftingConfig(names, 4))
        self.texts: dict[str, list[int]] = {}
        self.engine = Engine(target, vocabulary.token_bytes, config, self.publish)
        self.service: DrafterService | None = None
        if drafter:
            strategy = DraftModel(TorchRuntime(drafter, vocabulary.size))
            self.service = DrafterService(strategy, RealClock(), Limits(max_sessions=64), self.reply, 1)
            self.service.inbox.put(PeerUp("target", Hello(1, 0, "d", "target", b"", "", vocabulary.size)))
            welcome = Welcome(1, "m", "draft_model", 64, strategy.max_context, MAX_DRAFT_LENGTH)
            self.engine.inbox.put(LinkUp("drafter", welcome, self.send))

    def publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.texts.setdefault(delta.request_id, []).extend(delta.token_ids)

    def reply(self, target: str, message: Any) -> None:
        assert isinstance(message, Drafted)
        self.engine.inbox.put(Arrived("drafter", message))

    def send(self, message: Any) -> bool:
        assert self.service is not None
        self.service.inbox.put(Received("target", message))
        return True

    def run(self, requests: list[Request]) -> dict[str, list[int]]:
        self.texts = {}
        for request in requests:
            self.engine.inbox.put(Submit(request))
        busy = True
        while busy:
            while self.service and self.service.step():
                pass
            busy = self.engine.step() or bool(self.engine.live_sessions) or bool(self.service and self.service.busy)
        return self.texts


def margin(target: LanguageModel, tokens: list[int], sampling: Sampling) -> float:
    """By how much the choice after `tokens` won: difference of the two largest of logit / temperature + noise."""
    span = target.allocate(len(tokens))
    assert span is not None
    row = torch.as_tensor(target.forward([Segment(span, 0, tokens, 1)]))[0].double()
    target.free(span)
    if sampling.temperature > 0:
        key = torch.tensor([row_key(sampling.seed, len(tokens))])
        row = row / sampling.temperature + gumbel(key, torch.arange(len(row)))
    top = row.topk(2).values
    return float(top[0] - top[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000)
    arguments = parser.parse_args()
    vocabulary = Vocabulary.load(TARGET)
    target = load(TARGET, threads=1, max_context=CONTEXT, kv_slots=CONTEXT * IN_FLIGHT * 2)
    drafter = load(DRAFTER, threads=1, max_context=CONTEXT, kv_slots=CONTEXT * 64)
    plain = Generator(target, vocabulary, None, 1)
    star = Generator(target, vocabulary, drafter, 2)
    compared = differing = 0
    started = time.perf_counter()
    seed = 0
    while compared < arguments.tokens:
        requests = []
        for index, text in enumerate(prompts(IN_FLIGHT, 200, offset=150 + 61 * (seed % 40))):
            sampling = Sampling(seed=seed * 100 + index, temperature=0.0 if index % 4 == 0 else 0.8)
            requests.append(Request(f"r{index}", tuple(vocabulary.encode(text)[:200]), sampling, LENGTH))
        seed += 1
        drafted = star.run(requests)
        for request in requests:
            (own,) = plain.run([request]).values()
            other = drafted[request.id]
            same = next((i for i, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1]), len(own))
            compared += min(same + 1, len(own))
            if same < len(own):
                differing += 1
                gap = margin(target, [*request.prompt, *own[:same]], request.sampling)
                print(f"differs: seed {request.sampling.seed}, token {same}, top-2 margin {gap:.2e}")
        if seed % 5 == 0:
            print(f"{compared} tokens, {differing} differing, {time.perf_counter() - started:.0f} s", flush=True)
    acceptance = star.engine.statistics.acceptance_length
    print(f"{compared} tokens compared, {differing} differ: {differing / compared:.1e} (asked ≤ 1e-05)")
    print(f"acceptance length {acceptance:.2f}")
    sys.exit(differing > max(1, compared * 1e-5))


if __name__ == "__main__":
    main()
