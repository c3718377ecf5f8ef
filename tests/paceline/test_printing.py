"""What commands print of files and of others: as it is, and never as orders to the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline import cli
from paceline.commands import doctor
from paceline.commands import trace as trace_command
from paceline.commands.probes import Probe
from paceline.commands.run_output import folded

MODELS = Path(__file__).resolve().parents[2] / "models"
TOPOLOGY = """
version: 1
name: t
drafters:
  - {name: d, model: MODEL, listen: "[fe80::1]:7070"}
targets:
  - {name: a, model: toy, engine: emulated, drafters: {names: [d]}}
"""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def paceline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Runs one command line in this process: (code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run


def topology(folder: Path, model: str) -> Path:
    file = folder / "t.yaml"
    file.write_text(TOPOLOGY.replace("MODEL", model), encoding="utf-8")
    return file


def test_an_error_spells_escapes_out(paceline: Command, tmp_path: Path) -> None:
    """A path that the user was given."""
    assert paceline("check", tmp_path / "\x1b[31m.yaml")[2] == f"{tmp_path}/\\x1b[31m.yaml: there is no such file\n"


def test_check_shows_addresses_and_paths_as_they_are(paceline: Command, tmp_path: Path) -> None:
    """An IPv6 address is no markup; a path with an escape in it moves no cursor."""
    code, out, _ = paceline("check", topology(tmp_path, '"./no\\e[31m"'))
    assert (code, "[fe80::1]:7070" in out, "\x1b" in out) == (0, True, False)
    assert r"no\x1b[31m" in out


def test_a_file_for_a_model_is_refused_naming_its_folder(paceline: Command, tmp_path: Path) -> None:
    """By check already, whatever the runtime."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.onnx").write_bytes(b"")
    for more in ("", ", runtime: onnxruntime"):
        file = topology(tmp_path, f"b/model.onnx{more}")
        code, _, err = paceline("check", file)
        place = f"drafters[0].model: {tmp_path}/b/model.onnx is a file: name the folder that it is in, {tmp_path}/b"
        assert (code, place in err) == (2, True)


def test_doctor_spells_escapes_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Of versions, devices and peers."""
    doctor._print(Probe("ok", "model", "x\x1b[2J\ny"))
    assert capsys.readouterr().out == f"ok    {'model':<18} x\\x1b[2J\\ny\n"


def test_an_answer_keeps_its_lines_and_loses_its_escapes() -> None:
    """What a model writes is text."""
    assert folded("a\tb\nc\x1b[31md") == "a\tb\nc\\x1b[31md"


def test_a_trace_on_a_full_disk_leaves_no_file(
    paceline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence says why."""
    from tests.edge.recorded import recorded_run

    recording = recorded_run(tmp_path, rounds=3)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_command, "write_whole", full)
    code, _, err = paceline("trace", recording)
    assert (code, err) == (2, f"{tmp_path}/d.trace.json: cannot be written: No space left on device\n")
    assert [path.name for path in tmp_path.iterdir()] == ["d.rec"]


def test_a_bundle_with_another_tokenizer_does_not_start(paceline: Command, tmp_path: Path) -> None:
    """It would only draft nothing that its target takes."""
    from paceline.core import manifest as manifests
    from paceline.core.vocabulary import Vocabulary
    from paceline.edge.drafter import load_drafter
