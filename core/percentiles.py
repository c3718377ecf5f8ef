"""Percentiles over the last so many values, in constant memory."""

from __future__ import annotations

import math
from collections import deque


class Window:
    """The last `size` values, and a count of all that were ever added."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self.count = 0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        self.count += 1

    def percentile(self, percent: float) -> float:
        """The nearest-rank percentile; 0 of an empty window."""
        return percentile(list(self._values), percent)

    def summary(self) -> dict[str, float]:
        """p50, p99, mean and standard deviation of what is in the window, and the count of all values."""
        return {**summary(list(self._values)), "count": self.count}


def percentile(values: list[float], percent: float) -> float:
    """The nearest-rank percentile of `values`; 0 when there are none."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[min(len(ranked), max(1, math.ceil(percent / 100 * len(ranked)))) - 1]


def summary(values: list[float]) -> dict[str, float]:
    """p50, p99, mean and (population) standard deviation; zeros when there are no values."""
    if not values:
        return {"p50": 0.0, "p99": 0.0, "mean": 0.0, "std": 0.0}
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return {
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "mean": mean,
        "std": math.sqrt(variance),
    }
