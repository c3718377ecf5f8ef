"""What messages say about a missing extra can be typed as it stands: Paceline is on no package index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.core import extras

ROOT = Path(__file__).parents[2]


def test_in_the_repository_the_form_of_the_readme_is_named() -> None:
    """As an editable install runs it."""
    assert extras.install("export") == "pip install -e '.[export]' in Paceline's repository"
    assert extras.install() == "pip install -e '.' in Paceline's repository"


def test_an_installed_wheel_names_no_repository_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a provisioned Jetson the script installed a wheel, and can do so again."""
    monkeypatch.setattr(extras, "HOME", tmp_path)
    assert extras.install("report") == "pip install 'PACELINE[report]', PACELINE being its repository or its wheel"
    assert extras.install("jetson").endswith("on a board that scripts/provision_jetson.sh set up, run that again")


def test_every_extra_that_is_named_exists_and_none_is_looked_for_on_an_index() -> None:
    """In code, documents and examples."""
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    known = set(re.findall(r"^([a-z]+) = \[", section, re.MULTILINE))
    folders = ("core", "edge", "cloud", "topology", "export", "paceline", "docs", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    named: set[str] = set()
    for path in (ROOT / "README.md", *files):
        if path.suffix not in (".py", ".md", ".yaml"):
            continue
        text = path.read_text(encoding="utf-8")
        assert "paceline[" not in text, path
        for group in re.findall(r"pip install (?:-e )?'\.\[([a-z,]+)\]", text):
            named.update(group.split(","))
        named.update(re.findall(r"\binstall\([\"']([a-z]+)[\"']\)", text))
    assert {"cloud", "export", "report", "jetson", "gpu", "broker", "sensors"} <= named <= known
