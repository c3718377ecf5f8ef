"""Text of others on a terminal: what a file or a peer says must not move the cursor, recolour or retitle anything."""

from __future__ import annotations

import re

# Control characters, line separators, marks that turn the direction of writing, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, lines: bool = False) -> str:
    """The text with \\x1b and the like spelt out. lines: whether line ends and tabs stay what they are."""
    return _UNSAFE.sub(lambda found: found[0] if lines and found[0] in "\n\t" else _spelt(found[0]), text)


def _spelt(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
