"""Training of the target: a deep, narrow Llama, next-token loss, a fixed time budget, resumable.

From AGREE_FROM on the drafter learns along, and the target is drawn towards it: beside the next token it minimises
KL(target || drafter). Two models trained apart on so little agree on half of their tokens; a pair that is to show
speculation should agree like one of useful size. The price is stated in models/README.md: some loss of the target.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, nll_loss, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from demo_pair.cores import Threads
from demo_pair.optim import optimizers, schedule, set_rate

log = logging.getLogger("demo_pair")
BFLOAT16 = bool(torch.cpu._is_avx512_bf16_supported())  # training only; weights, optimizer and inference stay fp32
LENGTHS = ((0.0, 128), (0.3, 256), (0.85, 512))  # (share of the time, sequence length from there on)
TOKENS_A_STEP = 2048
AGREE_FROM = 0.73  # share of the time from which the drafter learns along
AGREEMENT = (0.77, 0.83)  # between these the weight of KL(target || drafter) grows from 0 to 1


@dataclass(frozen=True)
class Shape:
    """What differs between the two models of the pair."""

    layers: int
    intermediate: int
    hidden: int = 192
    heads: int = 6
    kv_heads: int = 2
    vocabulary: int = 2048


TARGET = Shape(layers=12, intermediate=320)
DRAFTER = Shape(layers=1, intermediate=1024)


def build(shape: Shape) -> LlamaForCausalLM:
    """A fresh Llama; projections that write to the residual stream start at zero, so depth costs nothing at first."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
    return model


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **_: Any) -> tuple[Tensor, None]:
    """Causal attention in fp32: CPU kernels for it are faster there than in bf16, matrix products are not."""
    with torch.autocast("cpu", enabled=False):
        out = scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register("train_causal", attend)


def windows(ids: np.ndarray, rows: int, length: int, generator: np.random.Generator) -> Tensor:
    """`rows` random windows of length + 1 tokens, int64 [rows, length + 1]."""
    starts = generator.integers(0, len(ids) - length - 1, rows)
    return torch.from_numpy(np.stack([ids[start : start + length + 1] for start in starts]).astype(np.int64))


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def distillation_loss(logits: Tensor, teacher: Tensor, counts: Tensor | None = None) -> Tensor:
    """KL(target || drafter) for sampled acceptance, plus cross entropy with the target's first choice for greedy."""
    quiet = log_softmax(logits, -1)
    divergence = kl_div(quiet, log_softmax(teacher, -1), log_target=True, reduction="none").sum(-1)
    losses = divergence + 0.5 * nll_loss(quiet, teacher.argmax(-1), reduction="none")
    return losses.mean() if counts is None else (losses * counts).sum() / counts.sum()


def start_from_target(drafter: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """The drafter begins with the target's embeddings and final norm."""
    drafter.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    drafter.model.norm.load_state_dict(target.model.norm.state_dict())


@torch.no_grad()
def mean_loss(model: nn.Module, ids: np.ndarray, length: int = 512, most: int = 64) -> float:
    """Mean next-token loss in nats over up to `most` evenly spread windows, fp32."""
    starts = np.linspace(0, len(ids) - length - 2, min(most, len(ids) // length)).astype(int)
    rows = torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts]).astype(np.int64))
    losses = [next_token_loss(model, part).item() * len(part) for part in rows.split(8)]
    return sum(losses) / len(rows)


class TargetTraining:
    """State of a run, saved every few minutes: weights, their moving average, optimizers, seconds and tokens so far."""

    def __init__(self, work: Path, seconds: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.work, self.seconds, self.seed = work, seconds, seed
        self.model = build(TARGET)
        self.average = copy.deepcopy(self.model).eval()
        self.drafter = build(DRAFTER)
        for model in (self.model, self.average, self.drafter):
            model.set_attn_implementation("train_causal")
        self.optimizers = optimizers(self.model, muon_lr=0.02, adam_lr=3e-3)
        self.drafter_optimizers = optimizers(self.drafter, muon_lr=0.02, adam_lr=2e-3)
        self.joined, self.agreed = False, 0.0
        self.spent, self.tokens, self.steps, self.train_loss = 0.0, 0, 0, 0.0
        if (work / "target.pt").exists():
            self.load()

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "drafter": self.drafter.state_dict(),
            "drafter_optimizers": [optimizer.state_dict() for optimizer in self.drafter_optimizers],
            "joined": self.joined,
            "progress": (self.spent, self.tokens, self.steps, self.train_loss),
        }
        torch.save(state, self.work / "target.pt.part")
        (self.work / "target.pt.part").replace(self.work / "target.pt")

    def load(self) -> None:
        state = torch.load(self.work / "target.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.drafter.load_state_dict(state["drafter"])
        both = self.optimizers + self.drafter_optimizers
        for optimizer, saved in zip(both, state["optimizers"] + state["drafter_optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.joined = state["joined"]
        self.spent, self.tokens, self.steps, self.train_loss = state["progress"]
        log.info("resumed at %.0f s, %d steps", self.spent, self.steps)

    def step(self, ids: np.ndarray) -> float:
        progress = self.spent / self.seconds
        length = max(length for start, length in LENGTHS if progress >= start)
        made = list(self.optimizers)
        if progress >= AGREE_FROM:
            made += self.drafter_optimizers
            if not self.joined:
                start_from_target(self.drafter, self.model)
                self.joined = True
        set_rate(made, schedule(progress))
        generator = np.random.default_rng((self.seed, self.steps))
        batch = windows(ids, TOKENS_A_STEP // length, length, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            logits = self.model(batch[:, :-1], use_cache=False).logits
            drafted = self.drafter(batch[:, :-1], use_cache=False).logits if self.joined else None
        logits = logits.float().flatten(0, 1)
        total = loss = cross_entropy(logits, batch[:, 1:].flatten())
        if drafted is not None:
            weight = float(np.interp(progress, AGREEMENT, (0.0, 1.0)))
            total = total + self.agreement_loss(logits, drafted.float().flatten(0, 1), weight)
        total.backward()  # type: ignore[no-untyped-call]
        for model in (self.model, self.drafter):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(0.995, self.steps / (self.steps + 20))
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 1 - decay)
        self.steps += 1
        self.tokens += batch.shape[0] * length
        return loss.item()

    def agreement_loss(self, logits: Tensor, drafted: Tensor, weight: float) -> Tensor:
        """The drafter learns from the target as it is, the target leans towards the drafter as it is."""
        with torch.no_grad():
            matched = (logits.argmax(-1) == drafted.argmax(-1)).float().mean().item()
        self.agreed = 0.98 * self.agreed + 0.02 * matched if self.agreed else matched
        leaning = kl_div(
            log_softmax(drafted.detach(), -1), log_softmax(logits, -1), log_target=True, reduction="batchmean"
        )
        return weight * leaning + distillation_loss(drafted, logits.detach())

    def run(self, train: np.ndarray, held_out: np.ndarray, save_every: float = 150) -> None:
        saved, threads = time.monotonic(), Threads(torch.get_num_threads())
        while self.spent < self.seconds:
            began = time.monotonic()
            threads.adjust()
            loss = self.step(train)
            self.train_loss = loss if self.steps == 1 else 0.98 * self.train_loss + 0.02 * loss
            self.spent += time.monotonic() - began
            if self.steps % 20 == 0:
                rate = self.tokens / self.spent
                state = (self.spent, self.steps, self.train_loss, self.agreed, rate, torch.get_num_threads())
                log.info("target %5.0f s step %d loss %.3f, agreement %.3f, %.0f tok/s, %d threads", *state)
            if time.monotonic() - saved > save_every:
                self.save()
                log.info("held-out %.3f, average of weights %.3f", *self.evaluate(held_out, most=16))
                saved = time.monotonic()
        self.save()

    def evaluate(self, held_out: np.ndarray, most: int = 64) -> tuple[float, float]:
        return mean_loss(self.model, held_out, most=most), mean_loss(self.average, held_out, most=most)


def write_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights as fp16 safetensors with config.json and generation_config.json."""
    half = copy.deepcopy(model).half()
    half.generation_config.bos_token_id = half.generation_config.eos_token_id = 0
    half.generation_config.pad_token_id = 0
    half.set_attn_implementation("sdpa")
    half.save_pretrained(folder)


def train_target(work: Path, train: np.ndarray, held_out: np.ndarray, seconds: float, seed: int) -> dict[str, Any]:
    """Train for `seconds` (resumed runs count), keep the better of weights and average; returns the figures."""
    training = TargetTraining(work, seconds, seed)
    training.run(train, held_out)
    last, averaged = training.evaluate(held_out)
    best = training.average if averaged < last else training.model
    torch.save(best.state_dict(), work / "target-final.pt")
    torch.save(training.drafter.state_dict(), work / "drafter-start.pt")
    figures = {
        "tokens_seen": training.tokens,
        "steps": training.steps,
        "seconds": round(training.spent),
        "train_loss": round(training.train_loss, 4),
        "held_out_loss": round(min(last, averaged), 4),
        "parameters": sum(p.numel() for p in best.parameters()),
    }
    (work / "target.json").write_text(json.dumps(figures, indent=2))
    return figures
