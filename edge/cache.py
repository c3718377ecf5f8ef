"""KV that outlived its session, kept until room is needed: a later session of the same target may start from it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.core.model import Span

LEAST_PREFIX = 16  # tokens; less is not worth a search or a span


@dataclass(frozen=True, eq=False)
class Kept:
    """A span and the tokens whose KV it holds."""

    target: str
    tokens: array[int]
    span: Span


class Cache:
    """Kept spans, the least recently kept first. Targets never see each other's."""

    def __init__(self, free: Callable[[Span], None]) -> None:
        self._free = free
        self._kept: dict[Span, Kept] = {}  # in order of age

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, kept: Kept) -> None:
        """Takes over the span of a session that is gone."""
        if len(kept.tokens) < LEAST_PREFIX:
            self._free(kept.span)
        else:
            self._kept[kept.span] = kept

    def take(self, target: str, tokens: array[int], length: int) -> tuple[Kept, int] | None:
        """Hands over the span that shares most first tokens with `tokens` and has room for `length`; and how many."""
        best, most = None, LEAST_PREFIX - 1
        for kept in self._kept.values():
            if kept.target != target or kept.span.size < length or len(kept.tokens) <= most:
                continue
            if kept.tokens[:LEAST_PREFIX] == tokens[:LEAST_PREFIX]:
                common = common_prefix(kept.tokens, tokens)
                if common > most:
                    best, most = kept, common
        if best is None:
            return None
        del self._kept[best.span]
        return best, most

    def evict(self) -> bool:
        """Frees the oldest span; False when there is none."""
        if not self._kept:
            return False
        span = next(iter(self._kept))
        del self._kept[span]
        self._free(span)
        return True


def common_prefix(left: array[int], right: array[int]) -> int:
    """How many first tokens two arrays share."""
    size = min(len(left), len(right))
    if not size or left[:size] == right[:size]:
        return size
    differs = np.frombuffer(left, np.uintc)[:size] != np.frombuffer(right, np.uintc)[:size]
    return int(differs.argmax())
