"""The TensorRT runtime on a real GPU, by scripts/verify_on_gpu. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.export.engine_verify import environment

SCRIPT = Path(__file__).parents[2] / "scripts" / "verify_on_gpu"


def missing(library: str) -> str:
    """Why it cannot run here; empty where it can."""
    try:
        environment(library, "cuda:0")  # type: ignore[arg-type]
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
def test_engines_are_built_agree_and_become_graphs(library: str, tmp_path: Path) -> None:
    if reason := missing(library):
        pytest.skip(reason)
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--library", library, "--max-context", "256", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("VERIFIED: ")
    for bundle in json.loads(figures.read_text())["bundles"]:
        assert bundle["graphs"] and bundle["top1"] > 0.97
        assert all(time["launched"] > 0 for time in bundle["times"])


def test_without_a_gpu_the_script_says_what_is_missing() -> None:
    libraries = {library: missing(library) for library in ("tensorrt", "tensorrt_rtx")}
    for library, reason in libraries.items():
        if not reason:
            continue
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--library", library], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (2, f"NOT VERIFIED: {reason}\n")
