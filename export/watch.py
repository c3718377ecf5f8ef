"""Who looks on while an export works: the names of its steps and how far each is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watch:
    """Measures each step. Whoever shows progress overrides `begin`, `advance` and `end`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def begin(self, step: str, total: int | None) -> None:
        """A step begins; total: of what `advance` counts, None where nobody knows."""

    def advance(self, count: int) -> None:
        """That much more is done."""

    def end(self) -> None:
        """The step is over, well or not."""

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Yields what to tell of progress."""
        began = time.monotonic()
        self.begin(name, total)
        try:
            yield self.advance
            self.seconds[name] = time.monotonic() - began
        finally:
            self.end()
