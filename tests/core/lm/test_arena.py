"""The span allocator of the KV arena."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.core.lm.arena import PAGE, Arena
from paceline.core.model import Span

SLOTS = 16 * PAGE


def _arena(slots: int = SLOTS) -> Arena:
    return Arena(layers=1, slots=slots, kv_heads=1, head_dim=2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE), st.integers(0, 99)), max_size=60))
def test_spans_never_overlap_and_all_space_comes_back(steps: list[tuple[bool, int, int]]) -> None:
    """Whatever is allocated and freed: spans are aligned, large enough and apart, and in the end all space is back."""
    arena = _arena()
    held: list[Span] = []
    for take, length, which in steps:
        if take:
            span = arena.allocate(length)
            if span is None:
                continue
            assert span.first % PAGE == 0 and span.size % PAGE == 0 and length <= span.size < length + PAGE
            assert span.first + span.size <= SLOTS
            assert all(
                span.first + span.size <= other.first or other.first + other.size <= span.first for other in held
            )
            held.append(span)
        elif held:
            arena.free(held.pop(which % len(held)))
        assert arena.free_slots == SLOTS - sum(span.size for span in held)
    for span in held:
        arena.free(span)
    whole = arena.allocate(SLOTS)
    assert whole is not None and (whole.first, whole.size) == (0, SLOTS)


def test_first_fit_takes_the_lowest_hole() -> None:
    """A freed span at the front is used again before the space behind."""
    arena = _arena()
    first, second = arena.allocate(300), arena.allocate(300)
    assert first and second and second.first == 2 * PAGE
    arena.free(first)
    again = arena.allocate(10)
    assert again and again.first == 0 and again.key != first.key


def test_no_room_now_is_none_and_no_room_ever_is_an_error_with_the_arithmetic() -> None:
    """A full arena answers None; a session larger than the arena raises and shows why."""
    arena = _arena()
    assert arena.allocate(SLOTS) is not None
    assert arena.allocate(1) is None
    with pytest.raises(UserError, match=rf"{SLOTS + 1} tokens needs {SLOTS + PAGE} KV slots × 16 bytes"):
        arena.allocate(SLOTS + 1)


def test_a_budget_below_one_page_is_refused() -> None:
    """An arena too small for any session says so at start."""
    with pytest.raises(UserError, match="raise kv_memory"):
        _arena(PAGE - 1)


def test_memory_that_the_machine_lacks_is_refused_with_the_arithmetic() -> None:
    """More memory than can be addressed is the user's error, not a traceback."""
    with pytest.raises(UserError, match=r"no room for the KV memory of 2305843009213693952 tokens × 16 bytes"):
        _arena(2**61)


def test_a_span_is_freed_once() -> None:
    """Freeing twice is a bug of the caller's and raises."""
    arena = _arena()
    span = arena.allocate(5)
    assert span
    arena.free(span)
    with pytest.raises(ValueError, match="not held"):
        arena.free(span)
