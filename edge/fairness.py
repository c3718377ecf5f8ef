"""Deficit round robin (Shreedhar & Varghese, SIGCOMM 1995): whose turn it is, by what each turn costs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
QUANTUM = 32  # tokens of credit a turn, at weight 1


class DeficitRoundRobin(Generic[Key]):
    """A ring of those who want something, each with the credit (tokens) it has left.

    Who wants nothing leaves the ring and its credit is forgotten, so nobody saves up while idle; who comes
    back waits at the end. Over any busy stretch each one's share is its weight's, whatever its items cost.
    """

    def __init__(self, quantum: int = QUANTUM, weight: Callable[[Key], float] = lambda key: 1.0) -> None:
        self._quantum = quantum
        self._weight = weight
        self._credit: dict[Key, float] = {}  # in the ring's order, the first one's turn is now

    def next(self, wants: Mapping[Key, int]) -> Key:
        """Who is served now, of those who want an item (and its cost in tokens > 0); the cost is charged."""
        for key in [key for key in self._credit if key not in wants]:
            del self._credit[key]
        if not self._credit:
            first = next(iter(wants))
            self._credit[first] = self._quantum * self._weight(first)
        for key in wants:
            self._credit.setdefault(key, 0.0)
        while True:
            first = next(iter(self._credit))
            if self._credit[first] >= wants[first]:
                self._credit[first] -= wants[first]
                return first
            self._credit[first] = self._credit.pop(first)  # to the end of the ring
            following = next(iter(self._credit))
            self._credit[following] += self._quantum * self._weight(following)

    def charge(self, key: Key, cost: int) -> None:
        """Notes what was served along with somebody else's turn; it may leave a debt."""
        if key in self._credit:
            self._credit[key] -= cost
