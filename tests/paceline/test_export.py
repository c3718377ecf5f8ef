"""`paceline export` as people and scripts call it, on the embedded pair."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

from paceline import cli
from paceline.core import manifest as manifests
from paceline.export import graph

ROOT = Path(__file__).resolve().parents[2]
DRAFTER, TARGET = str(ROOT / "models" / "tiny-drafter"), str(ROOT / "models" / "tiny-target")


def test_a_person_gets_sizes_times_and_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One table, and how a topology names the bundle."""
    assert cli.main(["export", DRAFTER, "--out", str(tmp_path / "out"), "--max-context", "64"]) == 0
    out = capsys.readouterr().out
    for words in (
        "tiny-drafter: drafter bundle, onnxruntime gqa float32", "model.onnx.data", "compare it with torch",
        "largest difference of a logit", "same proposal at temperature", "16 of up to 64 tokens",
        f"{tmp_path / 'out'} is done. In a topology: {{model: {tmp_path / 'out'}}}",
    ):  # fmt: skip
        assert words in out


def test_a_terminal_shows_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line each, on stderr, so that what is printed can be piped."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["export", DRAFTER, "--out", str(tmp_path / "out"), "--max-context", "64", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    last = printed.err[printed.err.rindex("read the model") :]  # the last time that all lines were drawn
    assert [step for step in report["seconds"] if step not in last] == []
    assert last.count("100%") == len(report["seconds"]) == 4


def test_a_script_gets_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest as it was written, sizes and seconds."""
    command = ["export", TARGET, "--out", str(tmp_path / "out"), "--role", "target", "--dtype", "bfloat16", "--json"]
    assert cli.main(command) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["manifest"] == manifests.load(tmp_path / "out").model_dump(mode="json")
    assert (report["manifest"]["role"], report["manifest"]["weight_dtype"]) == ("target", "bfloat16")
    assert report["sizes"]["model.safetensors"] > 3_789_504 * 2
    assert set(report["seconds"]) == {"convert the weights", "checksums"}


def test_mistakes_end_with_2_and_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is not there, options that contradict each other, a value that does not exist."""
    out = str(tmp_path / "out")
    for arguments, words in (
        (["./none", "--out", out], "no model at ./none: there is no such directory"),
        ([TARGET, "--out", out, "--role", "target", "--quantize", "int8"], "--quantize int8 is for graphs"),
        ([TARGET, "--out", out, "--profile", "paged"], "Invalid value for '--profile'"),
    ):
        assert cli.main(["export", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_contradicts_itself_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Options, a missing model, a place that is taken, a line that is no JSON: without seconds of imports."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "fine"}\n\nno JSON\n')
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    code = "import sys; from paceline import cli; print(cli.main(sys.argv[1:]), 'torch' in sys.modules)"
    out = str(tmp_path / "out")
    for arguments, words in (
        (["./none", "--out", out], "no model at ./none: there is no such directory"),
        (
            [DRAFTER, "--out", out, "--profile", "static-native"],
            "--profile static-native: onnxruntime runs gqa, concat",
        ),
        ([DRAFTER, "--out", str(tmp_path / "taken")], "is there already and is no bundle"),
        ([DRAFTER, "--out", out, "--texts", str(texts)], f'{texts}:3: each line must be JSON with a "text"'),
    ):
        command = [sys.executable, "-c", code, "export", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "2 False\n"
        assert words in done.stderr


def test_of_a_target_it_is_said_that_nothing_was_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the line for a topology holds wherever its file is, also where --out was a relative path."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", TARGET, "--out", "out", "--role", "target"]) == 0
    said = capsys.readouterr().out
    assert "nothing: each weight was converted" in said
    assert f"out is done. In a topology: {{model: {tmp_path / 'out'}}}" in said


def test_a_graph_that_is_wrong_ends_with_1_naming_the_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph gets other weights than the model that it is compared with."""
    right = graph.write

    def wrong(module: Any, *arguments: Any, **keywords: Any) -> Any:
        weight = module.model.layers[1].self_attn.v_proj.weight
        kept = weight.clone()
        weight.mul_(1.1)
        try:
            return right(module, *arguments, **keywords)
        finally:
            weight.copy_(kept)

    monkeypatch.setattr(graph, "write", wrong)
    assert cli.main(["export", TARGET, "--out", str(tmp_path / "out"), "--max-context", "64"]) == 1
    err = capsys.readouterr().err
    assert "layer 1's values differ first" in err and "look at layer 1's value projection" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_a_terminated_export_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM while it works, as a service manager or a timeout sends it."""
    command = [sys.executable, "-m", "paceline", "export", TARGET, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*.partial/model.onnx*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1].endswith("stopped: nothing was made\n")
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", re.findall(r"^    paceline (export .*)$", (ROOT / "docs/export.md").read_text(), re.M)
)
def test_a_command_of_the_document_is_one(command: str) -> None:
    """Its options exist and take these values; what it names is there."""
    context = cli.load_command("export").make_context("export", command.split()[1:])
    assert (ROOT / context.params["model"] / "config.json").is_file()
