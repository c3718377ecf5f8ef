"""How long a model's pass takes, as a curve over the size of the pass: measured, or assumed for an emulated model."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

SHORTEST = 1e-3  # ms: no pass takes no time at all, also where it is said to be free, so every rate is finite


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one pass over its size (sequences of a draft step, tokens of a verification).

    points: (size, ms), sizes ascending, at least one. Between two points the curve is straight; before the first it
    is flat, beyond the last it goes on as between the last two.
    """

    points: tuple[tuple[int, float], ...]

    @staticmethod
    def constant(ms: float) -> StepTimes:
        """The same at every size."""
        return StepTimes(((1, ms),))

    @staticmethod
    def doubling(ms: float, growth: float, largest: int = 1024) -> StepTimes:
        """`ms` for one, and `growth` (0.1 = 10 %) more with each doubling of the size."""
        points, size = [(1, ms)], 2
        while size <= largest:
            points.append((size, points[-1][1] * (1 + growth)))
            size *= 2
        return StepTimes(tuple(points))

    def ms(self, size: float) -> float:
        """Milliseconds of a pass of that size; SHORTEST at the least."""
        return max(SHORTEST, self._ms(size))

    def _ms(self, size: float) -> float:
        points = self.points
        if len(points) == 1 or size <= points[0][0]:
            return points[0][1]
        index = min(bisect_right(points, size, key=lambda point: point[0]), len(points) - 1)
        (low, below), (high, above) = points[index - 1], points[index]
        return below + (above - below) * (size - low) / (high - low)
