"""Whether a model is meant to be a folder here or a hub id; asked before anything heavy is imported."""

from __future__ import annotations

from glob import escape
from pathlib import Path

from paceline.core.errors import UserError


def existing_folder(model: str | Path) -> Path | None:
    """The model's folder, or None for what can only be a hub id. UserError for a path at which nothing is."""
    local = Path(model)
    if local.is_dir():
        return local
    if local.is_file():
        raise UserError(f"model {model} is a file: name the folder that it is in, {local.parent}")
    if gone := set_aside(local):
        raise UserError(gone)
    if local.is_absolute() or str(model).startswith((".", "~")) or len(local.parts) != 2:
        raise UserError(f"no model at {model}: there is no such directory")
    return None


def left_over(folder: Path) -> list[Path]:
    """Bundles that had stood at `folder`, where nothing is now, and stepped aside for a new one; oldest first."""
    folder = folder.absolute()
    if folder.exists():
        return []
    named = folder.parent.glob(f".{escape(folder.name)}.*.old")
    found = [path for path in named if path.name.split(".")[-2].isdigit() and path.is_dir()]  # a process's number
    return sorted(found, key=lambda path: path.stat().st_mtime)


def set_aside(folder: Path) -> str:
    """Where the bundle is, if an export was killed while it put a new one in its place; else empty."""
    if not (left := left_over(folder)):
        return ""
    return f"{folder} is gone, for an export that replaced it was killed; what was there: mv {left[-1]} {folder}"
