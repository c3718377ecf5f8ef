"""Start-time fair queueing (Goyal, Vin & Cheng, SIGCOMM 1996): whose turn it is, by what each turn costs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class FairQueueing(Generic[Key]):
    """Gives turns to those who want something; a turn's cost (tokens) over the weight is how long one waits after it.

    Virtual time is the tag of who was served last. Who begins to want is tagged with the later of it and of the end of
    its last turn, and the smallest tag is next, so nobody saves up while idle, equal tags are served in the order in
    which they came, and over any busy stretch each one's share is its weight's, whatever its items cost.
    """

    def __init__(self, weight: Callable[[Key], float] = lambda key: 1.0) -> None:
        self._weight = weight
        self._now = 0.0
        self._tags: dict[Key, float] = {}  # of those who want, in the order in which they came
        self._ends: dict[Key, float] = {}  # of last turns that are not over in virtual time

    def next(self, wants: Mapping[Key, int]) -> Key:
        """Who is served now, of those who want an item (and its cost in tokens > 0); the cost is charged."""
        for key in [key for key in self._tags if key not in wants]:
            del self._tags[key]
        for key in wants:
            if key not in self._tags:
                self._tags[key] = max(self._now, self._ends.get(key, 0.0))
        first = min(self._tags, key=self._tags.__getitem__)
        self._now = self._tags.pop(first)
        self._ends = {key: end for key, end in self._ends.items() if end > self._now}
        self._ends[first] = self._now + wants[first] / self._weight(first)
        return first

    def charge(self, key: Key, cost: int) -> None:
        """Notes what was served along with somebody else's turn: its next one comes so much later."""
        later = cost / self._weight(key)
        self._ends[key] = max(self._now, self._ends.get(key, 0.0)) + later
        if key in self._tags:
            self._tags[key] += later
