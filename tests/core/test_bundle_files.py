"""Every file that a loader of a bundle reads is in its folder, and in its manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.core import bundle_files, manifest
from paceline.core.errors import UserError
from paceline.core.vocabulary import Vocabulary

from .test_manifest import example

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-drafter"


def refusal(folder: Path, names: Iterable[str]) -> str:
    with pytest.raises(UserError) as caught:
        bundle_files.check(folder, "manifest.json", list(names))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def external(location: str) -> bytes:
    """A tensor's external data, as protobuf writes it; lengths up to 300."""
    data = location.encode()
    length = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return b"\x08\x01j\x15\n\x08location\x12" + length + data + b"j\x0b\n\x06offset"


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "other.safetensors", "a/../../b"])
def test_an_index_names_listed_files_only(tmp_path: Path, place: str) -> None:
    """Torch follows its weight_map wherever that leads."""
    (tmp_path / "a.safetensors").write_bytes(b"a")
    index = tmp_path / "model.safetensors.index.json"
    names = ["a.safetensors", index.name]
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "./a.safetensors"}}))
    bundle_files.check(tmp_path, "manifest.json", names)
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": place}}))
    assert refusal(tmp_path, names).startswith(f"{index} names {place!r}, which is not in the bundle's manifest")


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    """Whatever it is instead."""
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "is no index of weights" in refusal(tmp_path, ["model.safetensors.index.json"])


@pytest.mark.parametrize("place", ["weights.bin", "../weights.bin", "README.md", "w" * 200])
def test_a_graphs_external_data_is_listed(tmp_path: Path, place: str) -> None:
    """Also under a name that would pass as a note, or a long one."""
    graph = tmp_path / "model.onnx"
    (tmp_path / "model.onnx.data").write_bytes(b"w")
    (tmp_path / "README.md").write_text("mine")
    names = ["model.onnx", "model.onnx.data"]
    graph.write_bytes(b"graph" + external("model.onnx.data") * 3)
    bundle_files.check(tmp_path, "manifest.json", names)
    graph.write_bytes(b"graph" + external("model.onnx.data") + external(place) + b"tail")
    assert refusal(tmp_path, names).startswith(f"{graph} names {place!r}")


def test_the_graph_that_export_writes_names_its_data(tmp_path: Path) -> None:
    """What is found by its bytes is what the onnx package reads."""
    onnx = pytest.importorskip("onnx")
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [64], bytes(256), raw=True)
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor]))
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert bundle_files._external_data(tmp_path / "model.onnx") == {"w.bin"}
    (tmp_path / "empty.onnx").touch()
    assert bundle_files._external_data(tmp_path / "empty.onnx") == set()


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    """A file, a folder above it, and an unlisted folder; one inside, and those of a hub's cache, are not."""
    folder, outside = tmp_path / "bundle", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "x.json").write_text("{}")
    (folder / "y.json").write_text("{}")
    (folder / "x.json").symlink_to(outside / "x.json")
    assert "x.json is a link out of the bundle's folder" in refusal(folder, ["x.json", "y.json"])
    (folder / "x.json").unlink()
    (folder / "x.json").symlink_to("y.json")
    bundle_files.check(folder, "manifest.json", ["x.json", "y.json"])
    (folder / "sub").symlink_to(outside)
    assert "sub is not in the bundle's manifest" in refusal(folder, ["x.json", "y.json"])
    assert "sub/x.json is a link out" in refusal(folder, ["x.json", "y.json", "sub/x.json"])
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "ff").write_text("{}")
    (snapshot / "x.json").symlink_to("../../blobs/ff")
    bundle_files.check(snapshot, "manifest.json", ["x.json"])


@pytest.mark.parametrize("name", ["weights.bin", "X.JSON", "pytorch_model.bin", "code.py", "sub/more.dat"])
def test_what_no_manifest_lists_is_refused(tmp_path: Path, name: str) -> None:
    """Whatever it is called; notes and licences are left in peace."""
    for note in ("README.md", "LICENSE", "Notice.txt", "a/notes.TXT", ".hidden"):
        (tmp_path / note).parent.mkdir(exist_ok=True)
        (tmp_path / note).write_text("mine")
    bundle_files.check(tmp_path, "manifest.json", [])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("?")
    assert f"{tmp_path / name} is not in the bundle's manifest" in refusal(tmp_path, [])


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Nobody waits for one, listed or not."""
    os.mkfifo(tmp_path / "x.json")
    assert "is missing" in refusal(tmp_path, ["x.json"])
    assert "is not in the bundle's manifest" in refusal(tmp_path, [])


def test_the_tokenizer_is_the_manifests(tmp_path: Path) -> None:
    """Its fingerprint, and its size up to what the model knows; a folder without a manifest passes."""
    own = Vocabulary.load(MODEL).identity
    manifest.check_tokenizer(MODEL, MODEL, own)

    def write(fingerprint: str, size: int) -> None:
        manifest.write(example(tokenizer_fingerprint=fingerprint, vocabulary_size=size), tmp_path)

    write(own.fingerprint, own.size)
    manifest.check_tokenizer(tmp_path, MODEL, own)
    write("ab", own.size)
    with pytest.raises(UserError, match=r"tokenizer\.json is not the tokenizer that .*manifest\.json tells of"):
        manifest.check_tokenizer(tmp_path, MODEL, own)
    for size in (100, own.size + 1):
        write(own.fingerprint, size)
        with pytest.raises(UserError, match=f"says vocabulary_size {size}, but the model has {own.size} ids"):
            manifest.check_tokenizer(tmp_path, MODEL, own)
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    write(own.fingerprint, 100)
    manifest.check_tokenizer(tmp_path, MODEL, own)
