"""`paceline profile`: what is measured is what passes take."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from paceline.commands.profile import profile
from paceline.commands.profile_output import doubts, head
from paceline.core.clock import ManualClock
from paceline.core.emulated import Pace, ToyLanguage, ToyModel
from paceline.core.errors import UserError
from paceline.core.profile import StepTimes
from paceline.profiling import Measurement, measure
from paceline.topology.spec_models import Profile

MODEL = Path(__file__).parents[2] / "models" / "tiny-drafter"


def toy(pace: Pace, slots: int = 4096) -> tuple[ToyModel, ManualClock]:
    clock = ManualClock()
    return ToyModel(ToyLanguage(300), kv_slots=slots, pace=pace, clock=clock), clock


def test_the_step_times_of_an_emulated_model_come_out_as_they_went_in() -> None:
    """On virtual time the measured profile is the pace itself, at every size."""
    model, clock = toy(Pace(StepTimes.doubling(2.0, 0.1), 0.01))
    measured = measure(model, clock, context=100, sessions=8, draft_length=4, repeats=3)
    found = measured.profile
    assert found["step_ms"] == pytest.approx({1: 2.01, 2: 2.22, 4: 2.46, 8: 2.742}, abs=2e-3)
    assert found["verify_ms"] == pytest.approx({1: 2.01, 5: 2.05, 10: 2.3, 20: 2.62, 40: 3.062}, abs=2e-3)
    assert found["prompt_token_ms"] == pytest.approx(0.01, abs=1e-3)
    assert model._used == 0
    assert measured.raised == {} and list(doubts(measured)) == []
    assert measured.spread("step")[8] == pytest.approx((2.742, 2.742), abs=2e-3)


def test_what_only_drafts_has_no_verification_times() -> None:
    """A drafter's graph answers for one token a session, so it is not asked for more."""
    model, clock = toy(Pace(StepTimes.doubling(2.0, 0.1), 0.01))
    found = measure(model, clock, context=100, sessions=2, draft_length=None, repeats=3).profile
    assert set(found) == {"step_ms", "prompt_token_ms"}
    assert found["step_ms"] == pytest.approx({1: 2.01, 2: 2.22}, abs=2e-3)


def test_a_busy_machine_and_raised_figures_are_said() -> None:
    """A first point that a busy moment made too long stands for the next ones: it is no median, and that is said."""
    times = {("step", 1): [7.0] * 10, ("step", 2): [7.7] * 9 + [68.0] * 3, ("verify", 5): [3.2] * 12}
    profile: dict[str, object] = {"step_ms": {1: 7.0, 2: 7.7}, "verify_ms": {1: 7.0, 5: 7.0}, "prompt_token_ms": 0.0}
    found = Measurement(profile, times, {("verify", 5): 3.2})
    busy, raised = doubts(found)
    assert busy.startswith("the same pass took from 7.7 to 68 ms (step_ms of 2, p10 and p90): this machine was busy;")
    assert raised == "verify_ms of 5 is the 7 ms of a smaller pass, and no median, which was 3.2 ms: measure again"
    lines = head(found, "tiny", "cpu, auto, threads 1, context 64", 12).splitlines()
    assert lines[0] == "# tiny, cpu, auto, threads 1, context 64; measured here, medians of 12 passes."
    assert "# step_ms, p10–p90: 1: 7–7, 2: 7.7–68" in lines
    assert any(line.endswith("medians: verify_ms 5: 3.2") for line in lines)


def test_too_many_sessions_are_refused_in_words() -> None:
    """What does not fit is said before anything is measured."""
    model, clock = toy(Pace(), slots=1000)
    with pytest.raises(UserError, match="there is no room for 8 sessions of 300 tokens"):
        measure(model, clock, context=300, sessions=8, draft_length=4, repeats=1)


def test_the_command_measures_a_bundle(tmp_path: Path) -> None:
    """Its graph has a type of its own and room for as many sessions as it was made for."""
    from paceline.export.bundle import export
    from paceline.export.options import Request
    from paceline.export.watch import Watch

    bundle = str(tmp_path / "bundle")
    export(Request(str(MODEL), Path(bundle), max_context=320, max_sessions=2), Watch())
    app = typer.Typer()
    app.command()(profile)
    options = ["--context", "64", "--sessions", "2", "--repeats", "2", "--threads", "1"]
    result = CliRunner().invoke(app, [bundle, *options])
    assert result.exit_code == 0, result.output
    found = Profile.model_validate(yaml.safe_load(result.stdout))
    assert 0 < found.step_ms.ms(1) <= found.step_ms.ms(2) < 1000
    said = str(CliRunner().invoke(app, [bundle, *options, "--dtype", "float16"]).exception)
    assert said == f"--dtype float16: the graph of {bundle} has the type that it was exported with"


def test_the_command_writes_a_profile_that_a_topology_takes(tmp_path: Path) -> None:
    """The embedded drafter, measured for real: rising step times, valid as `profile:`."""
    app = typer.Typer()
    app.command()(profile)
    out = tmp_path / "drafter.yaml"
    options = [str(MODEL), "--context", "64", "--sessions", "2", "--repeats", "2", "--threads", "1", "--out", str(out)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert f"# {MODEL}, cpu, auto, threads 1, context 64; measured here" in out.read_text()
    found = Profile.model_validate(yaml.safe_load(out.read_text()))
    assert 0 < found.step_ms.ms(1) <= found.step_ms.ms(2) < 1000
    assert 0 < found.verify_ms.ms(1) <= found.verify_ms.ms(10) < 1000
