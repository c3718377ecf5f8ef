"""What the documents say of the tests is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_tests_that_a_document_names_are_there(document: Path) -> None:
    """`test_file.py: test_name`, and further names, which may be of any file."""
    text = document.read_text(encoding="utf-8")
    for file, name in re.findall(r"`(?:(test_\w+\.py)(?:: )?)?(test_\w+)?`", text):
        if file:
            assert file in TESTS, f"{document.name} names {file}"
        if name:
            places = [TESTS[file]] if file else list(TESTS.values())
            assert any(f"def {name}(" in place for place in places), f"{document.name} names {name}"
