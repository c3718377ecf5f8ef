"""Which forwards a batch becomes: windows of neighbouring rows, each of a size that the engine was built for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.core.model import Segment


class Profile(NamedTuple):
    """What one optimisation profile of an engine takes at most: rows of a batch, new tokens of each row."""

    rows: int
    tokens: int


class Step(NamedTuple):
    """One forward over rows `first … first + len(pieces)`, each padded to `tokens` tokens.

    profile: index of the optimisation profile. pieces: what each row is given; rows is 0 or 1.
    """

    profile: int
    first: int
    tokens: int
    pieces: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        return len(self.pieces)


def steps_of(segments: Sequence[Segment], profiles: Sequence[Profile], max_context: int) -> list[Step]:
    """The steps for segments of neighbouring rows, in order; `span.key` is the row.

    Short segments share steps. A long one has steps of its own, in chunks: padding a whole batch to its length would
    cost more than its turn. No row is padded beyond `max_context`, where there is nothing to write to.
    """
    shared = max(range(len(profiles)), key=lambda index: profiles[index].rows)
    alone = max(range(len(profiles)), key=lambda index: profiles[index].tokens)
    steps: list[Step] = []
    window: list[Segment] = []

    def close() -> None:
        if window:
            steps.append(_step(shared, profiles[shared], window, max_context))
            window.clear()

    for segment in segments:
        if len(segment.tokens) > profiles[shared].tokens:
            close()
            steps.extend(
                _step(alone, profiles[alone], [piece], max_context)
                for piece in _chunks(segment, profiles[alone].tokens)
            )
            continue
        if len(window) == profiles[shared].rows or not _fits([*window, segment], max_context):
            close()
        window.append(segment)
    close()
    return steps


def _step(index: int, profile: Profile, pieces: Sequence[Segment], max_context: int) -> Step:
    """Lengths are rounded up to a power of two where that fits, so that a few shapes serve all."""
    longest = max(len(piece.tokens) for piece in pieces)
    rounded = min(1 << (longest - 1).bit_length(), profile.tokens)
    fits = all(piece.start + rounded <= max_context for piece in pieces)
    return Step(index, pieces[0].span.key, rounded if fits else longest, tuple(pieces))


def _fits(pieces: Sequence[Segment], max_context: int) -> bool:
    """Whether all rows hold as many new tokens as the longest has."""
    longest = max(len(piece.tokens) for piece in pieces)
    return all(piece.start + longest <= max_context for piece in pieces)


def _chunks(segment: Segment, size: int) -> Iterator[Segment]:
    """A long segment in pieces; only the last one wants its row of logits."""
    for begin in range(0, len(segment.tokens), size):
        tokens = segment.tokens[begin : begin + size]
        last = begin + size >= len(segment.tokens)
        yield segment._replace(start=segment.start + begin, tokens=tokens, rows=segment.rows if last else 0)
