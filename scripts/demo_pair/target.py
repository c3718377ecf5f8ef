"""Training of the target: a deep, narrow Llama, next-token loss, a fixed time budget, resumable."""

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
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from demo_pair.cores import Threads
from demo_pair.optim import optimizers, schedule, set_rate

log = logging.getLogger("demo_pair")
BFLOAT16 = bool(torch.cpu._is_avx512_bf16_supported())  # training only; weights, optimizer and inference stay fp32
LENGTHS = ((0.0, 128), (0.3, 256), (0.85, 512))  # (share of the time, sequence length from there on)
TOKENS_A_STEP = 2048


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
        for model in (self.model, self.average):
            model.set_attn_implementation("train_causal")
        self.optimizers = optimizers(self.model, muon_lr=0.02, adam_lr=3e-3)
        self.spent, self.tokens, self.steps, self.train_loss = 0.0, 0, 0, 0.0
        if (work / "target.pt").exists():
            self.load()

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": (self.spent, self.tokens, self.steps, self.train_loss),
        }
        torch.save(state, self.work / "target.pt.part")
        (self.work / "target.pt.part").replace(self.work / "target.pt")

    def load(self) -> None:
        state = torch.load(self.work / "target.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.spent, self.tokens, self.steps, self.train_loss = state["progress"]
        log.info("resumed at %.0f s, %d steps", self.spent, self.steps)

    def step(self, ids: np.ndarray) -> float:
        progress = self.spent / self.seconds
        length = max(length for start, length in LENGTHS if progress >= start)
        set_rate(self.optimizers, schedule(progress))
        generator = np.random.default_rng((self.seed, self.steps))
        batch = windows(ids, TOKENS_A_STEP // length, length, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            loss = next_token_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(0.995, self.steps / (self.steps + 20))
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 1 - decay)
        self.steps += 1
        self.tokens += batch.shape[0] * length
        return loss.item()

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
                state = (self.spent, self.steps, self.train_loss, rate, torch.get_num_threads())
                log.info("target %5.0f s step %d loss %.3f, %.0f tok/s, %d threads", *state)
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
