"""A file of real text, as `--texts` names it: a JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.core.errors import UserError


def read_lines(path: Path) -> list[str]:
    """The `text` or the `prompt` of each line that is not empty. UserError names the first line that has neither."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"--texts {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--texts {path}: is not UTF-8 text") from None
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            texts.append(str(record.get("text") or record["prompt"]))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise UserError(f'--texts {path}:{number}: each line must be JSON with a "text" or a "prompt"') from None
    return texts
