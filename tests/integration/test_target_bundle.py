"""A target served from its bundle: the text of the model that it was made of, until a byte of it is another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import free_ports
from .test_star import ROOT

pytestmark = pytest.mark.integration


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def topology(folder: Path, model: Path) -> str:
    path = folder / "plain.yaml"
    api = f'api: {{listen: "127.0.0.1:{free_ports(1)[0]}"}}'
    path.write_text(f"version: 1\nname: plain\ntargets:\n  - {{name: chat, model: {model}, {api}}}\n")
    return str(path)


def test_a_target_bundle_serves_its_models_text(tmp_path: Path) -> None:
    """Checksums are compared when the process loads it, and what is damaged is named."""
    pytest.importorskip("onnx")  # what `paceline export` imports
    model, bundle = ROOT / "models" / "tiny-target", tmp_path / "bundle"
    done = paceline("export", str(model), "--out", str(bundle), "--role", "target")
    assert done.returncode == 0, done.stderr
    run = ["--json", "--prompt", "def add(a, b):\n", "--max-tokens", "32", "--temperature", "0.8", "--seed", "5"]
    outputs = []
    for source in (model, bundle):
        done = paceline("run", topology(tmp_path, source), *run)
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout)["outputs"][0]["token_ids"])
    assert outputs[0] == outputs[1] and len(outputs[0]) == 32
    weights = bundle / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = paceline("run", topology(tmp_path, bundle), *run)
    assert done.returncode != 0
    assert f"{weights} has another checksum than the bundle's manifest says" in done.stderr
