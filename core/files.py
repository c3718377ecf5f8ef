"""A file that is there whole or not at all: a disk that fills up leaves no half of it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Puts the text, in UTF-8, where `path` is. OSError where that fails; what was there is there still."""
    if path.exists() and not path.is_file():  # a device or a pipe is written to, never replaced
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays one
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        if path.exists():
            partial.chmod(path.stat().st_mode & 0o777)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
