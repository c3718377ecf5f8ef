"""The soak: hundreds of requests through random faults; what is promised of time is measured by benchmarks/ alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]


def test_every_promise_holds_through_random_faults() -> None:
    """Same texts, nothing left behind; on a busy machine texts may stand still for longer."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "soak.py"),
        "--requests",
        "500",
        "--minutes",
        "15",
        "--patience",
        "5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    print(done.stdout)  # pytest -rP shows the figures
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
