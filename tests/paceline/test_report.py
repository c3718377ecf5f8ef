"""`paceline report` and `paceline trace` over a real run: processes, links, sensors of this machine."""

from __future__ import annotations

import json
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline import cli

TOPOLOGY = """
version: 1
name: measured
link: {transport: memory}
drafters:
  - {name: drafter, model: toy, runtime: emulated, profile: {step_ms: 1, agreement: 0.8}, RECORD}
targets:
  - {name: one, model: toy, engine: emulated, profile: &v {verify_ms: 5}, drafters: &d {names: [drafter]}, api: PORT}
  - {name: two, model: toy, engine: emulated, profile: *v, drafters: *d, api: PORT}
"""

Command = Callable[..., tuple[int, str, str]]


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_topology(folder: Path, record: bool = True) -> Path:
    """The run directory of a star of two that has answered four prompts."""
    file = folder / "topology.yaml"
    text = TOPOLOGY.replace("RECORD", f"record: {str(record).lower()}")
    for port in free_ports(2):
        text = text.replace("PORT", f"{{listen: '127.0.0.1:{port}'}}", 1)
    file.write_text(text)
    run = folder / "run"
    prompts = [word for prompt in "abcd" for word in ("--prompt", prompt)]
    command = [sys.executable, "-m", "paceline", "run", file, *prompts, "--max-tokens", "100", "--json"]
    done = subprocess.run([*command, "--run-dir", run], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_topology(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def paceline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs one command line in this process: (code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_run_is_shown_as_a_table_with_what_limits_it(recorded: Path, paceline: Command) -> None:
    """In 80 columns; emulated figures are labelled, and each sensor that is missing costs no more than its figures."""
    code, out, err = paceline("report", recorded)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "drafter, emulated (emulated figures)" in out
    assert re.search(r"targets / sessions +2 / 4\n", out)
    assert "planned → measured" in out
    assert "\n• " in out


def test_json_holds_what_the_run_was(recorded: Path, paceline: Command) -> None:
    """Tokens add up with what the targets count, and times with the profile."""
    code, out, _ = paceline("report", recorded, "--json")
    (report,) = json.loads(out)
    assert code == 0
    targets = [json.loads((recorded / f"{name}.json").read_text()) for name in ("one", "two")]
    emitted = sum(target["drafted_tokens"] for target in targets)
    assert emitted <= report["tokens"]["drafted"] <= emitted + 4 * 16
    assert report["acceptance_length"] == pytest.approx(3.4, abs=0.8)
    assert report["step_ms"]["p50"] >= 1.0
    assert report["away_ms"]["p50"] >= 5.0
    assert set(report["targets"]) == {"one", "two"}
    assert {row["what"] for row in report["prediction"]["rows"]} >= {"draft", "round", "drafter busy"}
    assert report["sensors"]["sources"] or report["sensors"]["absent"]
    assert report["environment"]["python"]


class Page(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]


def test_the_page_is_one_file_that_needs_nothing_else(recorded: Path, paceline: Command, tmp_path: Path) -> None:
    """Two runs side by side, under 1 MB: no script, nothing fetched, both colour schemes, curves that are XML."""
    page = tmp_path / "page.html"
    shutil.copytree(recorded, tmp_path / "other-run")
    code, out, _ = paceline("report", recorded, tmp_path / "other-run", "--html", page)
    text = page.read_text(encoding="utf-8")
    assert code == 0
    assert f"curves: {page}" in out
    assert len(text.encode()) < 1_000_000
    seen = Page(text)
    assert not seen.tags & {"script", "link", "img", "iframe", "object"}
    assert all(link.startswith("#") for link in seen.links)
    assert "prefers-color-scheme: dark" in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    curves = re.findall(r"<svg role=.*?</svg>", text, re.DOTALL)
    assert len(curves) >= 12
    for curve in curves:
        ElementTree.fromstring(curve)
    assert '<p class="note">other-run</p>' in text.partition("Sensors that are missing")[2]
    assert "emulated figures" in text


def test_a_trace_is_written_beside_the_recording_or_where_it_is_wanted(
    recorded: Path, paceline: Command, tmp_path: Path
) -> None:
    code, out, _ = paceline("trace", recorded)
    assert (code, "https://ui.perfetto.dev" in out.replace("\n", "")) == (0, True)
    whole = json.loads((recorded / "drafter.trace.json").read_text())
    assert {event["ph"] for event in whole["traceEvents"]} == {"M", "X", "C"}
    code, _, _ = paceline("trace", recorded / "drafter.rec", "--out", tmp_path / "end.json", "--last", "0.1")
    end = json.loads((tmp_path / "end.json").read_text())
    assert 0 < len(end["traceEvents"]) < len(whole["traceEvents"])


def test_a_drafter_that_is_told_so_records_nothing(tmp_path: Path, paceline: Command) -> None:
    run = run_topology(tmp_path, record=False)
    assert not (run / "drafter.rec").exists()
    code, _, err = paceline("report", run)
    assert (code, err.partition(": ")[0]) == (2, f"{run} holds no recording of a drafter (NAME.rec)")


def test_what_is_no_recording_is_refused_in_a_sentence(recorded: Path, paceline: Command, tmp_path: Path) -> None:
    """No directory, another file, a newer format, a page that cannot be written."""
    assert paceline("report", tmp_path / "gone")[2].startswith(f"{tmp_path}/gone is no run directory: start the nodes")
    other = tmp_path / "notes.rec"
    other.write_text("notes")
    assert paceline("trace", other)[::2] == (2, f"{other}: is not a recording of a drafter\n")
    newer = tmp_path / "newer.rec"
    newer.write_bytes((recorded / "drafter.rec").read_bytes().replace(b'"format":1', b'"format":9', 1))
    assert "format 9 is not known to this version of paceline" in paceline("report", newer)[2]
    assert "cannot be written: No such file" in paceline("report", recorded, "--html", tmp_path / "no/page.html")[2]
    assert "cannot be written: No such file" in paceline("trace", recorded, "--out", tmp_path / "no/trace")[2]


def test_two_drafters_traces_do_not_go_to_one_file(recorded: Path, paceline: Command, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(recorded / "drafter.rec", tmp_path / f"{name}.rec")
    code, _, err = paceline("trace", tmp_path, "--out", tmp_path / "x")
    assert (code, err) == (
        2,
        f"--out takes one drafter's trace, and {tmp_path} holds a.rec, b.rec: name one of them\n",
    )


def test_the_page_says_which_package_it_needs(
    recorded: Path, paceline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Jetson has no matplotlib; its recording is looked at elsewhere."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, _, err = paceline("report", recorded, "--html", tmp_path / "page.html")
    said = "--html needs the package jinja2; run: pip install -e '.[report]' in Paceline's repository\n"
    assert (code, err) == (2, said)


def test_a_trace_on_a_full_disk_leaves_no_file(recorded: Path, paceline: Command, tmp_path: Path) -> None:
    """The sentence says why; the page of a report likewise."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        traced = paceline("trace", recorded, "--out", tmp_path / "t.json")
        shown = paceline("report", recorded, "--html", tmp_path / "page.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert traced[::2] == (2, f"{tmp_path}/t.json: cannot be written: File too large\n")
    assert shown[::2] == (2, f"{tmp_path}/page.html: cannot be written: File too large\n")
    assert list(tmp_path.iterdir()) == []
