"""Whether a model is meant to be a folder here or a hub id; asked before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import UserError


def existing_folder(model: str | Path) -> Path | None:
    """The model's folder, or None for what can only be a hub id. UserError for a path at which nothing is."""
    local = Path(model)
    if local.is_dir():
        return local
    if local.is_file():
        raise UserError(f"model {model} is a file: name the folder that it is in, {local.parent}")
    if local.is_absolute() or str(model).startswith((".", "~")) or len(local.parts) != 2:
        raise UserError(f"no model at {model}: there is no such directory")
    return None
