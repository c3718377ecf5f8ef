"""Where a bundle is put: nothing of the user's own is deleted, and a killed export loses no bundle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.core.manifest import Manifest
from paceline.export.staging import check_place, engines_in, staged

DEAD = 999_999_999  # no process has that number

KILLED = """
import os, sys
from pathlib import Path
from paceline.export.staging import staged

real = Path.rename

def rename(self, target):
    real(self, target)
    os._exit(9)

Path.rename = rename
with staged(Path(sys.argv[1])) as folder:
    (folder / "x").write_text("x")
"""


def make(folder: Path) -> Path:
    """A bundle of one file."""
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"graph")
    entries = {
        "role": "drafter",
        "runtime": "onnxruntime",
        "profile": "gqa",
        "model": {"name": "tiny", "family": "llama", "fingerprint": "ab"},
        "tokenizer_fingerprint": "cd",
        "weight_dtype": "float32",
        "kv_dtype": "float32",
        "files": manifests.checksums(folder, ["model.onnx"]),
        **dict.fromkeys(("vocabulary_size", "layers", "kv_heads", "head_dim", "max_context", "max_sessions"), 4),
    }
    manifests.write(Manifest.model_validate(entries), folder)
    return folder


def test_a_bundle_survives_an_export_that_is_killed_between_its_renames(tmp_path: Path) -> None:
    """The next one puts it back, and leaves nothing else beside it."""
    out = make(tmp_path / "out")
    done = subprocess.run([sys.executable, "-c", KILLED, out], timeout=60, check=False)
    assert done.returncode == 9 and not out.exists()
    with pytest.raises(UserError, match=r"out is gone, for an export that replaced it was killed; .*: mv .*\.old "):
        manifests.load(out)
    with pytest.raises(UserError, match="holds a bundle already"):
        check_place(out, force=False)
    assert manifests.load(out).role == "drafter"
    check_place(out, force=True)
    with staged(out) as folder:
        (folder / "new").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["new"]


def test_a_bundle_that_is_being_replaced_is_not_put_back(tmp_path: Path) -> None:
    """Its process lives; one that is left of a dead process is removed once the new one is there."""
    out = tmp_path / "out"
    alive, dead = make(tmp_path / f".out.{os.getppid()}.old"), make(tmp_path / f".out.{DEAD}.old")
    theirs = make(tmp_path / ".out.mine.old")  # of the user's own
    out.mkdir()
    check_place(out, force=False)
    with staged(out) as folder:
        (folder / "new").write_text("new")
    assert alive.exists() and not dead.exists() and theirs.exists()
    (out / "new").unlink()
    out.rmdir()
    check_place(out, force=False)
    assert not out.exists()


def test_force_deletes_nothing_of_the_users_own(tmp_path: Path) -> None:
    """A file, one in a folder, a hidden one, a link; engines were made of the bundle, and go."""
    out = make(tmp_path / "out")
    (out / "a.plan").write_bytes(b"engine")
    check_place(out, force=True)
    assert engines_in(out) == ["a.plan"]
    for name in ("notes.txt", "sub/deep.md", ".env"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
        with pytest.raises(UserError, match=f"holds {name}, which is no part of its bundle: move it away"):
            check_place(out, force=True)
        (out / name).unlink()
    (out / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="holds link, which"):
        check_place(out, force=True)
    (out / "link").unlink()
    (out / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"--force cannot tell what in .*out is your own: remove it yourself"):
        check_place(out, force=True)
