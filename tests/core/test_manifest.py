"""A bundle's manifest: what is missing, changed or foreign is refused in one sentence, naming it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.core.manifest import Manifest, ModelEntry
from paceline.core.model_folder import existing_folder

DATA = b"weights" * 300_000  # more than two blocks


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A small drafter bundle with a file in a subfolder."""
    folder = tmp_path / "bundle"
    (folder / "more").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(DATA)
    (folder / "more" / "tokenizer.json").write_text("{}")
    manifests.write(example(files=manifests.checksums(folder, ["model.onnx", "more/tokenizer.json"])), folder)
    return folder


def example(**changes: Any) -> Manifest:
    return Manifest.model_validate(
        {
            "role": "drafter",
            "runtime": "onnxruntime",
            "profile": "gqa",
            "model": ModelEntry(name="tiny", family="llama", fingerprint="ab"),
            "tokenizer_fingerprint": "cd",
            "vocabulary_size": 100,
            "layers": 2,
            "kv_heads": 1,
            "head_dim": 8,
            "max_context": 64,
            "max_sessions": 4,
            "weight_dtype": "float32",
            "kv_dtype": "float32",
            "files": {},
            **changes,
        }
    )


def edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | changes))


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        manifests.load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_written_is_read(bundle: Path) -> None:
    """Every field comes back, defaults included, and the progress adds up to all bytes."""
    seen: list[int] = []
    found = manifests.load(bundle, role="drafter", progress=seen.append)
    assert found == example(files=found.files)
    assert found.files["model.onnx"] == hashlib.sha256(DATA).hexdigest()
    assert sum(seen) == len(DATA) + 2 and len(seen) == 4
    assert (found.schema_version, found.top_k, found.rows) == (1, 64, "any")


def test_a_changed_byte_is_refused_naming_the_file(bundle: Path) -> None:
    """The last byte of a file, in each of the files; without `verify` nobody looks."""
    for name in ("model.onnx", "more/tokenizer.json"):
        whole = (bundle / name).read_bytes()
        (bundle / name).write_bytes(whole[:-1] + b"!")
        assert refusal(bundle).startswith(f"{bundle / name} has another checksum")
        assert manifests.load(bundle, verify=False).role == "drafter"
        (bundle / name).write_bytes(whole)
    manifests.load(bundle)


def test_a_missing_file_is_refused_naming_it(bundle: Path) -> None:
    """Also without comparing checksums."""
    (bundle / "model.onnx").unlink()
    assert refusal(bundle, verify=False).startswith(f"{bundle / 'model.onnx'} is missing")


def test_a_file_that_nobody_checked_is_refused(bundle: Path) -> None:
    """One that a loader would find by its name; notes of the user's own are left in peace."""
    (bundle / "NOTES.txt").write_text("mine")
    (bundle / ".cache").mkdir()
    (bundle / ".cache" / "download.json").write_text("{}")
    manifests.load(bundle)
    (bundle / "model.safetensors").write_bytes(b"foreign")
    assert f"{bundle / 'model.safetensors'} is not in the bundle's manifest" in refusal(bundle)


def test_another_role_is_refused_with_what_to_do(bundle: Path) -> None:
    """A drafter's bundle is no target."""
    message = refusal(bundle, role="target")
    assert message.startswith(f"{bundle} is a drafter bundle") and "--role target" in message


def test_a_newer_schema_is_refused_whatever_else_it_holds(bundle: Path) -> None:
    """Its unknown keys are not the point: the version is."""
    edit(bundle, schema_version=2, lora=True)
    assert "has schema version 2, and this Paceline reads up to 1" in refusal(bundle)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": "blue"}, "colour is not a known key"),
        ({"layers": 0}, "layers Input should be greater than or equal to 1"),
        ({"profile": "paged"}, "profile Input should be"),
        ({"model": {"name": "tiny", "family": "llama"}}, "model.fingerprint is missing"),
        ({"files": {"../secret": "0" * 64}}, "must be a path inside the bundle"),
        ({"files": {"/etc/passwd": "0" * 64}}, "must be a path inside the bundle"),
        ({"files": {"model.onnx": "123"}}, "files.model.onnx String should match"),
        ({"colour": "blue", "layers": 0}, "(and 1 more)"),
    ],
)
def test_a_wrong_manifest_is_refused_naming_the_key(bundle: Path, changes: dict[str, Any], words: str) -> None:
    """Extra keys are errors, as in a topology."""
    edit(bundle, **changes)
    assert words in refusal(bundle)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    """Nor is one whose manifest is no JSON, or no object."""
    assert not manifests.is_bundle(tmp_path)
    assert "is no bundle: it has no manifest.json" in refusal(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    assert manifests.is_bundle(tmp_path)
    assert "manifest.json is no JSON" in refusal(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    assert "Input should be a valid dictionary" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"role": "drafter", "role": "target"}', "the key role is there twice"),
        (b'{"layers": NaN}', "NaN is no number"),
        (b'{"schema_version": true}', "schema_version must be a whole number"),
        (b'{"schema_version": 1.0}', "schema_version must be a whole number"),
        (b"[" * 100_000, "is nested too deeply"),
        (b" " * ((1 << 20) + 1), "is larger than any manifest, 1 MiB"),
        (b'{"a": "\xff"}', "is no JSON"),
    ],
)
def test_a_manifest_that_could_be_read_in_two_ways_is_refused(bundle: Path, content: bytes, words: str) -> None:
    """Or not at all."""
    (bundle / "manifest.json").write_bytes(content)
    assert words in refusal(bundle)


@pytest.mark.parametrize(
    "name", ["a" * 5000, "a" * 256, "a/" * 9 + "b", "a\0b", "\ud800x", ".", "a/../b", "./a", "a//b"]
)
def test_a_name_that_no_file_of_a_bundle_has_is_refused(bundle: Path, name: str) -> None:
    """In one sentence of a length that can be read, without control characters."""
    edit(bundle, files={name: "0" * 64})
    words = refusal(bundle)
    assert words.startswith(f"{bundle / 'manifest.json'}: files.") and len(words) < 400 and words.isprintable()


def test_a_file_in_a_bundle_is_not_the_bundle(bundle: Path) -> None:
    """The folder is named."""
    graph = bundle / "model.onnx"
    assert refusal(graph) == f"{graph} is a file: name the folder that it is in, {bundle}"
    with pytest.raises(UserError, match=r"model .*/model\.onnx is a file: name the folder that it is in"):
        existing_folder(graph)


def test_a_bundle_that_a_killed_export_set_aside_is_named(bundle: Path) -> None:
    """With the command that brings it back."""
    old = bundle.with_name(f".{bundle.name}.999999999.old")
    bundle.rename(old)
    assert refusal(bundle).endswith(f"mv {old} {bundle}")
    with pytest.raises(UserError, match="is gone, for an export that replaced it was killed"):
        existing_folder(bundle)


def test_a_failed_write_leaves_the_old_manifest(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put in place in one step."""
    before = (bundle / "manifest.json").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(manifests.os, "replace", fail)
    with pytest.raises(OSError, match="power cut"):
        manifests.write(example(), bundle)
    assert (bundle / "manifest.json").read_bytes() == before
