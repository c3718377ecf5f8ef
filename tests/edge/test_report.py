"""From recordings to figures, sentences, tables, curves and traces."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from paceline.edge.report import charts as module
from paceline.edge.report.analysis import Analysis, Spread
from paceline.edge.report.charts import charts, pictures
from paceline.edge.report.prediction import predict
from paceline.edge.report.recording import AHEAD, DRAFT, READ, ROUND_TYPE, STEP_TYPE, Recording, read_recording
from paceline.edge.report.summary import summary
from paceline.edge.report.table import _overview, tables
from paceline.edge.report.trace import trace
from paceline.edge.report.verdict import sentences
from paceline.topology.spec import parse_topology

from .recorded import about, recorded_run

SENSORS = {"sources": [], "absent": {}, "power": ["power.VDD_IN"]}


def made(steps: Any = (), rounds: Any = (), samples: Any = (), **more: Any) -> Analysis:
    """An analysis of a recording written down here. steps: (start, forward, top, choose, total, batch, kind)."""
    step_rows = [(*times, 0, batch, kind) for *times, batch, kind in steps]
    info = {"drafter": "d", "clock_zero": 0.0, "sensors": SENSORS, **about(), **more.pop("info", {})}
    recording = Recording(
        "d",
        info,
        ["a", "b"],
        np.array(step_rows, STEP_TYPE),
        np.array(list(rounds), ROUND_TYPE),
        list(samples),
        **more,
    )
    return Analysis(recording, "run")


def round_of(received: float, queue: float, work: float, **more: Any) -> tuple[Any, ...]:
    """A round as it is recorded; encoding takes 0.1 ms and sending 0.2 ms."""
    given = {"session": 1, "context": 10, "target": 0, "proposed": 4, "revealed": -1, "status": 0, "items": 1, **more}
    names = ("session", "context", "target", "items")
    place = tuple(given[name] for name in names)
    return received, queue, work, 1e-4, 2e-4, *place, 4, given["proposed"], given["revealed"], given["status"]


def test_the_stages_of_a_round_add_up_to_its_latency() -> None:
    """A chunk of reading, two steps, and what is left of the time: the loop."""
    steps = [
        (0.9, 0.05, 0.0, 0.0, 0.05, 1, DRAFT),  # before it
        (1.1, 0.1, 0.0, 0.0, 0.1, 1, READ),
        (1.2, 0.08, 0.01, 0.01, 0.1, 2, DRAFT),
        (1.3, 0.08, 0.01, 0.01, 0.1, 2, DRAFT),
        (1.5, 0.05, 0.0, 0.0, 0.05, 1, DRAFT),  # after it
    ]
    analysis = made(steps, [round_of(1.0, 0.1, 0.35)])
    found = {name: float(values[0]) for name, values in analysis.stages.items()}
    assert found == pytest.approx(
        {
            "queue": 0.1,
            "catch_up": 0.1,
            "model": 0.16,
            "top": 0.02,
            "choose": 0.02,
            "loop": 0.05,
            "encode": 1e-4,
            "send": 2e-4,
        },
        abs=1e-6,
    )
    assert sum(found.values()) == pytest.approx(analysis.latency[0], abs=1e-6)
    assert analysis.busy(READ) == pytest.approx(0.1 / 0.65, abs=1e-5)


def test_a_step_whose_parts_are_not_told_apart_counts_as_the_model() -> None:
    """As n-grams have it."""
    analysis = made([(1.0, 0.0, 0.0, 0.0, 0.1, 1, DRAFT)], [round_of(1.0, 0.0, 0.1)])
    assert analysis.stages["model"][0] == pytest.approx(0.1)


def test_acceptance_is_joined_with_the_round_that_it_belongs_to() -> None:
    """Of two sessions whose rounds interleave; the last of each is not known."""
    rounds = [
        round_of(1.0, 0, 0.1, session=1),
        round_of(1.1, 0, 0.1, session=2),
        round_of(2.0, 0, 0.1, session=1, revealed=4, context=15),
        round_of(2.1, 0, 0.1, session=2, revealed=1, context=12),
        round_of(3.0, 0, 0.1, session=1, revealed=0, context=16, proposed=0),
    ]
    analysis = made([], rounds)
    assert analysis.accepted.tolist() == [4, 0, 1, -1]
    assert (analysis.drafted_tokens, analysis.accepted_tokens) == (16, 5)
    assert analysis.acceptance_length == pytest.approx(1 + 5 / 3)
    assert analysis.agreement == pytest.approx(5 / 7)  # five right ones, and in two rounds a wrong one after them
    assert analysis.away == pytest.approx([0.8997, 0.8997, 0.8997], abs=1e-6)
    assert analysis.committed_rate(0) == pytest.approx((6 + 2) / 2.0)
    assert analysis.in_flight(0) == pytest.approx(3.0 / 2.0)


def test_energy_is_the_integral_of_power_over_the_time_in_forwards() -> None:
    """From 10 W to 20 W in a second, two forwards of 0.1 s around 0.25 s and 0.75 s: 1.25 J and 1.75 J."""
    steps = [(0.2, 0.1, 0, 0, 0.1, 1, DRAFT), (0.7, 0.1, 0, 0, 0.1, 1, READ)]
    samples = [{"time": 0.0, "power": 10.0}, {"time": 1.0, "power": 20.0}]
    rounds = [round_of(0.2, 0.0, 0.1), round_of(0.7, 0.0, 0.1, revealed=3)]
    analysis = made(steps, rounds, samples)
    assert analysis.device.busy_joules == pytest.approx(3.0, abs=1e-6)
    assert analysis.device.joules == pytest.approx(0.6 * 15.0, abs=1e-6)
    energy = summary(analysis)["energy"]
    assert energy["joules_a_drafted_token"] == pytest.approx(3.0 / 8)
    assert energy["joules_an_accepted_token"] == pytest.approx(3.0 / 3)
    assert energy["watts"] == {"min": 10.0, "mean": 15.0, "max": 20.0}


def test_without_a_power_sensor_nothing_is_made_up() -> None:
    energy = summary(made([(0, 0.1, 0, 0, 0.1, 1, DRAFT)], [round_of(0, 0, 0.1)]))["energy"]
    assert energy["joules"] is energy["joules_a_drafted_token"] is energy["watts"] is None


def test_the_queue_is_named_where_the_drafter_is_shared_by_too_many() -> None:
    """Forwards fill the time, and Drafts wait longer than they are drafted for."""
    steps = [(0.01 * index, 0.01, 0, 0, 0.01, 1, DRAFT) for index in range(100)]
    rounds = [round_of(0.01 * index, 0.05, 0.02, session=index) for index in range(90)]
    sentence, short = sentences(made(steps, rounds))
    assert sentence.startswith(
        "The queue limits: forwards take 100% of the time, and a Draft waits 50 ms of its 70.3 ms"
    )
    assert short == "The run lasted 1 s: below a minute, power, energy and percentiles are rough."


def test_the_drafter_itself_or_what_is_beyond_it_is_named() -> None:
    """A full drafter without a queue; then an idle one whose sessions are away."""
    full = [(0.01 * index, 0.01, 0, 0, 0.01, 1, DRAFT) for index in range(100)]
    rounds = [round_of(0.02 * index, 0.0, 0.02) for index in range(50)]
    assert sentences(made(full, rounds))[0].startswith("The drafter limits, by its token steps: forwards take 100%")
    idle = [(0.1 * index, 0.01, 0, 0, 0.01, 1, DRAFT) for index in range(50)]
    rounds = [round_of(0.1 * index, 0.0, 0.01) for index in range(50)]
    assert sentences(made(idle, rounds))[0] == (
        "Link and targets limit: a session is away for 89.7 ms of its round and here for 10.3 ms, while forwards take "
        "10% of the time. The drafter could serve more targets."
    )
    assert sentences(made()) == ["Nothing was drafted while this was recorded."]


def test_throttling_and_lowered_clocks_are_told() -> None:
    """Counters that rose, alerts that were on, a GPU below the clock that it reached; and a bad drafter."""
    samples = [
        {"time": 0.0, "throttle.oc3-events": 5, "throttle.gpu-throttle-alert": 0, "clock.gpu": 1020.0},
        {"time": 0.5, "throttle.oc3-events": 5, "throttle.gpu-throttle-alert": 1, "clock.gpu": 600.0},
        {"time": 0.9, "throttle.oc3-events": 9, "throttle.gpu-throttle-alert": 0, "clock.gpu": 600.0},
    ]
    steps = [(0.1 * index, 0.01, 0, 0, 0.01, 1, DRAFT) for index in range(10)]
    rounds = [round_of(0.1 * index, 0, 0.01, revealed=0 if index else -1) for index in range(10)]
    found = sentences(made(steps, rounds, samples, lost=3, cut=True))
    assert found[1:] == [
        "The board was throttled meanwhile (gpu-throttle-alert: 33% of the time, oc3: 4 events): times are longer than "
        "they need be.",
        "The GPU mostly ran at 600 MHz of the 1020 MHz that it reached: pin its clock, or look at the power mode and "
        "the temperature.",
        "Only 0% of the proposals that targets looked at were right: a better drafter pays.",
        "3 records were overwritten before they could be written.",
        "The run was longer than what is kept: these are its last minutes.",
    ]


TOPOLOGY = """
version: 1
name: t
drafters:
  - {name: d, model: toy, runtime: emulated, max_batch: 1, profile: {step_ms: 50}}
targets:
  - {name: a, model: toy, engine: emulated, draft_length: 4, profile: {verify_ms: 40}, drafters: {names: [d]}}
  - {name: other, model: toy, engine: emulated, profile: {verify_ms: 999}, drafters: {names: [d]}}
"""


def topology_with(engine: str) -> dict[str, Any]:
    """As a recording holds it. engine: of target a."""
    dumped: dict[str, Any] = parse_topology(TOPOLOGY, "t.yaml", Path(".")).model_dump(mode="json")
    dumped["targets"][0]["engine"] = engine
    return dumped


def predicted(engine: str = "emulated", **more: Any) -> Any:
    """One session of target a: four steps of 2 ms, 45 ms away, all right; the drafter's own profile says otherwise."""
    topology = topology_with(engine)
    steps = [(0.053 * r + 0.002 * s, 0.002, 0, 0, 0.002, 1, DRAFT) for r in range(50) for s in range(4)]
    rounds = [
        round_of(0.053 * index, 0.0, 0.008, context=10 + 5 * index, revealed=4 if index else -1) for index in range(50)
    ]
    return predict(made(steps, rounds, info={"topology": topology}, **more))


def test_the_planner_is_asked_with_what_was_measured() -> None:
    """Its 40 ms of verification, our 2 ms a step and agreement 1: 8 ms or a step more, five tokens a round."""
    rows = {row.what: row for row in predicted().rows}
    assert rows["draft"].predicted == pytest.approx(8.0, abs=2.1)
    assert rows["draft"].measured == pytest.approx(8.0, abs=0.01)
    assert rows["round"].predicted == pytest.approx(48.1, abs=2.1)
    assert rows["round"].measured == pytest.approx(53.0, abs=0.01)
    assert (rows["acceptance length"].predicted, rows["acceptance length"].measured) == pytest.approx((5.0, 5.0))
    assert rows["a target's rate"].measured == pytest.approx(5 / 0.053, rel=1e-3)
    assert rows["drafter busy"].measured == pytest.approx(100 * 8 / 53, abs=0.5)


def test_a_real_targets_verification_comes_from_its_status_or_is_missed() -> None:
    """Beside a recording lie the status files of the targets on the same machine."""
    statuses = {"a": {"role": "target", "verify_ms": {"mean": 30.0, "count": 7}}}
    rows = {row.what: row for row in predicted("torch", statuses=statuses).rows}
    assert rows["round"].predicted == pytest.approx(38.1, abs=2.1)
    missed = predicted("torch")
    assert (missed.rows, missed.why) == (
        (),
        "the time of a verification is not known: no status of a beside the recording",
    )


def test_no_topology_and_no_verified_draft_are_said() -> None:
    assert predict(made()).why == "the recording holds no topology that this version can read"
    topology = topology_with("emulated")
    assert predict(made(info={"topology": topology})).why == "no draft was verified while it was recorded"


def test_a_recorded_run_has_the_figures_that_it_must_have(tmp_path: Path) -> None:
    """Four sessions, two at a time: the second target's wait four steps of 2 ms; three of four proposals are right."""
    analysis = Analysis(read_recording(recorded_run(tmp_path)), "run")
    found = summary(analysis)
    assert (found["rounds"], found["sessions"], found["targets"]) == (160, 4, ["a", "b"])
    assert found["acceptance_length"] == pytest.approx(4.0)
    assert found["tokens"]["drafted"] == 640
    assert found["tokens"]["accepted"] == 156 * 3
    stages = {name: times["mean"] for name, times in found["stages_ms"].items()}
    assert stages["queue"] == pytest.approx(4.0, abs=0.3)
    assert stages["model"] == pytest.approx(found["latency_ms"]["mean"] - stages["queue"], abs=1e-3)
    assert 8.0 <= stages["model"] <= 10.0
    assert found["step_ms"] == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p99"), 2.0), abs=1e-3)
    assert found["energy"]["joules_a_drafted_token"] == pytest.approx(5.0 * 0.002 * found["steps"] / 640, rel=1e-4)
    assert found["temperature"] == {"tj-thermal": {"min": 45.0, "mean": 45.0, "max": 45.0}}


def test_a_terminal_of_80_columns_is_enough(tmp_path: Path) -> None:
    """For one run and for two, without a line that is cut."""
    report = summary(Analysis(read_recording(recorded_run(tmp_path)), "run"))
    for reports in ([report], [report, {**report, "run": "another-run"}]):
        console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(tables(reports))
        console.file.close()
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
        assert "tokens drafted / accepted" in text
        assert "mJ a token drafted / accepted" in text
        assert "sensors that are missing\nnvml: no\n" in text


def test_every_curve_is_drawn_where_there_are_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As XML, in the page's colours, with a name, over time from the run's beginning to its end; and none where there
    are none."""
    limits: list[tuple[float, float]] = []
    draw = module._svg

    def noting(figure: Any, axes: Any, *more: Any) -> str:
        limits.append(axes.get_xlim())
        return draw(figure, axes, *more)

    monkeypatch.setattr(module, "_svg", noting)
    figures = {"load.gpu": 50.0, "clock.gpu": 1020.0}
    full = Analysis(read_recording(recorded_run(tmp_path, **figures)), "run")
    for chart in charts():
        limits.clear()
        drawn, empty = pictures(chart, [full, made()])
        element = ElementTree.fromstring(drawn)
        if chart.x_label == "seconds":
            assert limits == [(0.0, full.seconds)]
        assert element.get("aria-label") == f"{chart.title}: {chart.note}"
        assert "currentColor" in drawn
        assert "#a1b2c" not in drawn
        assert empty == ""


def test_spreads_are_nearest_rank_percentiles() -> None:
    assert Spread.of(np.arange(1, 101)) == Spread(50.5, 50, 90, 99)
    assert Spread.of(np.array([])) == Spread(0.0, 0.0, 0.0, 0.0)


def test_a_trace_is_well_formed(tmp_path: Path) -> None:
    """On every track slices nest; sessions have tracks, sends are there once a message, and sensors are counters."""
    recording = read_recording(recorded_run(tmp_path, rounds=10))
    events = trace(recording)["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (1, 1): "forwards of the batch",
        (1, 2): "encode and send",
        (2, 1): "session 1",
        (2, 2): "session 2",
        (3, 1): "session 1",
        (3, 2): "session 2",
    }
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
    assert set(tracks) == set(names)
    for slices in tracks.values():
        _nest(slices)
    assert sum(e["name"] == "draft × 2" for e in tracks[1, 1]) == len(recording.steps)
    assert [e["name"] for e in tracks[1, 2]].count("to a") == 20  # its sessions take turns with the other's
    rounds = [e for e in tracks[2, 1] if e["name"] == "round"]
    assert [e["args"]["proposed"] for e in rounds] == [4] * 10
    away = [e for e in tracks[2, 1] if e["name"] == "link and target"]
    assert [e["args"]["accepted"] for e in away] == [3] * 9
    assert {e["name"] for e in events if e["ph"] == "C"} == {"batch", "power W", "tj-thermal °C"}


def _nest(slices: list[dict[str, Any]]) -> None:
    """Each slice lies within the one that is open when it begins, up to a microsecond."""
    open_until: list[float] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        while open_until and open_until[-1] <= event["ts"] + 1.0:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1] + 1.0
        open_until.append(end)


def test_a_message_is_sent_once_whatever_it_holds() -> None:
    """Two sessions of one message, and another message."""
    rounds = [round_of(1.0, 0.1, 0.2, session=1), round_of(1.1, 0.0, 0.2, session=2), round_of(2.0, 0.1, 0.2)]
    events = trace(made([], rounds).recording)["traceEvents"]
    sends = [(event["name"], event["ts"]) for event in events if event["name"].startswith("to ")]
    assert sends == [("to a", pytest.approx(0.3e6, abs=1)), ("to a", pytest.approx(1.3e6, abs=1))]


def test_a_trace_may_hold_the_end_alone(tmp_path: Path) -> None:
    recording = read_recording(recorded_run(tmp_path))
    short = trace(recording, last=0.05)["traceEvents"]
    assert 0 < len(short) < len(trace(recording)["traceEvents"]) / 5
    assert max(event["ts"] for event in short if "ts" in event) < 0.08e6


def test_drafting_ahead_has_a_name_of_its_own() -> None:
    """In traces, and apart from the steps of rounds in figures."""
    steps = [(0.1 * index, 0.01, 0, 0, 0.01, 3, AHEAD if index % 2 else DRAFT) for index in range(4)]
    analysis = made(steps, [round_of(0.0, 0.0, 0.01)])
    assert len(analysis.draft_steps) == 2
    assert analysis.busy(AHEAD) == pytest.approx(0.02 / 0.31, abs=1e-4)
    assert sentences(analysis)[0].endswith("Forwards take 6% of the time, drafting ahead 6% besides.")
    names = [event["name"] for event in trace(analysis.recording)["traceEvents"] if event["name"].startswith("draft")]
    assert names == ["draft × 3", "draft ahead × 3", "draft × 3", "draft ahead × 3", "draft"]


def test_rounds_that_were_made_ahead_are_counted() -> None:
    """Those that the target took from what it had been sent, without a message; the table says which share."""
    analysis = made([(0.0, 0.01, 0, 0, 0.01, 1, DRAFT)], [round_of(0.1 * i, 0.0, 0.0, items=i % 2) for i in range(4)])
    report = summary(analysis)
    assert (report["rounds"], report["rounds_ahead"]) == (4, 2)
    assert dict(_overview([report]))["rounds made ahead"] == ["2 (50 %)"]
