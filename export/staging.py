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


def check_place(out: Path, force: bool) -> None:
    """Raises UserError unless a bundle may be put at `out`: nothing is there, or with `force` an older bundle."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not manifests.is_bundle(out):
        raise UserError(f"--out {out} is there already and is no bundle: choose another folder, or remove it yourself")
    if not force:
        raise UserError(f"--out {out} holds a bundle already: --force replaces it")


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
    for left in out.parent.glob(f".{escape(out.name)}.*.partial"):
        if not _is_alive(left.name.split(".")[-2]):
            shutil.rmtree(left, ignore_errors=True)
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


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
