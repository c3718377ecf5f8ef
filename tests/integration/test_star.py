"""The embedded pair as examples/star.yaml has it, on other ports: real models, real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .conftest import free_ports

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def star_on_free_ports(folder: Path) -> Path:
    """A copy of examples/star.yaml."""
    data = yaml.safe_load((ROOT / "examples" / "star.yaml").read_text())
    ports = iter(free_ports(len(data["drafters"]) + len(data["targets"])))
    for node in data["drafters"]:
        node.update(listen=f"127.0.0.1:{next(ports)}", model=str(ROOT / "models" / "tiny-drafter"))
    for node in data["targets"]:
        node.update(api={"listen": f"127.0.0.1:{next(ports)}"}, model=str(ROOT / "models" / "tiny-target"))
    path = folder / "star.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize("options", [("--temperature", "0"), ("--temperature", "0.8", "--seed", "11")])
def test_the_embedded_star_changes_no_text(tmp_path: Path, options: tuple[str, ...]) -> None:
    """One drafter and three targets give the text of three plain targets, in fewer rounds."""
    path = star_on_free_ports(tmp_path)
    reports = []
    for drafting in (("--no-drafter",), ()):
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            str(path),
            "--json",
            "--max-tokens",
            "64",
            *options,
            *drafting,
        ]
        command += ["--prompts", str(ROOT / "examples" / "prompts.jsonl")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    plain, drafted = reports
    assert [o["token_ids"] for o in plain["outputs"]] == [o["token_ids"] for o in drafted["outputs"]]
    assert [o["text"] for o in plain["outputs"]] == [o["text"] for o in drafted["outputs"]]
    assert all(target["acceptance_length"] > 1.5 for target in drafted["targets"])
    assert all(node["live_sessions_at_end"] == 0 for node in drafted["targets"] + drafted["drafters"])


@pytest.mark.long
def test_smollm2_answers_in_english_with_an_ngram_drafter(tmp_path: Path) -> None:
    """scripts/fetch_models brings the model; the same text comes with and without the drafter."""
    subprocess.run([ROOT / "scripts" / "fetch_models"], check=True, timeout=900)
    data = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    ports = free_ports(2)
    data["drafters"][0]["listen"] = f"127.0.0.1:{ports[0]}"
    data["targets"][0]["api"]["listen"] = f"127.0.0.1:{ports[1]}"
    path = tmp_path / "smollm2.yaml"
    path.write_text(yaml.safe_dump(data))
    prompt = "<|im_start|>user\nName the capital of France.<|im_end|>\n<|im_start|>assistant\n"
    texts = []
    for drafting in (("--no-drafter",), ()):
        command = [sys.executable, "-m", "paceline", "run", str(path), "--json", "--prompt", prompt, *drafting]
        done = subprocess.run([*command, "--max-tokens", "24"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout)["outputs"][0]["text"])
    assert "Paris" in texts[0]
    assert texts[0] == texts[1]
