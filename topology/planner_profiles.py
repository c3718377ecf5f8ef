"""Profile files given on a command line: NODE=FILE."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from paceline.core.errors import UserError
from paceline.topology.spec import Profile, read_text
from paceline.topology.spec_errors import dotted
from paceline.topology.yaml_lines import read_yaml


def read_profiles(given: Iterable[str]) -> dict[str, Profile]:
    """Profiles by node, out of `NODE=FILE` each. Raises UserError with one sentence."""
    profiles = {}
    for text in given:
        node, equals, file = text.partition("=")
        if not equals or not node or not file:
            raise UserError(f"--profile {text}: must be NODE=FILE, such as --profile drafter=orin.yaml")
        profiles[node] = read_profile(Path(file))
    return profiles


def read_profile(path: Path) -> Profile:
    """Step times out of a YAML file with the keys of `profile`. Raises UserError."""
    document = read_yaml(read_text(path))
    if document.problems:
        raise UserError("\n".join(f"{path}:{problem.mark.line}: {problem.message}" for problem in document.problems))
    try:
        return Profile.model_validate(document.data)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(path, item) for item in error.errors(include_url=False))) from None


def _sentence(path: Path, item: object) -> str:
    assert isinstance(item, dict)
    where = dotted(item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{path}: {where}: is not a key of a profile; allowed are {', '.join(Profile.model_fields)}"
    message = str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"]
    return f"{path}: {where + ': ' if where else ''}{message}"
