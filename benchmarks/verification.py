"""How much of the embedded drafter's drafts each kind of verification accepts: coupled and rejection, side by side.

Real engine, real drafter service and both real models in one process, on a clock of its own, message by message: no
figure depends on time. Continuations of held-out file heads at several temperatures, each counted up to the first
8-gram that it repeats. Beside the measured shares stand the bounds, over the same texts: no rule that decides token by
token can accept more than Σ min(p, q) of what is drawn from q; rejection draws from q', the weights that it sends.

    python benchmarks/verification.py [--files 64] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from acceptance import repeats
from common import DRAFTER, MODELS, TARGET

from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Arrived, LinkUp, Submit
from paceline.cloud.requests import Delta, Request
from paceline.core.clock import ManualClock
from paceline.core.lm.loading import load
from paceline.core.lm.model import LanguageModel
from paceline.core.model import Segment
from paceline.core.rejection import weights_of
from paceline.core.sampling import Sampling, choice_seed, probabilities
from paceline.core.vocabulary import Vocabulary
from paceline.edge.events import Limits, PeerUp, Received
from paceline.edge.runtimes.base import top_of
from paceline.edge.runtimes.torch import TorchRuntime
from paceline.edge.service import DrafterService
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.handshake import REJECTION
from paceline.topology.wire import MAX_DRAFT_LENGTH, Draft, Drafted, Hello, Message, Welcome, decode, encode

LENGTHS = (96, 192, 288)  # tokens of the prompts
IN_FLIGHT = 16
Prompt = tuple[int, ...]


class Round(NamedTuple):
    """One draft of a text: `end`, tokens of the text after the round."""

    end: int
    drafted: int
    accepted: int


class World:
    """An engine and a drafter. Rounds are counted from the frames: a Draft's tokens are what the last round emitted."""

    def __init__(self, vocabulary: Vocabulary, k: int, mode: Any) -> None:
        target, drafter = pair()
        self._clock = clock = ManualClock()
        config = EngineConfig(1, IN_FLIGHT, drafting=DraftingConfig(("drafter",), k, 1.0, verification=mode))
        self.engine = Engine(target, vocabulary.token_bytes, config, self._publish, clock)
        strategy = DraftModel(TorchRuntime(drafter, vocabulary.size))
        self.service = DrafterService(strategy, clock, Limits(max_sessions=64, max_batch=IN_FLIGHT), self._reply)
        self.service.inbox.put(PeerUp("target", Hello(1, 0, "d", "target", b"", "", vocabulary.size)))
        abilities = ["coupled", REJECTION]
        welcome = Welcome(1, "m", "draft_model", IN_FLIGHT, strategy.max_context, MAX_DRAFT_LENGTH, abilities)
        self.engine.inbox.put(LinkUp("drafter", welcome, self._send))
        self.texts: dict[str, list[int]] = defaultdict(list)
        self.rounds: dict[str, list[Round]] = defaultdict(list)
        self.bytes_up = self.bytes_down = self.items_up = self.items_down = 0
        self._drafted: dict[int, int] = {}

    def _publish(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.texts[delta.request_id] += delta.token_ids

    def _send(self, message: Message) -> bool:
        frame = encode(message)
        if isinstance(message, Draft):
            rounds = [item for item in message.items if item.k]
            self.items_up += len(rounds)
            self.bytes_up += len(frame) * bool(rounds)
            for item in message.items:
                drafted = self._drafted.pop(item.session, 0)
                if drafted:
                    session, emitted = self.engine.drafting.sessions[item.session], len(item.tokens) // 4
                    self.rounds[session.request.id].append(Round(session.output.length, drafted, emitted - 1))
        self.service.inbox.put(Received("target", decode(frame)))
        return True

    def _reply(self, target: str, message: Message) -> None:
        frame = encode(message)
        assert isinstance(message, Drafted)
        counts = {item.session: len(item.tokens) // 4 for item in message.items if item.tokens}
        self._drafted.update(counts)
        self.items_down += len(counts)
        self.bytes_down += len(frame) * bool(counts)
        answer = decode(frame)
        assert isinstance(answer, Drafted)
        self.engine.inbox.put(Arrived("drafter", answer))

    def run(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.inbox.put(Submit(request))
        self.engine.step()
        while self.engine.live_sessions or self.engine.queued:
            while self.service.step():
                pass
            self.engine.step()
            self._clock.advance(0.001)


@dataclass(frozen=True)
class Acceptance:
    """Figures of one temperature and one kind of verification.

    share: of the positions that a round reached, how many were accepted. accepted: draft tokens a round, of k.
    """

    temperature: float
    verification: str
    accepted: float
    acceptance_length: float
    share: float
    rounds: int
    bytes_up: float
    bytes_down: float


def measured(world: World, temperature: float, mode: str) -> Acceptance:
    rounds = [one for name, text in world.texts.items() for one in world.rounds[name] if one.end <= before_loop(text)]
    accepted = sum(one.accepted for one in rounds)
    refused = sum(one.accepted < one.drafted for one in rounds)
    return Acceptance(
        temperature,
        mode,
        accepted / len(rounds),
        accepted / len(rounds) + 1,
        accepted / (accepted + refused),
        len(rounds),
        world.bytes_up / max(1, world.items_up),
        world.bytes_down / max(1, world.items_down),
    )


def bounds(texts: list[tuple[Prompt, list[int]]], temperature: float) -> tuple[float, float, float]:
    """Means over the positions after the prompts: Σ min(p, q), Σ min(p, q'), and candidates of q'."""
    target, drafter = pair()
    full, drawn, candidates = [], [], []
    sampling = Sampling(temperature=temperature)
    for prompt, written in texts:
        text, rows = [*prompt, *written], []
        for model in (target, drafter):
            span = model.allocate(len(text))
            assert span is not None
            logits = torch.as_tensor(model.forward([Segment(span, 0, text[:-1], len(written))]))
            rows.append(logits[:, : target.vocabulary_size].double().numpy())
            model.free(span)
        p, q = (probabilities(part, [sampling] * len(part)) for part in rows)
        full += np.minimum(p, q).sum(-1).tolist()
        top = top_of(rows[1])
        for ids, shares, own in zip(top.ids, probabilities(top.logits, [sampling] * len(q)), p, strict=True):
            weights = weights_of(ids, shares)
            drawn.append(float(np.minimum(own[weights.ids], weights.shares).sum()))
            candidates.append(len(weights.ids))
    return float(np.mean(full)), float(np.mean(drawn)), float(np.mean(candidates))


def before_loop(text: list[int]) -> int:
    """Tokens of a text before the first 8-gram that it repeats: in a loop any drafter is right."""
    repeated = repeats(text)
    return repeated.index(True) if True in repeated else len(text)


def pair() -> tuple[LanguageModel, LanguageModel]:
    """The embedded target and drafter, with empty KV memory."""
    target, drafter = (load(path, threads=1, max_context=512, kv_slots=64 * 512) for path in (TARGET, DRAFTER))
    return target, drafter


def prompts(vocabulary: Vocabulary, files: int) -> list[Prompt]:
    """Heads of held-out files, of several lengths each."""
    lines = [json.loads(line)["text"] for line in (MODELS / "held-out.jsonl").read_text().splitlines()]
    ids = [ids for ids in map(vocabulary.encode, lines) if len(ids) >= LENGTHS[-1]][:files]
    return [tuple(one[:length]) for one in ids for length in LENGTHS]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    vocabulary = Vocabulary.load(TARGET)
    heads = prompts(vocabulary, arguments.files)
    results: dict[str, Any] = {"k": arguments.k, "prompts": len(heads), "rows": [], "bounds": []}
    for temperature in arguments.temperatures:
        worlds = {}
        for mode in ("coupled", "rejection"):
            seeds = [choice_seed(arguments.seed, index) for index in range(len(heads))]
            world = worlds[mode] = World(vocabulary, arguments.k, mode)
            world.run(
                [
                    Request(f"r-{index}", head, Sampling(seed=seed, temperature=temperature), arguments.new_tokens)
                    for index, (head, seed) in enumerate(zip(heads, seeds, strict=True))
                ]
            )
            results["rows"].append(asdict(measured(world, temperature, mode)))
        texts = [
            (heads[int(name[2:])], text[: before_loop(text)]) for w in worlds.values() for name, text in w.texts.items()
        ]
        full, drawn, candidates = bounds(texts, temperature)
        bound = {"temperature": temperature, "min_p_q": full, "min_p_weights": drawn, "candidates": candidates}
        results["bounds"].append(bound)
    return results


def describe(results: dict[str, Any]) -> str:
    lines = [
        f"{results['prompts']} prompts, k = {results['k']}; share: accepted of the positions that rounds reached; "
        "bytes: a round and session, sessions of a lane sharing frames"
    ]
    for bound in results["bounds"]:
        lines.append(
            f"temperature {bound['temperature']}: bound Σ min(p, q) {bound['min_p_q']:.3f}, with the weights that are "
            f"sent {bound['min_p_weights']:.3f} ({bound['candidates']:.1f} candidates a position)"
        )
        for row in results["rows"]:
            if row["temperature"] == bound["temperature"]:
                lines.append(
                    f"  {row['verification']:9} share {row['share']:.3f}, accepted {row['accepted']:.2f} of "
                    f"{results['k']}, acceptance length {row['acceptance_length']:.2f} ({row['rounds']} rounds); "
                    f"bytes {row['bytes_up']:.0f} up, {row['bytes_down']:.0f} down"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=64, help="held-out files, at most (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens generated a text (default: %(default)s)")
    parser.add_argument("--k", type=int, default=4, help="draft length (default: %(default)s)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.8, 1.0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = run(arguments)
    sys.stdout.write((json.dumps(results, indent=2) if arguments.json else describe(results)) + "\n")


if __name__ == "__main__":
    main()
