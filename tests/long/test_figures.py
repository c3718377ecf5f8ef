"""Figures at full size: each is a command of benchmarks/ whose exit code says whether it holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "command",
    [
        ("identity.py", "--tokens", "1000000"),
        ("identity_fp32.py", "--tokens", "100000"),
        ("star_identity.py",),
    ],
    ids=lambda command: command[0],
)
def test_no_text_depends_on_a_drafter(command: tuple[str, ...]) -> None:
    """A million emulated tokens under faults, a hundred thousand in fp32, and the star killed and late."""
    run(command)


@pytest.mark.parametrize(
    "command",
    [
        ("auto.py", "--cases", "12"),
        ("planner_accuracy.py", "--cases", "24"),
        ("draft_ahead.py", "--cases", "2"),
        ("verify_budget.py",),
        ("star_formula.py",),
    ],
    ids=lambda command: command[0],
)
def test_the_formulas_and_what_steers_by_them_hold_on_virtual_time(command: tuple[str, ...]) -> None:
    """Controller and planner over their grids, the budget, the star and the lanes."""
    run(command)


def run(command: tuple[str, ...]) -> None:
    """A benchmark says by its exit code whether its figure holds."""
    script, *options = command
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *options], capture_output=True, text=True, timeout=1800
    )
    print(done.stdout)  # pytest -rP shows the figures
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
