"""How much of what the embedded drafter proposes the embedded target accepts, on files that neither was trained on.

The target writes continuations of held-out file heads once, greedily and at a temperature with shared Gumbel noise; the
round loop is then replayed over each text. A round proposes k tokens from the committed prefix and keeps those before
the first that differs from the target's own token. Proposal i counts only if all before it were right, so the drafter
then stood on exactly the target's text: one forward pass of the drafter over the text holds every proposal that a round
can reach, and walking over its matches is the round loop, not an estimate of it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.utils import logging as transformers_logging

MODELS = Path(__file__).resolve().parent.parent / "models"
DRAFT_CANDIDATES = 64  # the drafter proposes out of its most likely tokens
MOST_REPEATED = 0.2  # texts that repeat more of their 8-grams have fallen into a loop and are not counted


@dataclass(frozen=True)
class Acceptance:
    """Figures of one way of sampling."""

    accepted: float  # draft tokens accepted per round, of k
    acceptance_length: float  # tokens emitted per round
    by_position: list[float]  # share of rounds in which proposal 1..k was accepted
    agreement: float  # share of all positions where the drafter's proposal is the target's token
    texts: int
    texts_counted: int
    rounds: int
    before_loops: float  # accepted per round in all texts, each up to the first 8-gram that it repeats
    rounds_before_loops: int
    loops_included: float  # accepted per round in all texts, whole


class SharedNoise(LogitsProcessor):
    """Turns greedy search into coupled sampling: logits / temperature + Gumbel noise, fixed by row and position."""

    def __init__(self, noise: Tensor, temperature: float) -> None:
        self.noise, self.temperature = noise, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / self.temperature + self.noise[:, input_ids.shape[1]]


def shared_noise(rows: int, length: int, vocabulary: int, seed: int) -> Tensor:
    """Gumbel noise [rows, length, vocabulary]; entry [:, p] is for choosing the token at index p."""
    uniform = torch.rand(rows, length, vocabulary, generator=torch.Generator().manual_seed(seed))
    return -(-uniform.clamp(1e-7, 1 - 1e-7).log()).log()


def write_texts(target: Any, prompts: Tensor, new_tokens: int, temperature: float, noise: Tensor | None) -> Tensor:
    """Prompts with the target's continuations, int64 [rows, prompt + new_tokens]."""
    processors = LogitsProcessorList([] if noise is None else [SharedNoise(noise, temperature)])
    target.generation_config.eos_token_id = None
    return target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=False,
        logits_processor=processors,
    )


def proposals(drafter: Any, texts: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """The drafter's proposal for index 1.. of each text, given the text before it; int64 [rows, length - 1]."""
    logits = torch.cat([drafter(part[:, :-1], use_cache=False).logits for part in texts.split(8)])
    if noise is None:
        return logits.argmax(-1)
    top = logits.topk(DRAFT_CANDIDATES)
    keys = top.values / temperature + noise[:, 1 : texts.shape[1]].gather(-1, top.indices)
    return top.indices.gather(-1, keys.argmax(-1, keepdim=True)).squeeze(-1)


def replay(matches: list[bool], k: int) -> list[int]:
    """Accepted tokens of each round over one text; matches[i] tells whether the proposal for new token i is right."""
    rounds, start = [], 0
    while start + k < len(matches):
        accepted = 0
        while accepted < k and matches[start + accepted]:
            accepted += 1
        rounds.append(accepted)
        start += accepted + 1
    return rounds


def repeats(tokens: list[int], size: int = 8) -> list[bool]:
    """For each n-gram of the text, whether it has occurred before."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    seen: set[tuple[int, ...]] = set()
    found = []
    for gram in grams:
        found.append(gram in seen)
        seen.add(gram)
    return found


def mean(rounds: Iterable[list[int]]) -> float:
    """Mean over all rounds of all texts; not a number without any."""
    counts = [count for text in rounds for count in text]
    return sum(counts) / len(counts) if counts else math.nan


@torch.no_grad()
def measure(
    target: Any, drafter: Any, prompts: Tensor, new_tokens: int, k: int, temperature: float, seed: int
) -> Acceptance:
    """Generate, replay, count."""
    length = prompts.shape[1] + new_tokens
    vocabulary = target.config.vocab_size
    noise = shared_noise(len(prompts), length, vocabulary, seed) if temperature else None
    texts = write_texts(target, prompts, new_tokens, temperature, noise)
    return judge(drafter, texts, prompts.shape[1], k, temperature, noise)


@torch.no_grad()
def judge(drafter: Any, texts: Tensor, prompt: int, k: int, temperature: float, noise: Tensor | None) -> Acceptance:
    """How the drafter does on texts that the target wrote with that noise after `prompt` tokens: replay, count."""
    new_tokens = texts.shape[1] - prompt
    right = proposals(drafter, texts, temperature, noise) == texts[:, 1:]
    right = right[:, prompt - 1 :]
    repeated = [repeats(row) for row in texts[:, prompt:].tolist()]
    counted = [sum(row) < MOST_REPEATED * len(row) for row in repeated]
    clean = [row.index(True) if True in row else new_tokens for row in repeated]  # tokens before the first repeat
    per_text = [replay(row, k) for row in right.tolist()]
    before_loops = [replay(row[:end], k) for row, end in zip(right.tolist(), clean, strict=True)]
    kept = [rounds for rounds, keep in zip(per_text, counted, strict=True) if keep]
    every = [count for rounds in kept for count in rounds]
    return Acceptance(
        accepted=mean(kept),
        acceptance_length=mean(kept) + 1,
        by_position=[sum(count > i for count in every) / max(len(every), 1) for i in range(k)],
        agreement=right[torch.tensor(counted)].float().mean().item(),
        texts=len(texts),
        texts_counted=sum(counted),
        rounds=len(every),
        before_loops=mean(before_loops),
        rounds_before_loops=sum(len(rounds) for rounds in before_loops),
        loops_included=mean(per_text),
    )


@torch.no_grad()
def held_out_loss(model: Any, texts: list[Tensor]) -> float:
    """Mean next-token loss in nats over the heads of the held-out files."""
    losses = tokens = 0.0
    for ids in texts:
        logits = model(ids[None, :-1], use_cache=False).logits[0]
        losses += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        tokens += len(ids) - 1
    return losses / tokens


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures, as what --json prints."""
    models: Path = arguments.models
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32).eval()
        for name in ("tiny-target", "tiny-drafter")
    )
    tokenizer = Tokenizer.from_file(str(models / "tiny-target" / "tokenizer.json"))
    lines = (models / "held-out.jsonl").read_text().splitlines()
    files = [tokenizer.encode(json.loads(line)["text"]).ids for line in lines]
    start = tokenizer.token_to_id("<|endoftext|>")
    heads = [torch.tensor([start, *ids]) for ids in files if len(ids) >= arguments.prompt][: arguments.files]
    prompts = torch.stack([head[: arguments.prompt] for head in heads])
    losses = {name: held_out_loss(model, heads) for name, model in (("target", target), ("drafter", drafter))}
    shared = (prompts, arguments.new_tokens, arguments.k)
    return {
        "files": len(heads),
        "k": arguments.k,
        "held_out_loss": losses,
        "perplexity": {name: math.exp(loss) for name, loss in losses.items()},
        "greedy": asdict(measure(target, drafter, *shared, 0.0, arguments.seed)),
        f"temperature {arguments.temperature}": asdict(
            measure(target, drafter, *shared, arguments.temperature, arguments.seed)
        ),
    }


def describe(figures: dict[str, Any]) -> str:
    """The figures as a short table."""
    loss, perplexity, k = figures["held_out_loss"], figures["perplexity"], figures["k"]
    lines = [f"held-out files: {figures['files']}"]
    lines += [f"{name:8} loss {loss[name]:.3f} nats a token, perplexity {perplexity[name]:.1f}" for name in loss]
    for name, result in figures.items():
        if isinstance(result, dict) and "accepted" in result:
            shares = " ".join(f"{share:.2f}" for share in result["by_position"])
            lines.append(
                f"{name}: accepted {result['accepted']:.2f} of {k} a round, acceptance length "
                f"{result['acceptance_length']:.2f}; accepted at position 1..{k}: {shares}; agreement "
                f"{result['agreement']:.2f}; {result['texts_counted']} of {result['texts']} texts counted "
                f"({result['rounds']} rounds); accepted in all texts before they repeat themselves "
                f"{result['before_loops']:.2f} ({result['rounds_before_loops']} rounds), loops included "
                f"{result['loops_included']:.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder with tiny-target and tiny-drafter")
    parser.add_argument("--files", type=int, default=64, help="how many held-out files, at most (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of each file's head (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens generated a text (default: %(default)s)")
    parser.add_argument("--k", type=int, default=4, help="draft length (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the second run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    began = time.perf_counter()
    figures = run(arguments)
    if arguments.json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        sys.stdout.write(f"{describe(figures)}\n{time.perf_counter() - began:.0f} s\n")


if __name__ == "__main__":
    main()
