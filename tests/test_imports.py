"""The floors of the house: imports point down only, and the edge stays light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("paceline", "export", "edge", "cloud", "topology", "core")
# A folder may import itself and what stands below it. edge and cloud are on one floor and strangers.
BELOW = {
    "paceline": {"export", "edge", "cloud", "topology", "core"},
    "export": {"edge", "cloud", "topology", "core"},
    "edge": {"topology", "core"},
    "cloud": {"topology", "core"},
    "topology": {"core"},
    "core": set(),
}
HEAVY = {"torch", "transformers"}
MAY_BE_HEAVY = ("core/lm/", "cloud/", "export/", "edge/runtimes/torch.py")
LAZILY_HEAVY = ("paceline/commands/probes.py",)  # doctor, which asks torch for the GPU

FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at the top level) of every import, relative ones made absolute, type-only ones left out."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            yield absolute(path, node), node.lineno, id(node) in top


def absolute(path: Path, node: ast.ImportFrom) -> str:
    """The module that a from-import names; `from paceline import core` counts as paceline.core."""
    module = node.module or ""
    if node.level:
        package = ["paceline", *path.parent.parts] if path.parts[0] != "paceline" else list(path.parent.parts)
        module = ".".join([*package[: len(package) - node.level + 1], *filter(None, [module])])
    if module == "paceline" and node.names[0].name in FOLDERS:
        return f"paceline.{node.names[0].name}"
    return module


def folder_of(module: str) -> str | None:
    """The folder that a module of ours lies in, or None for others."""
    parts = module.split(".")
    if parts[0] != "paceline":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "paceline"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path: Path) -> None:
    """paceline → export → edge | cloud → topology → core."""
    home = path.parts[0]
    for module, line, _ in imports(path):
        folder = folder_of(module)
        if folder is None or folder == home or module == "paceline":  # the bare root holds the version only
            continue
        assert folder in BELOW[home], f"{path}:{line}: {home} must not import {module}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_only_a_few_rooms_import_torch(path: Path) -> None:
    """A Jetson has numpy and tokenizers, no torch and no transformers."""
    name = path.as_posix()
    for module, line, top in imports(path):
        if module.split(".")[0] in HEAVY and not name.startswith(MAY_BE_HEAVY):
            assert name in LAZILY_HEAVY, f"{path}:{line}: {name} must not import {module}"
            assert not top, f"{path}:{line}: {module} must be imported late"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_folder_is_imported_by_its_bare_name(path: Path) -> None:
    """`import core` works from the root of the repository only, and then a second copy of everything is loaded."""
    for module, line, _ in imports(path):
        bare = module.split(".")[0]
        assert bare not in FOLDERS or bare == "paceline", f"{path}:{line}: write paceline.{module}"


def test_every_file_is_within_reach() -> None:
    """400 lines are the limit of a file."""
    lengths = {str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > 400}
