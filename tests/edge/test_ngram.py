"""Prompt lookup: the longest suffix wins, of equal ones the latest, and nothing is looked at twice."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from paceline.edge.strategies.ngram import Index, NGram
from paceline.topology.wire import Status

from .helpers import Bench, item, proposals


def bench_of(**options: int) -> Bench:
    bench = Bench(strategy=NGram(**{"vocabulary_size": 100, "max_context": 1000, **options}))
    bench.up("a", vocabulary_size=100)
    return bench


def propose(tokens: list[int], k: int = 4) -> list[int]:
    (answer,) = bench_of().ask("a", item(1, tokens, k=k))
    assert (answer.status, answer.position) == (Status.OK, len(tokens))
    return proposals(answer)


def test_what_followed_the_same_three_tokens_is_proposed() -> None:
    assert propose([1, 2, 3, 10, 11, 12, 13, 99, 3, 50, 1, 2, 3]) == [10, 11, 12, 13]


def test_a_longer_match_wins_over_a_later_one() -> None:
    assert propose([1, 2, 3, 10, 7, 3, 20, 8, 1, 2, 3], k=1) == [10]


def test_of_equal_matches_the_latest_wins() -> None:
    assert propose([2, 3, 10, 5, 2, 3, 20, 6, 2, 3], k=1) == [20]


def test_without_a_match_nothing_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5]) == []
    assert propose([7]) == []


def test_a_match_that_runs_into_the_end_goes_on_with_itself() -> None:
    assert propose([9, 1, 2, 1, 2], k=6) == [1, 2, 1, 2, 1, 2]
    assert propose([4, 4], k=3) == [4, 4, 4]


def test_rounds_extend_the_index_and_never_rescan() -> None:
    bench = bench_of()
    tokens = [5, 6, 7, 8, 1, 5, 6, 7]
    (answer,) = bench.ask("a", item(1, tokens, k=2))
    assert proposals(answer) == [8, 1]
    tokens += [8, 1, 30]
    (answer,) = bench.ask("a", item(1, tokens, base=8, k=2))
    assert proposals(answer) == []
    session = bench.service.sessions.get("a", 1)
    assert session is not None
    assert session.index.count == len(tokens) - 1
    (answer,) = bench.ask("a", item(1, [*tokens, 8, 1], base=11, k=1))
    assert proposals(answer) == [30]


def test_replaced_tokens_leave_no_trace() -> None:
    bench = bench_of()
    bench.ask("a", item(1, [1, 2, 3, 4, 1, 2]))
    replaced = [1, 2, 3, 9, 8, 7, 1, 2]
    (answer,) = bench.ask("a", item(1, replaced, base=2, k=3))
    assert proposals(answer) == [3, 9, 8]


def test_long_prompts_are_indexed_in_chunks_and_hold_no_memory_after() -> None:
    bench = bench_of()
    prompt = [(i * i) % 97 for i in range(900)]
    (answer,) = bench.ask("a", item(1, prompt))
    assert answer.status == Status.WARMING
    (answer,) = bench.ask("a", item(1, [*prompt, prompt[300]], base=900, k=2))
    assert answer.status == Status.OK
    bench.close("a", 1)
    bench.settle()
    assert len(bench.service.sessions.cache) == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6))
def test_the_index_finds_what_a_search_finds(tokens: list[int], k: int) -> None:
    index, sequence = Index(), array("I", tokens)
    for until in range(0, len(tokens), 7):
        index.extend(sequence, until)
    index.extend(sequence, len(tokens) - 1)
    assert index.find(sequence) == _search(tokens)
    proposed = propose(tokens, k)
    assert len(proposed) in (0, k)
    start = _search(tokens)
    if start is not None:
        grown = list(tokens)
        for place in range(k):
            grown.append(grown[start + place])
        assert proposed == grown[len(tokens) :]


def _search(tokens: list[int]) -> int | None:
    """Where the longest suffix of at most 3 tokens ended last before the end."""
    for n in (3, 2, 1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return end
    return None
