"""What a draft token costs in torch and in ONNX Runtime, in float32, 8 and 4 bits, and what that does to acceptance.

    python benchmarks/runtimes.py [--shapes embedded llama-68m] [--batches 1 4] [--repeats 100] [--threads 1]

Two drafters: the embedded one, and a Llama of 68 million parameters with random weights (speed does not depend on
them). All runtimes take turns in one run, medians count, and ratios are to torch's. Acceptance is measured on the
embedded pair as benchmarks/acceptance.py does, with the same texts for all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from acceptance import judge, shared_noise, write_texts
from common import DRAFTER, MODELS, TARGET, median, verdict
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from paceline.core import manifest as manifests
from paceline.core.lm.loading import wrap
from paceline.core.manifest import Manifest, ModelEntry, Quantization
from paceline.core.model import Segment
from paceline.edge.rows import ContiguousRows
from paceline.edge.runtimes.base import Runtime
from paceline.edge.runtimes.bundle import load_runtime
from paceline.edge.runtimes.torch import TorchRuntime
from paceline.export import graph
from paceline.export.quantize import quantize

KINDS: dict[str, Quantization | None] = {"float32": None, "int8": "int8", "int4": "int4"}
MAX_CONTEXT, WARM_UP = 1024, 5
PROMPT, NEW_TOKENS, K, TEMPERATURE, SEED = 96, 128, 4, 0.8, 1
LEAST_SPEED, LEAST_ACCEPTANCE = 2.0, 0.98
LLAMA_68M = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def drafter(shape: str) -> Any:
    """A transformers module in float32."""
    if shape == "embedded":
        return AutoModelForCausalLM.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    return LlamaForCausalLM(LlamaConfig(**LLAMA_68M)).eval()


def bundle(module: Any, folder: Path, kind: Quantization | None, sessions: int) -> Path:
    """What export makes, without a tokenizer and unchecked."""
    folder.mkdir()
    info = graph.write(module, folder, "gqa", max_context=MAX_CONTEXT)
    if kind:
        quantize(info.path, info.path, kind)
    manifest = Manifest(
        role="drafter",
        runtime="onnxruntime",
        profile="gqa",
        model=ModelEntry(name=folder.name, family=info.family, fingerprint=""),
        tokenizer_fingerprint="",
        vocabulary_size=info.vocabulary_size,
        layers=info.layers,
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        max_context=info.max_context,
        max_sessions=sessions,
        weight_dtype="float32",
        kv_dtype="float32",
        quantization=kind,
        opset=info.opset,
        top_k=info.top_k,
        rows=info.rows,
        multi_token_batch=info.multi_token_batch,
        files=manifests.checksums(folder, info.files),
    )
    manifests.write(manifest, folder)
    return folder


def runtimes(module: Any, folder: Path, sessions: int, threads: int) -> tuple[dict[str, Runtime], dict[str, float]]:
    """name → runtime whose sessions may lie anywhere, and name → megabytes of its weights and graph."""
    made: dict[str, Runtime] = {}
    sizes = {"torch": sum(weight.nbytes for weight in module.parameters()) / 1e6}
    for name, kind in KINDS.items():
        place = bundle(module, folder / name, kind, sessions)
        sizes[name] = sum(path.stat().st_size for path in place.iterdir()) / 1e6
        loaded = load_runtime("onnxruntime", place, threads=threads)
        made[name] = ContiguousRows(loaded) if loaded.rows == "contiguous" else loaded
    model = wrap(module, kv_slots=sessions * MAX_CONTEXT, max_context=MAX_CONTEXT)  # changes the module: last
    return {"torch": TorchRuntime(model), **made}, sizes


def step_times(runtimes: dict[str, Runtime], batches: list[int], context: int, repeats: int) -> dict[str, list[float]]:
    """name → median milliseconds of one token of each session, for each batch; all take turns."""
    spans = {}
    for name, runtime in runtimes.items():
        spans[name] = [span for span in (runtime.allocate(MAX_CONTEXT) for _ in range(max(batches))) if span]
        for span in spans[name]:
            runtime.forward([Segment(span, 0, [7 * i % 251 for i in range(context)], 0)], 1)
    times: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in batches} for name in runtimes}
    for turn in range(WARM_UP + repeats):
        for batch in batches:
            for name, runtime in runtimes.items():
                segments = [Segment(span, context, [turn % 251], 1) for span in spans[name][:batch]]
                start = time.perf_counter()
                runtime.forward(segments, 1)
                if turn >= WARM_UP:
                    times[name][batch].append(1e3 * (time.perf_counter() - start))
    for name, runtime in runtimes.items():
        for span in spans[name]:
            runtime.free(span)
    return {name: [median(of[batch]) for batch in batches] for name, of in times.items()}


class Logits:
    """A runtime as acceptance.py calls a drafter: logits of every position, those beyond its candidates far below."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self, ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        rows, length = ids.shape
        spans = [span for span in (self._runtime.allocate(length) for _ in range(rows)) if span]
        logits = torch.full((rows, length, self._runtime.vocabulary_size), -1e9)
        for place in range(length):
            segments = [Segment(span, place, [int(ids[row, place])], 1) for row, span in enumerate(spans)]
            top = self._runtime.forward(segments)
            logits[:, place].scatter_(1, torch.tensor(top.ids), torch.tensor(top.logits, dtype=torch.float32))
        for span in spans:
            self._runtime.free(span)
        return SimpleNamespace(logits=logits)


@torch.no_grad()
def acceptance(runtimes: dict[str, Runtime]) -> dict[str, list[float]]:
    """name → accepted of K a round: greedily, before a text repeats itself, and at TEMPERATURE."""
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    lines = (MODELS / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    files = [
        [tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode(json.loads(line)["text"]).ids] for line in lines
    ]
    prompts = torch.tensor([ids[:PROMPT] for ids in files if len(ids) > PROMPT])
    noise = shared_noise(len(prompts), PROMPT + NEW_TOKENS, target.config.vocab_size, SEED)
    greedy = write_texts(target, prompts, NEW_TOKENS, 0.0, None)
    drawn = write_texts(target, prompts, NEW_TOKENS, TEMPERATURE, noise)
    found = {}
    for name, runtime in runtimes.items():
        first = judge(Logits(runtime), greedy, PROMPT, K, 0.0, None)
        second = judge(Logits(runtime), drawn, PROMPT, K, TEMPERATURE, noise)
        found[name] = [first.before_loops, second.accepted]
    return found


def measure(shape: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of the table for each runtime."""
    module = drafter(shape)
    with tempfile.TemporaryDirectory() as folder:
        made, sizes = runtimes(module, Path(folder), max(8, *arguments.batches), arguments.threads)
        times = step_times(made, arguments.batches, arguments.context, arguments.repeats)
        accepted = acceptance(made) if shape == "embedded" else {}
    return [
        {
            "drafter": shape,
            "runtime": name if name == "torch" else f"onnxruntime {name}",
            "megabytes": sizes[name],
            "step_ms": dict(zip(arguments.batches, times[name], strict=True)),
            "speed": [theirs / ours for theirs, ours in zip(times["torch"], times[name], strict=True)],
            "accepted": accepted.get(name),
        }
        for name in made
    ]


def show(rows: list[dict[str, Any]], batches: list[int]) -> Table:
    table = Table("drafter", "runtime", "MB", title="ms a draft token, ratios to torch")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
        table.add_column("×", justify="right")
    table.add_column(f"accepted of {K}: greedy", justify="right")
    table.add_column(f"at {TEMPERATURE}", justify="right")
    for row in rows:
        times = zip(row["step_ms"].values(), row["speed"], strict=True)
        cells = [cell for ms, speed in times for cell in (f"{ms:.3f}", f"{speed:.2f}")]
        accepted = [f"{share:.3f}" for share in row["accepted"] or []]
        table.add_row(row["drafter"], row["runtime"], f"{row['megabytes']:.1f}", *cells, *accepted)
    return table


def judged(rows: list[dict[str, Any]]) -> list[str]:
    """What was asked of the quantised graphs, one line each."""
    lines = []
    base = next((row["accepted"] for row in rows if row["runtime"] == "torch" and row["accepted"]), None)
    for row in rows:
        if not row["runtime"].endswith(("int8", "int4")):
            continue
        name = f"{row['drafter']}, {row['runtime']}"
        lines.append(verdict(f"{name}: speed at the first batch, × torch", row["speed"][0], LEAST_SPEED))
        if row["accepted"] and base:
            share = row["accepted"][1] / base[1]
            lines.append(verdict(f"{name}: accepted at {TEMPERATURE}, × torch", share, LEAST_ACCEPTANCE))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ("embedded", "llama-68m")
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes, help="default: %(default)s")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="sessions in a step")
    parser.add_argument("--context", type=int, default=200, help="tokens that each session holds")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    rows = [row for shape in arguments.shapes for row in measure(shape, arguments)]
    lines = judged(rows)
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        Console(width=120).print(show(rows, arguments.batches))
        sys.stdout.write("\n".join(lines) + "\n")
    sys.exit(any(line.startswith("MISS") for line in lines))


if __name__ == "__main__":
    main()
