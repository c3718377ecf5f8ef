"""A star served from bundles: what `paceline export` makes is what nodes load, and a damaged one is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import free_ports

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


def topology(folder: Path, drafter: Path, target: Path) -> str:
    """One drafter and one target of these models."""
    ports = free_ports(2)
    path = folder / f"{drafter.name}-{target.name}.yaml"
    nodes: dict[str, Any] = {
        "drafters": [{"name": "drafter", "model": str(drafter), "listen": f"127.0.0.1:{ports[0]}"}],
        "targets": [
            {
                "name": "chat",
                "model": str(target),
                "drafters": {"names": ["drafter"]},
                "api": {"listen": f"127.0.0.1:{ports[1]}"},
            }
        ],
    }
    path.write_text(yaml.safe_dump({"version": 1, "name": "bundles", **nodes}))
    return str(path)


def test_a_star_of_bundles_gives_the_text_of_the_models(tmp_path: Path) -> None:
    """Both nodes from bundles against the plain target from its folder; then a byte of the target's is changed."""
    drafter, target = tmp_path / "drafter", tmp_path / "target"
    done = paceline("export", str(MODELS / "tiny-drafter"), "--out", str(drafter), "--quantize", "int8")
    assert done.returncode == 0, done.stderr
    done = paceline("export", str(MODELS / "tiny-target"), "--out", str(target), "--role", "target")
    assert done.returncode == 0, done.stderr
    run = ["--json", "--prompts", "examples/prompts.jsonl", "--max-tokens", "48", "--temperature", "0.8", "--seed", "5"]
    reports = []
    for path, options in (
        (topology(tmp_path, MODELS / "tiny-drafter", MODELS / "tiny-target"), ["--no-drafter"]),
        (topology(tmp_path, drafter, target), []),
    ):
        done = paceline("run", path, *run, *options)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    plain, bundled = reports
    assert [o["token_ids"] for o in plain["outputs"]] == [o["token_ids"] for o in bundled["outputs"]]
    assert all(node["acceptance_length"] > 1.5 for node in bundled["targets"])

    weights = target / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = paceline("run", topology(tmp_path, drafter, target), *run)
    assert done.returncode != 0
    assert f"{weights} has another checksum than the bundle's manifest says" in done.stderr
