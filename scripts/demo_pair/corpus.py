"""The corpus every machine has: the sources of the Python that runs this, as text files and as token ids."""

from __future__ import annotations

import hashlib
import json
import sysconfig
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
LARGEST_FILE = 200_000  # characters read of one file, so that no single table or test dominates
TABLE_RATIO = 0.14  # what zlib shrinks below this share is a table (encodings, generated data), not prose or code
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Source:
    """One file: its path inside the standard library, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Whole files, split once by a seeded hash of their names."""

    train: list[Source]
    held_out: list[Source]


def is_held_out(name: str, seed: int) -> bool:
    """A file's side depends on its name and the seed alone, so it is the same for every Python version."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < HELD_OUT_SHARE * 2**64


def read_corpus(seed: int) -> Corpus:
    """Read the standard library's sources without installed packages, non-UTF-8 files and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    corpus = Corpus([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in ("site-packages", "dist-packages", "__pycache__") for part in path.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")[:LARGEST_FILE]
        except UnicodeDecodeError:
            continue
        raw = text.encode()
        if len(raw) < 200 or len(zlib.compress(raw, 6)) < TABLE_RATIO * len(raw):
            continue
        (corpus.held_out if is_held_out(name, seed) else corpus.train).append(Source(name, text))
    return corpus


def train_tokenizer(sources: list[Source], vocabulary: int) -> Tokenizer:
    """Byte-level BPE with one special token, which stands between files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source.text for source in sources), trainer=trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, sources: list[Source]) -> np.ndarray:
    """All files in a row as u16 ids, each preceded by the end-of-text token; its id is 0."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([source.text for source in sources]):
        ids.append(0)
        ids.extend(encoding.ids)
    ids.append(0)
    return np.asarray(ids, dtype=np.uint16)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and the tokenizer_config.json that transformers looks for beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_held_out(sources: list[Source], path: Path, characters: int = 3000) -> None:
    """Keep the head of each long enough held-out file, so that a benchmark needs no training code and no corpus."""
    heads = (Source(source.name, source.text[:characters]) for source in sources if len(source.text) >= characters)
    path.write_text("".join(json.dumps(asdict(head)) + "\n" for head in heads))
