"""What packing costs: one forward over several sessions against the same work apart, on one CPU thread.

    python benchmarks/packed_forward.py

Every ratio is of medians measured in this run, interleaved. The model is models/tiny-target if that is there, else a
Llama of its shape (12 layers × 192) with random weights; speed does not depend on the weights.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.core.lm.loading import load, wrap
from paceline.core.lm.model import LanguageModel
from paceline.core.model import Segment, Span

TARGET = Path(__file__).parent.parent / "models" / "tiny-target"
SESSIONS, CONTEXT, CHUNK, DRAFT = 8, 1000, 256, 5
Step = Callable[[], Any]


def random_llama(layers: int) -> Any:
    """A transformers Llama 192 wide with `layers` layers and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def target(kv_slots: int, fused: bool) -> LanguageModel:
    """The embedded target if it is there, else one of its shape."""
    if (TARGET / "config.json").is_file() and (TARGET / "model.safetensors").is_file():
        return load(TARGET, kv_slots=kv_slots, fused=fused)
    return wrap(random_llama(12), kv_slots=kv_slots, fused=fused)


def filled(model: LanguageModel, count: int, context: int, room: int) -> list[Span]:
    """`count` sessions that hold `context` tokens each."""
    spans = [span for span in (model.allocate(room) for _ in range(count)) if span]
    for span in spans:
        for start in range(0, context, CHUNK):
            model.forward([Segment(span, start, _tokens(min(CHUNK, context - start)), 0)])
    return spans


def decode(spans: Sequence[Span], context: int, tokens: int) -> list[Segment]:
    """The next `tokens` tokens of every session, all with logits: a decode (1) or a verification (more)."""
    return [Segment(span, context, _tokens(tokens), tokens) for span in spans]


def medians(steps: Sequence[Step], repeats: int) -> list[float]:
    """Median milliseconds of each step, the steps taken in turn."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(repeats + 3):
        for step, record in zip(steps, times, strict=True):
            begin = time.perf_counter()
            step()
            if turn >= 3:
                record.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(record) for record in times]


def _tokens(count: int) -> list[int]:
    return [7 * i % 1000 for i in range(count)]


def packing(model: LanguageModel, repeats: int) -> bool:
    """(a) A prompt chunk beside the verification of eight sessions, against the two apart."""
    room = min(1280, model.max_context)
    context = min(CONTEXT, room - CHUNK)
    spans = filled(model, SESSIONS, context, room)
    prompt = filled(model, 1, CHUNK, room)[0]
    chunk, rounds = [Segment(prompt, CHUNK, _tokens(CHUNK), 0)], decode(spans, context, DRAFT)
    alone, verify, both = medians(
        [lambda: model.forward(chunk), lambda: model.forward(rounds), lambda: model.forward(chunk + rounds)], repeats
    )
    ratio = both / (alone + verify)
    print(
        f"(a) context {context}: chunk of {CHUNK} {alone:.1f} ms, {SESSIONS} × {DRAFT} {verify:.1f} ms, packed", end=""
    )
    print(f" {both:.1f} ms = {ratio:.2f} × the sum of the two (required ≤ 1.15)")
    for span in [*spans, prompt]:
        model.free(span)
    return ratio <= 1.15


def drafter(repeats: int, fused: bool) -> bool:
    """(b) Eight sessions of a one-layer drafter against one, its top 64 candidates included."""
    model = wrap(random_llama(1), kv_slots=SESSIONS * 512, fused=fused)
    spans = filled(model, SESSIONS, 300, 512)
    one, eight = medians(
        [
            lambda: model.forward(decode(spans[:1], 300, 1)).topk(64),
            lambda: model.forward(decode(spans, 300, 1)).topk(64),
        ],
        10 * repeats,
    )
    print(f"(b) drafter of one layer: one session {one:.2f} ms, {SESSIONS} {eight:.2f} ms", end="")
    print(f" = {eight / one:.2f} × (required ≤ 3)")
    return eight / one <= 3


def floor(model: LanguageModel, repeats: int) -> bool:
    """(c) Packed forwards at context 300 against transformers' own one-token forward without any cache."""
    from transformers import AutoModelForCausalLM

    spans = filled(model, SESSIONS, 300, 512)
    plain: Any = AutoModelForCausalLM
    bare = (
        plain.from_config(copy.deepcopy(model.module.config), attn_implementation="sdpa").eval().to(model.module.dtype)
    )
    token = torch.tensor([[5]])
    batches = [decode(spans[:count], 300, tokens) for count in (1, SESSIONS) for tokens in (1, DRAFT)]
    with torch.inference_mode():
        base, *steps = medians(
            [lambda: bare(input_ids=token, use_cache=False), *(partial(model.forward, batch) for batch in batches)],
            4 * repeats,
        )
    print(f"(c) the floor, one token of transformers without a cache: {base:.2f} ms; packed at context 300:")
    names = ("1 × 1", f"1 × {DRAFT}", f"{SESSIONS} × 1", f"{SESSIONS} × {DRAFT}")
    for name, taken in zip(names, steps, strict=True):
        print(f"    {name}: {taken:6.2f} ms = {taken / base:.2f} × the floor = {taken / steps[0]:.2f} × one token")
    for span in spans:
        model.free(span)
    return steps[0] < base


def copies(model: LanguageModel) -> bool:
    """(d) Bytes that operators allocate in one verification, against the past it reads."""
    context = min(CONTEXT, model.max_context - 16)
    spans = filled(model, SESSIONS, context, context + 16)
    batch = decode(spans, context, DRAFT)
    model.forward(batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as report:
        model.forward(batch)
    arena = model.arena
    past = SESSIONS * context * arena.slot_bytes // arena.layers
    layers = arena.layers
    rows = [
        (event.key, event.count, event.self_cpu_memory_usage / layers)
        for event in report.key_averages()
        if event.self_cpu_memory_usage > 0
    ]
    print(f"(d) the past of {SESSIONS} sessions is {past:,} bytes a layer; what operators allocate, bytes a layer:")
    for name, count, size in sorted(rows, key=lambda row: -row[2])[:6]:
        print(f"    {name:42s} {count:5d} calls {size:12,.0f} = {100 * size / past:5.1f} % of the past")
    # Masks, scores of one block and activations remain; a copy of keys and values would be 100 % by itself.
    return all(size < past / 2 for _, _, size in rows)


def main() -> int:
    """Prints the table; 1 when a required ratio is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15, help="measurements of the slowest step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--unfused", action="store_true", help="run transformers' own code in the layers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = target((SESSIONS + 1) * 1280, not options.unfused)
    print(f"{model.name}, {'fused' if model.fused else 'unfused'}, {options.threads} thread(s), {model.arena.kv.dtype}")
    passed = [
        packing(model, options.repeats),
        drafter(options.repeats, not options.unfused),
        floor(model, options.repeats),
        copies(model),
    ]
    print("all as required" if all(passed) else "a required ratio was missed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
