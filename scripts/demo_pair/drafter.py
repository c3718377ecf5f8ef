"""Distillation of the drafter: one wide layer that learns the target's distributions, mostly on its own texts."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from demo_pair.cores import Threads
from demo_pair.optim import optimizers, schedule, set_rate
from demo_pair.target import BFLOAT16, DRAFTER, build, distillation_loss, mean_loss

log = logging.getLogger("demo_pair")

LENGTH = 224  # tokens a row: prompts of 64, 96 or 128 and a continuation up to there
ROWS_A_STEP = 8
TEMPERATURE = 0.8
CORPUS_WINDOWS = 600  # at least
REPEAT = 8  # tokens that end an n-gram of this size which the row has had before are a loop, and no lesson


@dataclass(frozen=True)
class Lessons:
    """What the drafter learns from: rows of tokens, and the target's last hidden state before each next token."""

    tokens: Tensor  # int64 [rows, LENGTH]
    hidden: Tensor  # float16 [rows, LENGTH - 1, hidden size]
    counts: Tensor  # float32 [rows, LENGTH - 1], 0 for next tokens inside a loop


def prompts(ids: np.ndarray, rows: int, length: int, generator: np.random.Generator) -> Tensor:
    """Half of the prompts are heads of files, half begin anywhere; int64 [rows, length]."""
    heads = np.flatnonzero(ids[: -length - 1] == 0)
    starts = generator.integers(0, len(ids) - length - 1, rows)
    starts[: rows // 2] = generator.choice(heads, rows // 2)
    return torch.from_numpy(np.stack([ids[start : start + length] for start in starts]).astype(np.int64))


@torch.no_grad()
def continuations(target: LlamaForCausalLM, given: Tensor, temperature: float) -> Tensor:
    """The target's own continuations of `given` up to LENGTH tokens, greedy at temperature 0."""
    target.set_attn_implementation("sdpa")
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    new = LENGTH - given.shape[1]
    texts = target.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, **sampling)
    assert isinstance(texts, Tensor)
    return texts


def not_repeated(row: list[int], size: int = REPEAT) -> list[float]:
    """1.0 for each token after the first, 0.0 where it ends an n-gram that occurred before in the row."""
    seen: set[tuple[int, ...]] = set()
    counts = [1.0] * (len(row) - 1)
    for end in range(size, len(row) + 1):
        gram = tuple(row[end - size : end])
        if gram in seen:
            counts[end - 2] = 0.0
        seen.add(gram)
    return counts


def own_texts(target: LlamaForCausalLM, ids: np.ndarray, seconds: float, seed: int, batch: int = 96) -> list[Tensor]:
    """Continuations written by the target for `seconds`, greedy and sampled in turn."""
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    end, texts, made = time.monotonic() + seconds, [], 0
    while time.monotonic() < end:
        length = (64, 96, 128)[made % 3]
        temperature = TEMPERATURE if made % 2 else 0.0
        texts.append(continuations(target, prompts(ids, batch, length, generator), temperature))
        made += 1
        log.info("batch %d of %d texts at temperature %.1f", made, batch, temperature)
    return texts


@torch.no_grad()
def lessons(target: LlamaForCausalLM, rows: Tensor) -> Lessons:
    """One pass of the target over all rows; its head later turns hidden states into distributions again."""
    target.set_attn_implementation("train_causal")
    hidden = []
    for part in rows.split(32):
        with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            hidden.append(target.model(part[:, :-1], use_cache=False).last_hidden_state.half())
    return Lessons(rows, torch.cat(hidden), torch.tensor([not_repeated(row) for row in rows.tolist()]))


def distil(drafter: LlamaForCausalLM, target: LlamaForCausalLM, given: Lessons, seconds: float, seed: int) -> float:
    """Train for `seconds`; returns the smoothed last loss."""
    drafter.set_attn_implementation("train_causal")
    generator = torch.Generator().manual_seed(seed)
    made = optimizers(drafter, muon_lr=0.01, adam_lr=1e-3)
    head = target.lm_head.weight.detach()
    began, step, smooth, threads = time.monotonic(), 0, 0.0, Threads(torch.get_num_threads())
    while (progress := (time.monotonic() - began) / seconds) < 1:
        threads.adjust()
        set_rate(made, schedule(progress, decay=0.9))
        rows = torch.randint(len(given.tokens), (ROWS_A_STEP,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            logits = drafter(given.tokens[rows, :-1], use_cache=False).logits
            teacher = nn.functional.linear(given.hidden[rows].to(logits.dtype), head)
        counts = given.counts[rows].flatten()
        loss = distillation_loss(logits.float().flatten(0, 1), teacher.float().flatten(0, 1), counts)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        smooth = loss.item() if step == 1 else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 0:
            log.info("drafter %5.0f s step %d loss %.3f", time.monotonic() - began, step, smooth)
    return smooth


def train_drafter(
    work: Path, target: LlamaForCausalLM, train: np.ndarray, held_out: np.ndarray, seconds: float, seed: int
) -> LlamaForCausalLM:
    """A third of the time writes texts, the rest distils from them and from windows of the corpus."""
    began = time.monotonic()
    if not (work / "texts.npy").exists():
        texts = torch.cat(own_texts(target, train, seconds / 3, seed))
        np.save(work / "texts.npy", texts.numpy().astype(np.uint16))
    own = torch.from_numpy(np.load(work / "texts.npy").astype(np.int64))
    generator = np.random.default_rng(seed + 1)
    corpus = prompts(train, max(len(own) // 2, CORPUS_WINDOWS), LENGTH, generator)
    given = lessons(target, torch.cat([own, corpus]))
    log.info("%d own texts, %d corpus windows", len(own), len(corpus))
    drafter = build(DRAFTER)
    drafter.load_state_dict(torch.load(work / "drafter-start.pt", weights_only=True))
    left = max(seconds - (time.monotonic() - began), seconds / 3)  # writing and the target's pass may have taken long
    loss = distil(drafter, target, given, left, seed)
    figures: dict[str, Any] = {
        "own_texts": len(own),
        "corpus_windows": len(corpus),
        "row_length": LENGTH,
        "loss": round(loss, 4),
        "held_out_loss": round(mean_loss(drafter, held_out), 4),
        "parameters": sum(p.numel() for p in drafter.parameters()),
    }
    (work / "drafter.json").write_text(json.dumps(figures, indent=2))
    torch.save(drafter.state_dict(), work / "drafter-final.pt")
    return drafter
