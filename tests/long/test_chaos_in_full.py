"""The chaos table three times over, and the soak: commands of benchmarks/ whose exit code says whether all holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", [("chaos.py",), ("soak.py", "--minutes", "30")], ids=lambda command: command[0])
def test_every_promise_holds_under_chaos(command: tuple[str, ...]) -> None:
    """Every scenario, and two thousand requests through random faults."""
    script, *options = command
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *options], capture_output=True, text=True, timeout=3000
    )
    print(done.stdout)  # pytest -rP shows the figures
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
