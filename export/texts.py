"""The real text that a bundle is compared on."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from paceline.core.errors import UserError
from paceline.export.source import Source
from paceline.export.text_lines import read_lines

MOST_TEXTS = 64
MOST_CHARACTERS = 2000  # of a text; its first tokens count
LEAST_TOKENS = 33


def read_texts(path: Path | None, source: Source) -> list[list[int]]:
    """Token ids of the texts: lines of JSON with `text` or `prompt`, or eight that come along. UserError for none."""
    if path is None:
        found: list[str] = json.loads((files("paceline.export") / "texts.json").read_text(encoding="utf-8"))
    else:
        found = read_lines(path)
    encoded = [source.vocabulary.encode(text[:MOST_CHARACTERS]) for text in found[:MOST_TEXTS]]
    texts = [ids for ids in encoded if len(ids) >= LEAST_TOKENS and max(ids) < source.config.vocab_size]
    if not texts:
        where = "the texts that come along" if path is None else f"--texts {path}"
        raise UserError(f"{where}: none becomes {LEAST_TOKENS} tokens or more that this model knows")
    return texts
