"""Rows of a graph runtime: neighbours when they are needed, moved as little as it takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from paceline.core.emulated import ToyLanguage
from paceline.core.model import Segment, Span
from paceline.edge.events import Limits
from paceline.edge.rows import ContiguousRows, Rows
from paceline.edge.runtimes.base import TOP, Top, top_of
from paceline.edge.strategies.draft_model import DraftModel

from .helpers import LANGUAGE, Bench, item, proposals, toy_greedy


class FakeGraphRuntime:
    """A fake of a graph runtime: contexts in fixed rows, batches only over neighbouring rows in order."""

    rows: Literal["any", "contiguous"] = "contiguous"

    def __init__(self, count: int, multi_token_batch: bool, language: ToyLanguage = LANGUAGE) -> None:
        self.name = "fake graph"
        self.multi_token_batch = multi_token_batch
        self.vocabulary_size = language.vocabulary_size
        self.max_context = 64
        self.kv_slots = count * self.max_context
        self.moves: list[tuple[int, int]] = []
        self.batches: list[list[int]] = []  # tokens of each row
        self._language = language
        self._states: list[list[int]] = [[0] for _ in range(count)]

    def allocate(self, length: int) -> Span | None:
        raise AssertionError("rows are given out in front of it")

    def free(self, span: Span) -> None:
        raise AssertionError("rows are given out in front of it")

    def forward(self, segments: Sequence[Segment], width: int = TOP) -> Top:
        used = [segment.span.key for segment in segments]
        assert used == list(range(used[0], used[0] + len(used))), f"rows {used} are no neighbours in order"
        sizes = [len(segment.tokens) for segment in segments]
        assert self.multi_token_batch or len(sizes) == 1 or max(sizes) == 1
        self.batches.append(sizes)
        wanted: list[int] = []
        for segment in segments:
            states = self._states[segment.span.key]
            assert segment.start < len(states), "KV is missing"
            del states[segment.start + 1 :]
            for token in segment.tokens:
                states.append(self._language.next_state(states[-1], token))
            if segment.rows:
                wanted.extend(states[-segment.rows :])
        return top_of(self._language.rows(wanted) if wanted else np.zeros((0, self.vocabulary_size)), width)

    def move(self, from_row: int, to_row: int) -> None:
        self.moves.append((from_row, to_row))
        self._states[to_row] = list(self._states[from_row])
        self._states[from_row] = [0, 1, 2, 3]  # what is left behind is worth nothing


def test_rows_that_are_neighbours_are_not_moved() -> None:
    moves: list[tuple[int, int]] = []
    rows = Rows(6, lambda source, to: moves.append((source, to)))
    for key in (10, 11, 12, 13):
        rows.take(key)
    assert rows.gather([12, 11]) == 1
    assert moves == []


def test_a_stray_row_takes_a_free_place_with_one_move() -> None:
    moves: list[tuple[int, int]] = []
    rows = Rows(6, lambda source, to: moves.append((source, to)))
    for key in (10, 11, 12, 13):
        rows.take(key)
    rows.give(11)
    assert rows.gather([10, 13]) == 0
    assert moves == [(3, 1)]


def test_an_occupied_place_costs_two_moves() -> None:
    moves: list[tuple[int, int]] = []
    rows = Rows(6, lambda source, to: moves.append((source, to)))
    for key in (10, 11, 12, 13):
        rows.take(key)
    rows.gather([10, 12])
    assert len(moves) <= 2
    assert abs(rows.row(10) - rows.row(12)) == 1


def test_one_row_always_stays_free() -> None:
    rows = Rows(3, lambda source, to: None)
    assert rows.free == 2
    rows.take(1)
    rows.take(2)
    assert rows.free == 0
    with pytest.raises(ValueError, match="at least 2"):
        Rows(1, lambda source, to: None)


def test_whatever_is_gathered_every_key_keeps_its_own_row() -> None:
    draw = random.Random(2)
    content: list[int | None] = [None] * 9

    def move(source: int, to: int) -> None:
        content[to], content[source] = content[source], None

    rows = Rows(9, move)
    held: list[int] = []
    for step in range(2000):
        if rows.free and draw.random() < 0.4:
            content[rows.take(step)] = step
            held.append(step)
        elif held and draw.random() < 0.3:
            gone = held.pop(draw.randrange(len(held)))
            content[rows.row(gone)] = None
            rows.give(gone)
        elif held:
            chosen = draw.sample(held, draw.randrange(1, len(held) + 1))
            first = rows.gather(chosen)
            assert sorted(rows.row(key) for key in chosen) == list(range(first, first + len(chosen)))
        assert all(content[rows.row(key)] == key for key in held)


@pytest.mark.parametrize("multi_token_batch", [True, False])
def test_the_service_drafts_the_same_over_contiguous_rows(multi_token_batch: bool) -> None:
    """Sessions come and go and batches change, with and without several tokens a session in one step."""
    runtime = FakeGraphRuntime(7, multi_token_batch)
    bench = Bench(Limits(max_batch=3, max_sessions=6), strategy=DraftModel(runtime))
    bench.up("a")
    draw = random.Random(3)
    live: dict[int, list[int]] = {}
    held: dict[int, int] = {}
    for session in range(120):
        if len(live) < 5:
            live[session], held[session] = [draw.randrange(61) for _ in range(draw.randrange(1, 20))], 0
        chosen = draw.sample(sorted(live), draw.randrange(1, len(live) + 1))
        k = {number: draw.randrange(1, 5) for number in chosen}
        answers = bench.ask("a", *[item(number, live[number], base=held[number], k=k[number]) for number in chosen])
        assert {answer.session for answer in answers} == set(chosen)
        for answer in answers:
            tokens = live[answer.session]
            assert proposals(answer) == toy_greedy(tokens, k[answer.session])
            held[answer.session] = len(tokens)
            tokens += [*proposals(answer)[: draw.randrange(5)], draw.randrange(61)]
            if len(tokens) > 50 or draw.random() < 0.1:
                bench.close("a", answer.session)
                del live[answer.session]
    assert runtime.moves


def test_after_full_acceptance_a_one_token_runtime_takes_one_step_more() -> None:
    runtime = FakeGraphRuntime(4, multi_token_batch=False)
    bench = Bench(strategy=DraftModel(runtime))
    bench.up("a")
    bench.ask("a", item(1, [1]), item(2, [2]))
    runtime.batches.clear()
    tokens = {number: [number, *toy_greedy([number], 5)] for number in (1, 2)}
    answers = bench.ask("a", *[item(number, tokens[number], base=1) for number in (1, 2)])
    assert {a.session: proposals(a) for a in answers} == {n: toy_greedy(tokens[n], 4) for n in (1, 2)}
    assert runtime.batches == [[1, 1]] * 5


def test_there_is_one_session_less_than_rows() -> None:
    rows = ContiguousRows(FakeGraphRuntime(3, True))
    spans = [rows.allocate(10), rows.allocate(64)]
    assert None not in spans
    assert rows.allocate(1) is None
    assert rows.allocate(65) is None
    rows.free(spans[0])  # type: ignore[arg-type]
    assert rows.allocate(1) is not None
