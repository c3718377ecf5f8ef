"""Converted weights: exactly torch's own conversion, in shards of a bounded size, and never the whole model at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import UserError
from paceline.export.checkpoint import weights, write_shards
from paceline.export.source import INDEX


@pytest.fixture
def source(tmp_path: Path) -> list[Path]:
    """Ten matrices of 40 KB in two files, and one tensor of whole numbers."""
    torch.manual_seed(0)
    tensors = {f"layer.{n}": torch.randn(100, 100) for n in range(10)}
    save_file({k: v for k, v in tensors.items() if k < "layer.5"}, tmp_path / "a.safetensors")
    save_file(
        {**{k: v for k, v in tensors.items() if k >= "layer.5"}, "ids": torch.arange(5), "one": torch.tensor(1.5)},
        tmp_path / "b.safetensors",
    )
    return [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


def everything(files: list[Path]) -> dict[str, torch.Tensor]:
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_tensor_is_converted_and_none_is_lost(source: list[Path], tmp_path: Path, dtype: str) -> None:
    """Whole numbers stay whole numbers; the progress adds up to what was written."""
    out = tmp_path / "out"
    out.mkdir()
    found = weights(source, dtype)
    told: list[int] = []
    write_shards(found, out, progress=told.append)
    before, after = everything(source), load_file(out / "model.safetensors")
    assert after.keys() == before.keys() and after["ids"].dtype == torch.int64
    assert all(torch.equal(after[n], before[n].to(getattr(torch, dtype))) for n in before if n != "ids")
    assert sum(told) == sum(weight.size for weight in found) == sum(t.nbytes for t in after.values())
    assert not (out / INDEX).exists()


def test_shards_keep_to_their_size_and_the_index_names_each(source: list[Path], tmp_path: Path) -> None:
    """At most two matrices a shard, whatever the files they come from; a larger tensor has one of its own."""
    out = tmp_path / "out"
    out.mkdir()
    write_shards(weights(source, "float32"), out, shard_bytes=80_000)
    shards = sorted(out.glob("*.safetensors"))
    assert shards[0].name == "model-00001-of-00006.safetensors"
    assert all(sum(t.nbytes for t in load_file(shard).values()) <= 80_000 for shard in shards)
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"] == {name: shard.name for shard in shards for name in load_file(shard)}
    assert all(torch.equal(everything(shards)[name], tensor) for name, tensor in everything(source).items())
    small = tmp_path / "small"
    small.mkdir()
    write_shards(weights(source, "float32"), small, shard_bytes=1000)
    assert len(list(small.glob("*.safetensors"))) == 12  # one each


def test_one_shard_is_in_memory_at_a_time(source: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is converted and not yet written never exceeds the shard's size."""
    from paceline.export import checkpoint

    live, most = 0, 0
    convert, save = checkpoint._converted, checkpoint.save_file

    def counted(weight: checkpoint.Weight, progress: object) -> torch.Tensor:
        nonlocal live, most
        live += weight.size
        most = max(most, live)
        return convert(weight, lambda count: None)

    def saved(*arguments: object, **keywords: object) -> None:
        nonlocal live
        live = 0
        save(*arguments, **keywords)

    monkeypatch.setattr(checkpoint, "_converted", counted)
    monkeypatch.setattr(checkpoint, "save_file", saved)
    write_shards(weights(source, "float32"), tmp_path, shard_bytes=80_000)
    assert 0 < most <= 80_000


def test_values_that_a_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    """70 000 is no float16: it would become infinite, and every logit with it."""
    save_file({"fine": torch.ones(2), "big.weight": torch.tensor([1.0, 70_000.0])}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"big\.weight holds values that float16 cannot: use --dtype bfloat16"):
        write_shards(weights([tmp_path / "a.safetensors"], "float16"), tmp_path)
    write_shards(weights([tmp_path / "a.safetensors"], "bfloat16"), tmp_path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    """Half a download, for instance."""
    (tmp_path / "a.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match=r"cannot read the weights .*a\.safetensors"):
        weights([tmp_path / "a.safetensors"], "float32")
