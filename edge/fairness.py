"""Self-clocked fair queueing (Golestani, INFOCOM 1994): whose turn it is, by what each turn costs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class FairQueueing(Generic[Key]):
    """Gives turns to those who want something, the cheap before the dear.

    An item ends, in virtual time, its cost (tokens) over the weight after it began; it begins when it is wanted, and
    not before its owner's last one ended. The one that ends first is served, and its end is the new virtual time. So
    nobody saves up while idle, equals are served in the order in which they came, and over any busy stretch each one's
    share is its weight's, whatever its items cost.
    """

    def __init__(self, weight: Callable[[Key], float] = lambda key: 1.0) -> None:
        self._weight = weight
        self._now = 0.0
        self._begins: dict[Key, float] = {}  # of those who want, in the order in which they came
        self._ends: dict[Key, float] = {}  # of last items, where that is still to come

    def next(self, wants: Mapping[Key, int]) -> Key:
        """Who is served now, of those who want an item (and its cost in tokens > 0); the cost is charged."""
        for key in [key for key in self._begins if key not in wants]:
            del self._begins[key]
        for key in wants:
            if key not in self._begins:
                self._begins[key] = max(self._now, self._ends.get(key, 0.0))
        ends = {key: begin + wants[key] / self._weight(key) for key, begin in self._begins.items()}
        first = min(ends, key=ends.__getitem__)
        del self._begins[first]
        self._now = ends[first]
        self._ends = {key: end for key, end in self._ends.items() if end > self._now}
        self._ends[first] = self._now
        return first

    def charge(self, key: Key, cost: int) -> None:
        """Notes what was served along with somebody else's turn: its next one begins so much later."""
        later = cost / self._weight(key)
        self._ends[key] = max(self._now, self._ends.get(key, 0.0)) + later
        if key in self._begins:
            self._begins[key] += later
