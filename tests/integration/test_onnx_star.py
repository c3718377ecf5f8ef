"""A bundle that `paceline export` made serves the star through ONNX Runtime: real models, real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from .test_star import ROOT, star_on_free_ports

pytestmark = pytest.mark.integration
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

PACELINE = (sys.executable, "-m", "paceline")


def run(*command: str) -> str:
    done = subprocess.run([*PACELINE, *command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def outputs(report: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(output["text"], output["token_ids"]) for output in report["outputs"]]


def test_the_star_drafts_with_a_bundle_and_changes_no_text(tmp_path: Path) -> None:
    """The topology names the bundle and no runtime: its manifest does."""
    bundle = tmp_path / "bundle"
    run("export", str(ROOT / "models" / "tiny-drafter"), "--out", str(bundle), "--quantize", "int8")
    path = star_on_free_ports(tmp_path)
    data = yaml.safe_load(path.read_text())
    data["drafters"][0]["model"] = str(bundle)
    del data["drafters"][0]["runtime"]
    path.write_text(yaml.safe_dump(data))
    command = ["run", str(path), "--json", "--max-tokens", "48", "--temperature", "0.8", "--seed", "11"]
    command += ["--prompts", str(ROOT / "examples" / "prompts.jsonl")]
    plain, drafted = (json.loads(run(*command, *more)) for more in (["--no-drafter"], []))
    assert outputs(plain) == outputs(drafted)
    assert all(target["acceptance_length"] > 1.5 for target in drafted["targets"])
    assert all(node["live_sessions_at_end"] == 0 for node in drafted["targets"] + drafted["drafters"])
