"""Batches become steps that an engine takes: whatever is asked for, every token goes to its place once, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.model import Segment, Span
from paceline.edge.runtimes.tensorrt_steps import Profile, steps_of

CONTEXT = 64


@st.composite
def batches(draw: st.DrawFn) -> list[Segment]:
    """Segments of neighbouring rows, each within the context."""
    first = draw(st.integers(0, 3))
    segments = []
    for row in range(first, first + draw(st.integers(1, 9))):
        start = draw(st.integers(0, CONTEXT - 1))
        count = draw(st.integers(1, CONTEXT - start))
        tokens = [1000 * row + position for position in range(start, start + count)]
        segments.append(Segment(Span(row, 0, CONTEXT), start, tokens, draw(st.integers(0, 1))))
    return segments


@given(batches(), st.integers(1, 6), st.integers(1, 9), st.integers(9, 40))
def test_every_token_goes_to_its_place_once(segments: list[Segment], rows: int, tokens: int, chunk: int) -> None:
    profiles = (Profile(rows, tokens), Profile(1, chunk))
    steps = steps_of(segments, profiles, CONTEXT)
    written: dict[int, list[int]] = {}
    asked: list[int] = []
    for step in steps:
        most = profiles[step.profile]
        assert 1 <= step.rows <= most.rows and 1 <= step.tokens <= most.tokens
        for index, piece in enumerate(step.pieces):
            assert piece.span.key == step.first + index  # a window of neighbours
            assert len(piece.tokens) <= step.tokens and piece.start + step.tokens <= CONTEXT  # padding, too
            assert all(token == 1000 * piece.span.key + piece.start + i for i, token in enumerate(piece.tokens))
            written.setdefault(piece.span.key, []).extend(piece.tokens)
            asked += [piece.tokens[-1]] * piece.rows
    assert written == {segment.span.key: list(segment.tokens) for segment in segments}
    assert asked == [segment.tokens[-1] for segment in segments if segment.rows]


def test_a_batch_of_single_tokens_is_one_step() -> None:
    segments = [Segment(Span(row, 0, CONTEXT), 10 * row, [row], 1) for row in range(4)]
    (step,) = steps_of(segments, (Profile(4, 8), Profile(1, 32)), CONTEXT)
    assert (step.profile, step.first, step.rows, step.tokens) == (0, 0, 4, 1)
