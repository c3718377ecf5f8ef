"""What commands print of files and of others: as it is, and never as orders to the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline import cli
from paceline.commands import doctor
from paceline.commands.probes import Probe
from paceline.commands.run_output import folded

TOPOLOGY = """
version: 1
name: t
drafters:
  - {name: d, model: MODEL, listen: "[::1]:7070"}
targets:
  - {name: a, model: ./target, drafters: {names: [d]}}
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
    assert (code, "[::1]:7070" in out, "\x1b" in out) == (0, True, False)
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
    doctor._print(Probe("model", "ok", "x\x1b[2J\ny"))
    assert capsys.readouterr().out == f"ok    {'model':<18} x\\x1b[2J\\ny\n"


def test_an_answer_keeps_its_lines_and_loses_its_escapes() -> None:
    """What a model writes is text."""
    assert folded("a\tb\nc\x1b[31md") == "a\tb\nc\\x1b[31md"
