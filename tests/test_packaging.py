"""What is built is what is in the repository: every folder, importable on its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"paceline": "paceline"} | {f: f"paceline/{f}" for f in ("core", "edge", "cloud", "topology", "export")}


def python_files() -> dict[str, Path]:
    """Name in the wheel → file in the repository."""
    return {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy (setuptools writes beside what it builds) with the setuptools at hand."""
    source = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".mypy_cache"))
        else:
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("paceline-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, unpacked by pip into an empty folder."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_file_of_every_folder_is_in_the_wheel(wheel: Path) -> None:
    """A new folder that pyproject.toml does not list is missing here; one that it lists too much fails to build."""
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert inside == set(python_files())


def test_the_wheel_carries_types_and_licence(wheel: Path) -> None:
    """py.typed for type checkers, the licence for everybody."""
    names = zipfile.ZipFile(wheel).namelist()
    assert "paceline/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert "paceline/export/texts.json" in names


def test_every_folder_imports_from_the_wheel_alone(installed: Path) -> None:
    """Away from the repository: no module is found by accident of the working directory."""
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in python_files()
        if name.endswith("/__init__.py") or name in ("paceline/cli.py", "paceline/topology/spec.py")
    )
    program = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(installed)!r})\n"
        # the editable installation must not help
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '').lower()]\n"
        f"for name in {modules!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(installed)!r}), module.__file__\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=installed, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_type_checkers_see_every_folder() -> None:
    """typings/paceline holds one link for each folder and for each module of the face."""
    links = ROOT / "typings" / "paceline"
    assert all((links / folder).resolve() == ROOT / folder for folder in FOLDERS if folder != "paceline")
    for path in (ROOT / "paceline").iterdir():
        if path.suffix in (".py", ".typed") or (path.is_dir() and path.name != "__pycache__"):
            assert (links / path.name).resolve() == path, (
                f"ln -s ../../paceline/{path.name} typings/paceline/{path.name}"
            )
