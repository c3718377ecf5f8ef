"""Train the demo pair on the running Python's own standard library, in resumable stages."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import numpy as np
import torch
from demo_pair import corpus, target

log = logging.getLogger("demo_pair")


def prepare(work: Path, out: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Stage 1: tokenizer and token ids, kept in the working folder."""
    if not (work / "held_out.npy").exists():
        files = corpus.read_corpus(seed)
        tokenizer = corpus.train_tokenizer(files.train, target.TARGET.vocabulary)
        for name in ("tiny-target", "tiny-drafter"):
            corpus.write_tokenizer(tokenizer, out / name)
        tokenizer.save(str(work / "tokenizer.json"))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models"))
    parser.add_argument("--work", type=Path, help="checkpoints and logs; default OUT/.training")
    parser.add_argument("--minutes", type=float, default=60, help="for the target")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    work: Path = arguments.work or arguments.out / ".training"
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = prepare(work, arguments.out, arguments.seed)
    target.train_target(work, train, held_out, arguments.minutes * 60, arguments.seed)


if __name__ == "__main__":
    main()
