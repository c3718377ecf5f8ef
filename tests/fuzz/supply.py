"""Choices out of a fuzzer's bytes. An empty supply answers 0, so every input means something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")

EDGES = (
    (1 << 64) - 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 32) - 1,
    1 << 32,
    (1 << 31) - 1,
    1 << 31,
    (1 << 16) - 1,
    1 << 16,
    -1,
    -(1 << 31),
    -(1 << 63),
)


class Supply:
    """Reads from the front; what is left decides how much more happens."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def bytes(self, count: int) -> bytes:
        """Up to `count` bytes."""
        self._at, start = min(len(self._data), self._at + count), self._at
        return self._data[start : self._at]

    def below(self, limit: int) -> int:
        """0..limit-1, limit ≤ 256."""
        return int.from_bytes(self.bytes(1), "little") % limit

    def choose(self, options: Sequence[Choice]) -> Choice:
        return options[self.below(len(options))]

    def number(self) -> int:
        """Mostly small; sometimes at the edge of a width, sometimes anything of 64 bits."""
        form = self.below(256)
        if form < 216:
            return form
        if form < 246:
            return EDGES[form % len(EDGES)]
        return int.from_bytes(self.bytes(8), "little")

    def fraction(self) -> float:
        """Mostly what a user would write; sometimes what a double can just hold, and what it cannot."""
        form = self.below(256)
        odd = (5e-324, 1e-300, 1e300, 1.7e308, float("inf"), float("nan"), -0.0, -1e308, 1 + 2**-52, 2**53, -2.0, 1.0)
        return odd[form % len(odd)] if form >= 200 else form / 100
