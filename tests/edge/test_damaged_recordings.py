"""Recordings of others, or of a disk that failed: what is damaged is left out and told, and nothing moves a cursor."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from paceline.core.errors import UserError
from paceline.edge.report.analysis import Analysis
from paceline.edge.report.recording import (
    ROUND_TYPE,
    Recording,
    _blocks,
    block,
    find_recordings,
    json_block,
    read_recording,
)
from paceline.edge.report.summary import summary
from paceline.edge.report.table import tables
from paceline.edge.report.trace import trace

from .recorded import recorded_run

Change = Callable[[bytes, bytes], bytes]
EVIL = "\x1b[31m\x1b]0;title\x07[bold]$\\frac<b>"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return recorded_run(tmp_path, rounds=10)


def changed(path: Path, change: Change) -> None:
    path.write_bytes(b"".join(block(kind, change(kind, data)) for kind, data in list(_blocks(path))))


def text_of(recording: Recording) -> str:
    """The table of a report; the trace and the JSON are made as well, without a number that JSON has not."""
    found = summary(Analysis(recording, "run"))
    json.dumps([found, trace(recording)], allow_nan=False)
    output = io.StringIO()
    Console(file=output, width=400).print(tables([found]))
    return output.getvalue()


@pytest.mark.parametrize(
    "content", [b"{", b"5", b'"x"', b"[[1]]", b"null", b"[" * 100_000, b'{"time": NaN}', b"{}", b"\xff"]
)
@pytest.mark.parametrize("kind", [b"PEER", b"SENS", b"LOST"])
def test_a_damaged_block_is_left_out_and_counted(whole: Path, kind: bytes, content: bytes) -> None:
    """All but the rest, which is shown."""
    before = read_recording(whole)
    with whole.open("ab") as file:
        file.write(block(kind, content))
    after = read_recording(whole)
    assert (len(after.rounds), len(after.samples), after.targets) == (
        len(before.rounds),
        len(before.samples),
        ["a", "b"],
    )
    if (kind, content) == (b"LOST", b"5"):
        assert (after.lost, after.damaged) == (before.lost + 5, 0)
    else:
        assert after.damaged == before.damaged + 1 == 1
        assert "Damaged parts of the recording were left out: 1 blocks or records." in text_of(after)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300, 1e10])
def test_a_time_that_is_none_takes_its_record_away(whole: Path, value: float) -> None:
    """Wherever in the record it is; the others are shown."""
    before = len(read_recording(whole).rounds)

    def spoil(kind: bytes, data: bytes) -> bytes:
        if kind != b"ROUN":
            return data
        rounds = np.frombuffer(data, ROUND_TYPE).copy()
        with np.errstate(over="ignore"):
            rounds["received"][0] = value
            rounds["work"][-1:] = value
        return rounds.tobytes()

    spoilt = sum({1: 1}.get(len(data) // ROUND_TYPE.itemsize, 2) for kind, data in _blocks(whole) if kind == b"ROUN")
    changed(whole, spoil)
    after = read_recording(whole)
    assert (len(after.rounds), after.damaged) == (before - spoilt, spoilt)
    assert "blocks or records" in text_of(after)


def info_with(path: Path, **changes: Any) -> None:
    def change(kind: bytes, data: bytes) -> bytes:
        return json.dumps(json.loads(data) | changes).encode() if kind == b"INFO" else data

    changed(path, change)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"drafter": 5}, "drafter"),
        ({"clock_zero": "x"}, "clock_zero"),
        ({"clock_zero": 1e300}, "clock_zero"),
        ({"sensors": {"absent": []}}, "sensors.absent"),
        ({"drafter_spec": {}}, "drafter_spec.runtime"),
        ({"environment": ["x"]}, "environment"),
        ({"topology": "x"}, "topology"),
        ({"format": "1"}, "format"),
    ],
)
def test_a_damaged_first_block_is_refused_naming_its_place(whole: Path, changes: dict[str, Any], place: str) -> None:
    """One sentence: without it the numbers mean nothing."""
    info_with(whole, **changes)
    with pytest.raises(UserError, match=rf"d\.rec: its first block is damaged, at {place}: nothing of it can be shown"):
        read_recording(whole)


def test_a_damaged_older_part_costs_that_part(whole: Path) -> None:
    """As does one of another format."""
    before = len(read_recording(whole).rounds)
    for content in (b"junk" * 100, b"", json_block(b"INFO", {"format": 9})):
        whole.with_name("d.rec.1").write_bytes(content)
        after = read_recording(whole)
        assert (len(after.rounds), after.damaged) == (before, 1)


def test_other_files_of_the_folder_are_no_trouble(whole: Path) -> None:
    """Foreign JSON, however deep; a pipe in place of a status; a target's with wrong figures."""
    folder = whole.parent
    (folder / "deep.json").write_text("[" * 100_000)
    os.mkfifo(folder / "pipe.json")
    (folder / "a.json").write_text(json.dumps({"role": "target", "verify_ms": {"count": "x", "mean": []}}))
    (folder / "b.json").write_text(json.dumps({"role": "target", "verify_ms": {"count": 3, "mean": 5.0}}))
    assert list(read_recording(whole).statuses) == ["b"]


def test_a_pipe_that_is_called_a_recording_is_refused(tmp_path: Path) -> None:
    """Nobody waits for it."""
    os.mkfifo(tmp_path / "x.rec")
    (found,) = find_recordings(tmp_path)
    with pytest.raises(UserError, match=r"x\.rec: is no regular file"):
        read_recording(found)


def test_what_a_recording_says_is_shown_as_it_is(whole: Path) -> None:
    """Escapes are spelt out and markup is text, in every place that a recording's words reach."""
    spec = {"strategy": EVIL, "runtime": EVIL, "model": EVIL, "device": EVIL, "run": 5, "limits": 3}
    sensors = {"sources": [EVIL], "absent": {EVIL: EVIL}, "power": [EVIL]}
    info_with(whole, drafter=EVIL, environment={EVIL: EVIL, "n": 3}, drafter_spec=spec, sensors=sensors)
    with whole.open("ab") as file:
        file.write(json_block(b"PEER", [EVIL, EVIL, EVIL]))
        file.write(json_block(b"SENS", {"time": 1.0, f"temp.{EVIL}": 40.0, f"throttle.{EVIL}": 1.0}))
    recording = read_recording(whole)
    shown = text_of(recording)
    assert shown.count(r"\x1b[31m\x1b]0;title\x07[bold]$\frac<b>") >= 5
    assert not any(letter in shown for letter in "\x1b\x07")
    assert "\\u001b" not in json.dumps(trace(recording))


def test_curves_take_any_name(whole: Path) -> None:
    """Matplotlib reads no formula into it."""
    pytest.importorskip("matplotlib")
    from paceline.edge.report.charts import charts, pictures

    with whole.open("ab") as file:
        for time in range(20):
            file.write(json_block(b"SENS", {"time": float(time), "temp.$\\frac{$": 40.0 + time, "temp.b": 41.0}))
    analysis = Analysis(read_recording(whole), "run")
    chart = next(chart for chart in charts() if chart.title == "Temperature")
    assert "$\\frac{$" in "".join(pictures(chart, [analysis]))
