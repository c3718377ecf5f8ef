"""Train the embedded pair on the running Python's own standard library: tokenizer, target, drafter, evaluation.

Each stage leaves its result in the working folder; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_pair import card, corpus, drafter, target
from transformers import LlamaForCausalLM

log = logging.getLogger("demo_pair")
ROOT = Path(__file__).resolve().parent.parent
TARGET_SHARE = 0.7  # of the time; the drafter has the rest


def prepare(work: Path, out: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Stage 1: tokenizer, and the token ids of both sides of the corpus."""
    if not (work / "held_out.npy").exists():
        files = corpus.read_corpus(seed)
        tokenizer = corpus.train_tokenizer(files.train, target.TARGET.vocabulary)
        for name in ("tiny-target", "tiny-drafter"):
            corpus.write_tokenizer(tokenizer, out / name)
        corpus.write_held_out(files.held_out, out / "held-out.jsonl")
        train = corpus.encode(tokenizer, files.train)
        figures = {
            "files": len(files.train),
            "bytes": sum(len(source.text.encode()) for source in files.train),
            "tokens": len(train),
            "held_out_files": len(files.held_out),
        }
        (work / "corpus.json").write_text(json.dumps(figures, indent=2))
        np.save(work / "train.npy", train)
        np.save(work / "held_out.npy", corpus.encode(tokenizer, files.held_out))
        log.info("corpus: %s", figures)
    return np.load(work / "train.npy"), np.load(work / "held_out.npy")


def finished(work: Path, name: str, shape: target.Shape) -> LlamaForCausalLM | None:
    """The model of a stage that is done."""
    path = work / f"{name}-final.pt"
    if not path.exists():
        return None
    model = target.build(shape)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def measure(out: Path) -> dict[str, Any]:
    """Stage 4: what benchmarks/acceptance.py says about the files just written."""
    command = [sys.executable, str(ROOT / "benchmarks" / "acceptance.py"), "--models", str(out), "--json"]
    measured: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return measured


def in_words(shape: target.Shape) -> str:
    return f"{shape.layers} × {shape.hidden}, MLP {shape.intermediate}"


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline" / "demo-pair"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "models", help="where the two models go")
    parser.add_argument("--work", type=Path, default=cache, help="checkpoints of the stages (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=80, help="for target and drafter together")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    out, work, seconds = arguments.out, arguments.work, arguments.minutes * 60
    work.mkdir(parents=True, exist_ok=True)

    train, held_out = prepare(work, out, arguments.seed)
    if finished(work, "target", target.TARGET) is None:
        target.train_target(work, train, held_out, TARGET_SHARE * seconds, arguments.seed)
    large = finished(work, "target", target.TARGET)
    assert large is not None
    target.write_model(large, out / "tiny-target")
    small = finished(work, "drafter", target.DRAFTER)
    if small is None:
        small = drafter.train_drafter(work, large, train, held_out, (1 - TARGET_SHARE) * seconds, arguments.seed)
    target.write_model(small, out / "tiny-drafter")

    run = {
        "seed": arguments.seed,
        "threads": arguments.threads,
        "command": f"python scripts/train_demo_pair.py --out models --minutes {arguments.minutes:g}",
        "target_shape": in_words(target.TARGET),
        "drafter_shape": in_words(target.DRAFTER),
    }
    figures = [json.loads((work / f"{name}.json").read_text()) for name in ("corpus", "target", "drafter")]
    measured = measure(out)
    card.write_card(out, figures[0], figures[1], figures[2], measured, run)
    log.info("done: %s", json.dumps(measured))


if __name__ == "__main__":
    main()
