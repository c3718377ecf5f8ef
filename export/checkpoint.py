"""Weights as safetensors shards of another dtype, written one shard at a time: a model is never in memory whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.core.errors import UserError
from paceline.core.lm.loading import DTYPES
from paceline.core.manifest import Progress
from paceline.export.source import INDEX

SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class Weight:
    """Where a tensor is, and how many bytes it takes once converted."""

    name: str
    file: Path
    dtype: torch.dtype
    size: int


def weights(files: list[Path], dtype: str) -> list[Weight]:
    """Every tensor of these safetensors files, from their headers. Raises UserError for a file that is none."""
    found = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 - a handle, not a dict
                    part = content.get_slice(name)
                    kept = part[:0].dtype if part.get_shape() else content.get_tensor(name).dtype
                    new = DTYPES[dtype] if kept.is_floating_point else kept
                    count = 1
                    for length in part.get_shape():
                        count *= length
                    found.append(Weight(name, file, new, count * new.itemsize))
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read the weights {file}: {error}") from error
    return found


def write_shards(
    found: list[Weight], out: Path, *, shard_bytes: int = SHARD_BYTES, progress: Progress = lambda count: None
) -> None:
    """Writes model.safetensors, or shards of at most `shard_bytes` (unless one tensor is larger) and their index.

    Raises UserError for a tensor that the dtype cannot hold.
    """
    shards = list(_shards(found, shard_bytes))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        try:
            save_file({w.name: _converted(w, progress) for w in shard}, out / name, metadata={"format": "pt"})
        except SafetensorError as error:  # how it tells of a full disk
            raise UserError(f"cannot write the weights: {error}") from error
        (out / name).chmod(0o644)  # safetensors leaves it readable for its owner only
        places |= {w.name: name for w in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(w.size for w in found)}, "weight_map": places}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(found: list[Weight], shard_bytes: int) -> Iterator[list[Weight]]:
    shard: list[Weight] = []
    size = 0
    for weight in found:
        if shard and size + weight.size > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(weight)
        size += weight.size
    if shard:
        yield shard


def _converted(weight: Weight, progress: Progress) -> torch.Tensor:
    with safe_open(weight.file, framework="pt") as content:
        tensor = content.get_tensor(weight.name)
    new: torch.Tensor = tensor.to(weight.dtype)
    if new.is_floating_point() and new.dtype != tensor.dtype and not bool(new.isfinite().all()):
        name = str(weight.dtype).removeprefix("torch.")
        raise UserError(f"{weight.name} holds values that {name} cannot: use --dtype bfloat16 or float32")
    progress(weight.size)
    return new
