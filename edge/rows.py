"""Rows of a runtime whose batches must be neighbouring rows: who lies where, and what has to move.

A graph with a fixed layout `[batch, kv_head, max_len, dim]` runs over rows `first … first + n`. `ContiguousRows`
stands in front of such a runtime and makes it look like one whose sessions may lie anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from paceline.core.model import Segment, Span
from paceline.edge.runtimes.base import TOP, Runtime, Top


class Rows:
    """Which key lies in which row. One row always stays free, so that two rows can change places."""

    def __init__(self, count: int, move: Callable[[int, int], None]) -> None:
        if count < 2:
            raise ValueError("rows are exchanged through a spare one: at least 2 are needed")
        self._keys: list[int | None] = [None] * count
        self._row: dict[int, int] = {}
        self._move = move

    @property
    def free(self) -> int:
        """How many more keys there is room for."""
        return len(self._keys) - 1 - len(self._row)

    def take(self, key: int) -> int:
        """A free row for `key`, the lowest."""
        row = self._keys.index(None)
        self._put(key, row)
        return row

    def give(self, key: int) -> None:
        """Frees the row of `key`."""
        self._keys[self._row.pop(key)] = None

    def row(self, key: int) -> int:
        return self._row[key]

    def gather(self, keys: Sequence[int]) -> int:
        """Moves as few rows as it takes for `keys` to be neighbours; returns the first of their rows."""
        rows = sorted(self._row[key] for key in keys)
        size = len(rows)
        if rows[-1] - rows[0] == size - 1:
            return rows[0]
        first = self._best_window(rows, size)
        window = range(first, first + size)
        wanted = set(keys)
        holes = [row for row in window if self._keys[row] not in wanted]
        holes.sort(key=lambda row: self._keys[row] is not None)  # filling the empty ones first frees rows outside
        strays = [key for key in keys if self._row[key] not in window]
        for key, hole in zip(strays, holes, strict=True):
            occupant = self._keys[hole]
            if occupant is not None:
                self._relocate(occupant, self._spare_outside(window))
            self._relocate(key, hole)
        return first

    def _best_window(self, rows: list[int], size: int) -> int:
        """The window with most of `rows` in it; of equal ones that with the fewest others to push out."""

        def cost(first: int) -> tuple[int, int]:
            window = self._keys[first : first + size]
            return -sum(first <= row < first + size for row in rows), -window.count(None)

        return min(range(len(self._keys) - size + 1), key=cost)

    def _spare_outside(self, window: range) -> int:
        return next(row for row, key in enumerate(self._keys) if key is None and row not in window)

    def _relocate(self, key: int, row: int) -> None:
        self._move(self._row[key], row)
        self._keys[self._row[key]] = None
        self._put(key, row)

    def _put(self, key: int, row: int) -> None:
        self._keys[row] = key
        self._row[key] = row


class ContiguousRows:
    """A contiguous runtime as a `Runtime` with `rows: any`; a span's key stays the same while its row moves.

    The runtime behind it sees segments in the order of their rows, with `span.key` the row.
    """

    rows: Literal["any", "contiguous"] = "any"
    forks = False  # a move copies a whole row

    def __init__(self, runtime: Runtime) -> None:
        self.name = runtime.name
        self.multi_token_batch = runtime.multi_token_batch
        self.vocabulary_size = runtime.vocabulary_size
        self.max_context = runtime.max_context
        self.kv_slots = runtime.kv_slots - runtime.max_context  # the spare row
        self._runtime = runtime
        self._held = Rows(runtime.kv_slots // runtime.max_context, runtime.move)
        self._keys = itertools.count()

    def allocate(self, length: int) -> Span | None:
        if not self._held.free or length > self.max_context:
            return None
        key = next(self._keys)
        self._held.take(key)
        return Span(key, 0, self.max_context)

    def free(self, span: Span) -> None:
        self._held.give(span.key)

    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        self._held.gather([segment.span.key for segment in segments])
        rows = [self._held.row(segment.span.key) for segment in segments]
        order = sorted(range(len(segments)), key=rows.__getitem__)
        top = self._runtime.forward(
            [segments[i]._replace(span=segments[i].span._replace(key=rows[i])) for i in order], width
        )
        if order == list(range(len(segments))):
            return top
        asked = np.cumsum([0] + [segments[i].rows for i in order])
        back = np.concatenate(
            [np.arange(asked[place], asked[place + 1]) for place in np.argsort(order, kind="stable")]
        ).astype(np.int64)
        return Top(top.ids[back], top.logits[back])

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        raise ValueError("rows are moved as a whole, and here alone")

    def move(self, from_row: int, to_row: int) -> None:
        raise ValueError("rows are moved here and nowhere else")
