"""How a wrong topology is reported: all problems at once, each with file, line, column and path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.errors import UserError
from paceline.topology.yaml_lines import Document, Path


@dataclass(frozen=True)
class Finding:
    """Something wrong at a path of the topology. `at_key`: the key is wrong, not its value."""

    path: Path
    message: str
    at_key: bool = False


@dataclass(frozen=True, order=True)
class Problem:
    """A finding with its place in a file; orders by file, then line."""

    file: str
    line: int
    column: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}: "
        return place + (f"{self.path}: {self.message}" if self.path else self.message)


class SpecErrors(UserError):
    """A topology that cannot be used; `problems` holds every reason, the message one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(map(str, self.problems)))


def dotted(path: Path) -> str:
    """('targets', 0, 'lanes') → targets[0].lanes."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def located(finding: Finding, document: Document, file: str) -> Problem:
    """Gives a finding its line and column."""
    mark = document.key_mark(finding.path) if finding.at_key else document.mark(finding.path)
    return Problem(file, mark.line, mark.column, dotted(finding.path), finding.message)
