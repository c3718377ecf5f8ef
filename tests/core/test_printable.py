"""Text of others, made fit for a terminal; files that are written whole."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from paceline.core.files import write_whole
from paceline.core.printable import printable


def test_control_characters_are_spelt_out() -> None:
    """Escapes, C1, marks of direction, surrogates; letters of all scripts and emoji stay."""
    assert printable("\x1b]0;t\x07\x9b31m\r") == "\\x1b]0;t\\x07\\x9b31m\\r"
    assert printable("a\u202eb\ud800") == "a\\u202eb\\ud800"
    assert printable("a\n\tb") == "a\\n\\tb" and printable("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"
    for kept in ("日本語 é ö", "👩\u200d💻", "[bold]\\x"):
        assert printable(kept) == kept


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """No half of the new one, and no empty file where there was none."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for path in (old, new):
            with pytest.raises(OSError, match="File too large"):
                write_whole(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert old.read_text() == "before" and os.listdir(tmp_path) == ["old"]
    old.chmod(0o600)
    new.symlink_to("old")
    write_whole(new, "after")
    assert (old.read_text(), new.is_symlink(), old.stat().st_mode & 0o777) == ("after", True, 0o600)
    write_whole(Path("/dev/null"), "x")
