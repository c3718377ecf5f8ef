"""What the benchmarks share: prompts nobody trained on, a topology made on the spot, medians."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
TARGET, DRAFTER = MODELS / "tiny-target", MODELS / "tiny-drafter"


def prompts(count: int, characters: int = 300, *, offset: int = 400) -> list[str]:
    """Passages of the held-out files, one of each file, cut at a line's end."""
    found = []
    for line in (MODELS / "held-out.jsonl").read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        if len(text) < offset + characters:
            continue
        start = text.find("\n", offset) + 1 or offset
        found.append(text[start : start + characters].rpartition("\n")[0] + "\n")
    if not found:
        raise ValueError(f"no held-out text is {offset + characters} characters long")
    return [found[index % len(found)] for index in range(count)]


def write_topology(path: Path, drafters: list[dict[str, Any]], targets: list[dict[str, Any]], first_port: int) -> Path:
    """A topology file of the embedded pair; ports count up from `first_port`."""
    ports = iter(range(first_port, first_port + 100))
    data = {
        "version": 1,
        "name": path.stem,
        "drafters": [{"model": str(DRAFTER), "listen": f"127.0.0.1:{next(ports)}", **one} for one in drafters],
        "targets": [{"model": str(TARGET), "api": {"listen": f"127.0.0.1:{next(ports)}"}, **one} for one in targets],
    }
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def median(values: list[float]) -> float:
    return statistics.median(values)


def verdict(name: str, value: float, limit: float, *, at_least: bool = True) -> str:
    """One line: the figure, what was asked, and whether it holds."""
    holds = value >= limit if at_least else value <= limit
    sign = "≥" if at_least else "≤"
    return f"{'ok  ' if holds else 'MISS'} {name}: {value:.3g} (asked {sign} {limit:g})"
