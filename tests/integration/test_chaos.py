"""The chaos table in short: each fault once, on stars of real processes under load. In full: benchmarks/chaos.py."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
with pytest.MonkeyPatch.context() as patch:  # benchmarks is no package; its files import each other as scripts do
    patch.syspath_prepend(ROOT / "benchmarks")
    chaos_scenarios = importlib.import_module("chaos_scenarios")
    chaos_stage = importlib.import_module("chaos_stage")

FLOORS = ("core", "topology", "cloud", "edge", "export", "paceline")


@pytest.fixture(scope="module")
def play() -> Iterator[Callable[[Any], Any]]:
    """Plays one scenario; stars are kept from one to the next, as in the benchmark."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(chaos_stage.Stage(patience=3.0)) as stage:
        yield lambda scenario: portal.call(stage.play, scenario)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=scenario.name, marks=[pytest.mark.long] if scenario.long else [])
        for scenario in chaos_scenarios.SCENARIOS
    ],
)
def test_every_promise_holds(play: Callable[[Any], Any], scenario: Any) -> None:
    """Texts of the plain run, nothing left behind, and no wait of three times what benchmarks/chaos.py allows."""
    row = play(scenario)
    if row.skipped is not None:
        pytest.skip(row.skipped)
    assert row.problems == []
    assert row.requests > 0 and row.differing == 0
    assert row.sessions == row.fds == row.threads == 0


def test_no_decision_depends_on_the_wall_clock() -> None:
    """Only these read it: to show or log it, and to compare it with a certificate's dates."""
    found = {
        str(path.relative_to(ROOT))
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow)\(", path.read_text())
    }
    assert found <= {
        "cloud/api/app.py",  # OpenAI's `created`
        "core/clock.py",  # doctor shows how far two clocks are apart
        "edge/recorder.py",  # when a recording began
        "paceline/commands/certificate_probes.py",
        "paceline/star.py",  # whether a status file is a new one
        "topology/certificate_checks.py",
        "topology/certificates.py",
        "topology/process.py",  # a status file's time
        "topology/tls.py",
    }
