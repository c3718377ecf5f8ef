"""A bundle appears whole or not at all: it is written beside its place, and renamed when it is done."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.core.model_folder import left_over

ENGINE = ".plan"  # made of the graph that is there, so of no use with another


def check_place(out: Path, force: bool) -> None:
    """Raises UserError unless a bundle may be put at `out`: nothing is there, or with `force` an older bundle.

    The older one must hold nothing of the user's own. One that a killed export had set aside is put back first.
    """
    if left := [old for old in left_over(out) if not _is_alive(old.name.split(".")[-2])]:
        left[-1].rename(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not manifests.is_bundle(out):
        raise UserError(f"--out {out} is there already and is no bundle: choose another folder, or remove it yourself")
    if not force:
        raise UserError(f"--out {out} holds a bundle already: --force replaces it")
    if own := _unlisted(out):
        raise UserError(f"--out {out} holds {own}, which is no part of its bundle: move it away, --force deletes it")


def _unlisted(out: Path) -> str:
    """A file in a bundle that its manifest does not list, and so may be the user's own; empty where there is none."""
    try:
        manifest = manifests.read(out)
    except UserError as error:
        raise UserError(f"{error}; --force cannot tell what in {out} is your own: remove it yourself") from None
    known = {manifests.FILE, *manifest.files, *manifest.engines}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if (path.is_symlink() or not path.is_dir()) and name not in known and path.suffix != ENGINE:
            return name
    return ""


def engines_in(out: Path) -> list[str]:
    """The TensorRT engines in a bundle, which are lost when it is replaced."""
    return sorted(path.name for path in out.glob(f"*{ENGINE}"))


def check_space(out: Path, needed: int) -> None:
    """Raises UserError, with the arithmetic, unless `needed` bytes are free where `out` will be."""
    free = shutil.disk_usage(next(folder for folder in out.absolute().parents if folder.is_dir())).free
    if needed > free:
        raise UserError(f"--out {out}: about {needed / 2**20:.0f} MiB are needed, and {free / 2**20:.0f} MiB are free")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """An empty folder that becomes `out` when the block ends well; whatever ends it otherwise leaves nothing.

    Folders above it are made when they are missing. What killed exports of the same place left is removed as well.
    """
    out = out.absolute()  # `.` has no name
    _sweep(out, "partial")
    missing = [above for above in out.parents if not above.exists()]
    folder = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"--out {out} cannot be made: {error.strerror}") from None
        yield folder
        _put(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not out.exists():
            for above in missing:
                with suppress(OSError):  # not ours alone any more
                    above.rmdir()


def _put(folder: Path, out: Path) -> None:
    """Renames `folder` to `out`; an older bundle steps aside first, and is back if that fails."""
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        out.rename(old)
    try:
        folder.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _sweep(out, "old")


def _sweep(out: Path, kind: str) -> None:
    """Removes what killed exports of the same place left."""
    for left in out.parent.glob(f".{escape(out.name)}.*.{kind}"):
        if not _is_alive(left.name.split(".")[-2]):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(process: str) -> bool:
    """Also for what is no process's number: a folder that is called so is not ours."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):
        return True
    return True
