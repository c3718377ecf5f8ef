"""Averages and curves learnt while running: what passes take by their size."""

from __future__ import annotations

import math

from paceline.core.profile import StepTimes

STEPS_AN_OCTAVE = 4  # sizes closer than that share a point of a curve


class Average:
    """An exponentially weighted mean whose first samples count in full."""

    def __init__(self, window: float) -> None:
        self.value = 0.0
        self.count = 0
        self._weight = 1.0 / window

    def add(self, sample: float) -> None:
        self.count += 1
        self.value += max(self._weight, 1.0 / self.count) * (sample - self.value)


class Curve:
    """Seconds of a pass over its size, learnt one pass at a time."""

    def __init__(self, window: float = 16.0) -> None:
        self._window = window
        self._points: dict[int, tuple[Average, Average]] = {}  # by size class: mean size, mean ms
        self._times: StepTimes | None = None

    def __bool__(self) -> bool:
        return bool(self._points)

    def add(self, size: int, seconds: float) -> None:
        """One pass of that size took so long."""
        kind = round(STEPS_AN_OCTAVE * math.log2(size))
        if kind not in self._points:
            self._points[kind] = Average(self._window), Average(self._window)
        sizes, times = self._points[kind]
        sizes.add(size)
        times.add(1000.0 * seconds)
        self._times = None

    def times(self) -> StepTimes:
        """The curve as it is known; larger passes are never quicker. At least one pass must have been added."""
        if self._times is None:
            points: list[tuple[int, float]] = []
            for sizes, times in (self._points[kind] for kind in sorted(self._points)):
                size = round(sizes.value)
                if points and size <= points[-1][0]:
                    continue
                points.append((size, max(times.value, points[-1][1] if points else 0.0)))
            self._times = StepTimes(tuple(points))
        return self._times
