"""scripts/verify_on_gpu from its options to its verdict, on the fake device: real exports, comparisons and timings."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from paceline.core import manifest as manifests
from paceline.core.manifest import Manifest, ModelEntry
from paceline.edge.runtimes.tensorrt_library import key_here
from paceline.edge.runtimes.tensorrt_steps import Profile
from paceline.export import engine_check, engine_verify
from paceline.export.engine import BuiltEngine

from .fake_cuda import FakeDevice, FakeEngine

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
SCRIPT = Path(__file__).parents[2] / "scripts" / "verify_on_gpu"


class FakeMachine:
    """A fake of everything that needs a GPU: an engine is a file with a word in it, and runs in ONNX Runtime."""

    can_capture = True

    def environment(self, library: str, device: str) -> dict[str, str]:
        return {"card": "Fake card, sm_87", library: "10.3.0"}

    def build(self, folder: Path, **options: Any) -> BuiltEngine:
        manifest = manifests.load(folder, role="drafter")
        key = key_here("tensorrt", "10.3.0", "sm_87", "aa")
        path = folder / key.file_name
        path.write_bytes(b"plan")
        files = {**manifest.files, path.name: manifests.checksum(path)}
        manifests.write(manifest.model_copy(update={"files": files, "engines": {path.name: key._asdict()}}), folder)
        return BuiltEngine(path, key, 4, 1.0, {"SCATTER": 2})

    def open(self, folder: Path, manifest: Manifest, device: str) -> tuple[FakeEngine, FakeDevice]:
        fake = FakeDevice(can_capture=self.can_capture)
        return FakeEngine(folder / "model.onnx", fake, (Profile(2, 8), Profile(1, 64))), fake


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    machine = FakeMachine()
    monkeypatch.setattr(engine_verify, "environment", machine.environment)
    monkeypatch.setattr(engine_verify, "build_engine", machine.build)
    monkeypatch.setattr(engine_verify, "open_engine", machine.open)
    monkeypatch.setattr(engine_check, "open_engine", machine.open)
    monkeypatch.setenv("COLUMNS", "120")
    return machine


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    loader = SourceFileLoader("verify_on_gpu", str(SCRIPT))
    spec = importlib.util.spec_from_loader("verify_on_gpu", loader)
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["verify_on_gpu", *arguments])
    return int(script.main())


def test_every_profile_is_exported_compared_timed_and_told(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    assert run(monkeypatch, "--max-context", "64", "--json", str(figures)) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "card: Fake card, sm_87"
    assert told[-1] == "VERIFIED: 3 engines on Fake card, sm_87"
    heads = ("static-compat float16", "static-compat float32", "static-native float16")
    assert all(any(head in line for line in told) for head in heads)
    assert any("1 × 16" in line and line.count("→") == 3 for line in told)
    bundles = json.loads(figures.read_text())["bundles"]
    assert [bundle["name"] for bundle in bundles] == list(heads)
    for bundle in bundles:
        sizes = [(time["rows"], time["tokens"]) for time in bundle["times"]]
        assert sizes == [(1, 1), (1, 2), (1, 4), (1, 16), (2, 1)]
        assert bundle["graphs"] and bundle["top1"] > 0.98 and bundle["layers"] == {"SCATTER": 2}


def test_no_graphs_is_a_failure(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from paceline.export.bundle import export
    from paceline.export.options import Request
    from paceline.export.watch import Watch

    bundle = tmp_path / "bundle"
    export(
        Request(str(SCRIPT.parents[1] / "models" / "tiny-drafter"), bundle, runtime="tensorrt", max_context=64), Watch()
    )
    machine.can_capture = False
    assert run(monkeypatch, str(bundle)) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[-2:] == [
        "failed: static-compat float16: CUDA graphs could not be recorded",
        "FAILED: 1 engines on Fake card, sm_87",
    ]


def test_its_arguments_are_looked_at_before_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without a fake: what is missing is told whether there is a TensorRT here or not."""
    assert run(monkeypatch, str(tmp_path / "absent")) == 2
    assert capsys.readouterr().out.startswith(f"NOT VERIFIED: {tmp_path}/absent does not exist: name a model's folder")
    assert run(monkeypatch, str(tmp_path)) == 2
    assert "is neither a model nor a bundle" in capsys.readouterr().out
    sizes = dict.fromkeys(("vocabulary_size", "layers", "kv_heads", "head_dim", "max_context", "max_sessions"), 8)
    manifest = Manifest(
        role="drafter",
        runtime="onnxruntime",
        profile="gqa",
        model=ModelEntry(name="small", family="llama", fingerprint=""),
        tokenizer_fingerprint="",
        weight_dtype="float32",
        kv_dtype="float32",
        files={},
        **sizes,
    )
    manifests.write(manifest, tmp_path)
    assert run(monkeypatch, str(tmp_path)) == 2
    assert "has a graph of profile gqa, and TensorRT needs one with fixed KV rows" in capsys.readouterr().out
