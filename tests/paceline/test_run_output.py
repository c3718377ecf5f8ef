"""What `paceline run` shows of texts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.commands.run_output import folded, show


def test_long_runs_of_empty_lines_are_folded_with_their_number() -> None:
    """Spaces in them are not seen either; a few empty lines are part of how code looks."""
    assert folded("a" + "\n" * 125 + "b") == "a\n… 124 empty lines …\nb"
    assert folded("a\n" + " \t\n" * 10 + "  b") == "a\n… 10 empty lines …\n  b"
    assert folded("import os\n\n\n\n\nclass A:\n") == "import os\n\n\n\n\nclass A:\n"


def test_an_answer_of_empty_lines_does_not_fill_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt, note and frame, and the report itself is left as it is."""
    output: dict[str, Any] = {"prompt": "import os", "text": "\n" * 125, "token_ids": [1] * 125, "ttft_ms": 3.0}
    report = {"outputs": [{**output, "target": "chat", "finish_reason": "length"}], "targets": [], "drafters": []}
    show(report)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) < 12
    assert any("… 124 empty lines …" in line for line in shown)
    assert report["outputs"][0]["text"] == "\n" * 125
