"""The bats files of this folder, one test each."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(HERE.glob("*.bats")), ids=lambda path: path.stem)
def test_bats(path: Path) -> None:
    """Every case of the file holds; bats says which does not."""
    if shutil.which("bats") is None:
        pytest.skip("bats is not installed (Debian and Ubuntu: apt install bats)")
    done = subprocess.run(["bats", path], capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not ok" not in done.stdout and "\nok 1 " in done.stdout
