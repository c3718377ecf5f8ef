"""Time comes from outside, so that the same loop runs on a real or a virtual clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds and a way to spend them."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Returns once `seconds` have passed on this clock."""


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def wall_us() -> int:
    """Microseconds since 1970 as this machine has it: for logs and for comparing machines, never for measuring."""
    return time.time_ns() // 1000


class ManualClock:
    """A clock that moves only when told to; for tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Moves time forward by `seconds` (≥ 0)."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
