"""models/README.md, filled with what was measured."""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import Any

from demo_pair.target import AGREE_FROM

README = """\
# The embedded pair

A target and a drafter small enough to live in the repository, so that examples, tests and benchmarks run real models
without a network. They write Python-like text; they know nothing, and are no measure of any other pair.

| | tiny-target | tiny-drafter |
|---|---|---|
| architecture | Llama, {target_shape} | Llama, {drafter_shape} |
| parameters | {target_parameters:,} | {drafter_parameters:,} |
| held-out loss ¹, nats a token | {target_held_out:.3f} | {drafter_held_out:.3f} |
| held-out loss ², nats a token | {target_loss:.3f} | {drafter_loss:.3f} |
| perplexity ² | {target_perplexity:.1f} | {drafter_perplexity:.1f} |

¹ 64 windows of 512 tokens spread over all {held_out_files} held-out files. ² The heads of {files} of them, 3 000
characters each, from `python benchmarks/acceptance.py`.

Both: hidden size 192, 6 heads of 32, 2 key-value heads, tied embeddings, RoPE θ = 10 000, 8 192 positions (trained on
up to 512), one byte-level BPE of 2 048 tokens whose only special token `<|endoftext|>` (id 0) stands
between files. Weights are stored as fp16; compute in fp32.

## Acceptance

k = 4, {files} held-out files, the first 96 tokens of each as the prompt, 128 tokens generated. Counted are texts in
which under 20 % of 8-grams repeat; "before loops" takes all texts, each up to the first 8-gram that it repeats. At
temperature 0.8 both ends share Gumbel noise. From `python benchmarks/acceptance.py`:

| | accepted of 4 | acceptance length | at position 1, 2, 3, 4 | agreement | texts counted | before loops | all |
|---|---|---|---|---|---|---|---|
{acceptance}

## How they were made

- Data: the standard library sources of Python {python}: {train_files:,} files, {train_bytes:,} bytes, {train_tokens:,}
  tokens; {held_out_files} more files held out whole by a seeded hash of their names. Left out: site-packages, and files
  that zlib shrinks below 14 % (tables); a file counts up to 200 000 characters.
- Target: next-token loss, {tokens_seen:,} tokens in {steps:,} steps, {target_minutes} minutes on up to {threads} CPU
  threads shared with other work; Muon and AdamW; last training loss {train_loss:.3f} (moving average).
- **The two were made to agree.** In the last {agree_share:.0f} % of that time the drafter learnt along and the target
  also minimised KL(target || drafter). It costs the target some loss and buys acceptance that models of this size,
  trained apart for so short a time, do not reach. Acceptance here is therefore no evidence for any other pair.
- Drafter: then distilled from the finished target (KL, and cross entropy with its first choice) on {own_texts:,} texts
  that the target wrote, greedily and at temperature 0.8 in turn, and on {corpus_windows:,} windows of the corpus,
  {row_length} tokens each.
- Seed {seed}. Command: `{command}`.
  Stages are timed, so another machine gives other weights.

## Licence

Apache-2.0; the training text is the Python Software Foundation's, see [NOTICE](NOTICE).
"""


def figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def acceptance_row(name: str, result: dict[str, Any]) -> str:
    positions = ", ".join(figure(share) for share in result["by_position"]) if result["rounds"] else "–"
    columns = [figure(result[key]) for key in ("accepted", "acceptance_length")]
    columns += [positions, figure(result["agreement"]), f"{result['texts_counted']} of {result['texts']}"]
    columns += [f"{figure(result['before_loops'])} ({result['rounds_before_loops']} rounds)"]
    return f"| {' | '.join([name, *columns, figure(result['loops_included'])])} |"


def write_card(
    out: Path,
    corpus: dict[str, Any],
    target: dict[str, Any],
    drafter: dict[str, Any],
    measured: dict[str, Any],
    run: dict[str, Any],
) -> None:
    """`run` holds seed, command, threads and the two shapes in words."""
    rows = [acceptance_row(name, result) for name, result in measured.items() if "accepted" in str(result)]
    text = README.format(
        **run,
        agree_share=100 * (1 - AGREE_FROM),
        python=platform.python_version(),
        files=measured["files"],
        held_out_files=corpus["held_out_files"],
        train_files=corpus["files"],
        train_bytes=corpus["bytes"],
        train_tokens=corpus["tokens"],
        target_parameters=target["parameters"],
        drafter_parameters=drafter["parameters"],
        target_held_out=target["held_out_loss"],
        drafter_held_out=drafter["held_out_loss"],
        target_loss=measured["held_out_loss"]["target"],
        drafter_loss=measured["held_out_loss"]["drafter"],
        target_perplexity=measured["perplexity"]["target"],
        drafter_perplexity=measured["perplexity"]["drafter"],
        row_length=drafter["row_length"],
        own_texts=drafter["own_texts"],
        corpus_windows=drafter["corpus_windows"],
        tokens_seen=target["tokens_seen"],
        steps=target["steps"],
        target_minutes=round(target["seconds"] / 60),
        train_loss=target["train_loss"],
        acceptance="\n".join(rows),
    )
    (out / "README.md").write_text(text, encoding="utf-8")
