"""`paceline engine`: what is built, what is told, and what is asked for before anything is built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.edge.runtimes.cuda import Cuda

MODEL = Path(__file__).parents[2] / "models" / "tiny-drafter"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    pytest.importorskip("onnxruntime")
    from paceline.export.bundle import export
    from paceline.export.options import Request
    from paceline.export.watch import Watch

    export(Request(str(MODEL), tmp_path / "bundle", runtime="tensorrt", max_context=64), Watch())
    return tmp_path / "bundle"


def test_an_engine_is_built_and_entered(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorrt_rtx")
    options = ["--library", "tensorrt_rtx", "--no-check", "--max-batch", "2"]
    assert cli.main(["engine", str(bundle), *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    name = Path(told["file"]).name
    assert list(manifests.load(bundle).engines) == [name]
    assert told["bytes"] == (bundle / name).stat().st_size and told["checked"] is None
    assert cli.main(["engine", str(bundle), *options]) == 0
    assert capsys.readouterr().out.endswith(" s.\nNot compared with the bundle's graph.\n")


def test_without_a_gpu_nothing_is_built_unless_it_is_asked_for(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorrt_rtx")
    try:
        Cuda().close()
        pytest.skip("there is a GPU here")
    except UserError as error:
        reason = str(error)
    assert cli.main(["engine", str(bundle), "--library", "tensorrt_rtx"]) == 2
    wanted = f"{reason}; so the engine could not be compared here: --no-check builds it all the same\n"
    assert capsys.readouterr().err == wanted
    assert manifests.load(bundle).engines == {}


def test_what_is_no_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", str(tmp_path)]) == 2
    assert "is no bundle: it has no manifest.json" in capsys.readouterr().err


def test_what_no_engine_can_be_built_of_is_told_before_what_this_machine_lacks(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The graph's profile, then a device that is none, as the command line has it."""
    assert cli.main(["engine", str(bundle), "--device", "cpu"]) == 2
    wanted = "--device cpu: TensorRT runs on a GPU: give --device cuda:0\n"
    assert capsys.readouterr().err == wanted
    assert cli.main(["profile", str(bundle), "--threads", "1"]) == 2
    assert capsys.readouterr().err == wanted
    manifests.write(manifests.read(bundle).model_copy(update={"profile": "gqa", "runtime": "onnxruntime"}), bundle)
    assert cli.main(["engine", str(bundle)]) == 2
    assert capsys.readouterr().err.startswith(f"{bundle} has a graph of profile gqa, and TensorRT needs one with fixed")


def test_it_needs_neither_torch_nor_onnx() -> None:
    """A Jetson has neither."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'onnx', 'safetensors']))"
    modules = "paceline.commands.engine, paceline.export.engine_verify, paceline.edge.runtimes.tensorrt"
    done = subprocess.run([sys.executable, "-c", f"{blocked}; import {modules}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
