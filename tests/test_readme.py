"""What the README shows works as it is written."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from paceline import cli
from paceline.topology.spec import load_topology

ROOT = Path(__file__).resolve().parents[1]


def topologies() -> list[str]:
    """The indented blocks of the README that are topology files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, flags=re.MULTILINE)
    return [block for block in map(textwrap.dedent, blocks) if block.lstrip().startswith("version: 1")]


def test_the_readme_shows_topologies() -> None:
    """Otherwise the next test would test nothing."""
    assert len(topologies()) == 2


@pytest.mark.parametrize("text", topologies(), ids=lambda text: text.split("name: ")[1].split()[0])
def test_a_topology_of_the_readme_is_valid(text: str, tmp_path: Path) -> None:
    """Each can be saved and run, once `keys init` has made what it names."""
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    if "security:" in text:
        assert cli.main(["keys", "init", str(path)]) == 0
    assert load_topology(path).targets


@pytest.mark.parametrize("name", re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
def test_a_link_of_the_readme_leads_somewhere(name: str) -> None:
    """Files that the README names exist."""
    assert (ROOT / name).exists()
