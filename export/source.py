"""The model that is exported, as its folder describes it: configuration, tokenizer, licences; no weight is read."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.core.lm.loading import local_folder, read_config
from paceline.core.manifest import ModelEntry, Progress
from paceline.core.vocabulary import Vocabulary

# What a tokenizer may consist of, and what says how to generate: small files that a bundle takes as they are.
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
INDEX = "model.safetensors.index.json"
LICENCES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)^---$", re.MULTILINE | re.DOTALL)
_DECLARED = re.compile(r"^license(?:_name)?:\s*[\"']?([^\s\"']+)", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A model folder in Hugging Face's format. config: transformers' own, of the language model alone."""

    name: str
    folder: Path
    config: Any
    vocabulary: Vocabulary
    weight_files: list[Path]

    @classmethod
    def open(cls, model: str) -> Source:
        """A local folder or a hub id. Raises UserError for what is missing."""
        folder = local_folder(model)
        if manifests.is_bundle(folder):
            raise UserError(f"{model} is a bundle already: give the model that it was made of")
        name = folder.resolve().name if Path(model).is_dir() else model
        return cls(name, folder, read_config(folder), Vocabulary.load(folder), _weight_files(folder))

    def entry(self, progress: Progress = lambda count: None) -> ModelEntry:
        """Name, family and a fingerprint over configuration and weights (every byte is read)."""
        digest = hashlib.sha256()
        for path in (self.folder / "config.json", *self.weight_files):
            digest.update(f"{path.name} {manifests.checksum(path, progress)}\n".encode())
        return ModelEntry(name=self.name, family=self.config.model_type, fingerprint=digest.hexdigest()[:32])

    def copy_tokenizer(self, out: Path) -> None:
        """The tokenizer's files and what belongs to it, as they are."""
        for name in COPIED:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, out / name)

    def copy_licences(self, out: Path) -> list[str]:
        """Copies licence files; returns their names, and the licence that the model's README declares, if any."""
        found = sorted({path for pattern in LICENCES for path in self.folder.glob(pattern) if path.is_file()})
        for path in found:
            shutil.copyfile(path, out / path.name)
        readme = self.folder / "README.md"
        front = _FRONT_MATTER.match(readme.read_text(encoding="utf-8", errors="replace")) if readme.is_file() else None
        declared = _DECLARED.findall(front[1]) if front else []
        return [*declared, *(path.name for path in found)]

    def write_config(self, out: Path, dtype: str) -> None:
        """config.json, which says of the weights that they are `dtype` now."""
        content = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        for section in (content, content.get("text_config")):
            if isinstance(section, dict):
                section.pop("torch_dtype", None)
                section["dtype"] = dtype
        (out / "config.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers would read: what the index names, else model.safetensors, else all there are."""
    index = folder / INDEX
    if index.is_file():
        try:
            found = sorted(
                {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
            )
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{index} has no weight_map: fetch the model again") from None
        missing = [path for path in found if not path.is_file()]
        if missing:
            raise UserError(f"{missing[0]} is missing, but {INDEX} names it: fetch the model again")
        return found
    whole = folder / "model.safetensors"
    found = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise UserError(f"{folder} has no *.safetensors: weights in other formats are not read; convert them first")
    return found
