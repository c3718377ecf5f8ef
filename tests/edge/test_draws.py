"""Proposals that are drawn from weights: from exactly those that go along, anew for each committed count."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from paceline.core.rejection import Weights, certain, draw, weights_of
from paceline.core.sampling import History, Sampling, adjust, probabilities
from paceline.edge.strategies.ngram import NGram
from paceline.topology.weights import unpack_weights
from paceline.topology.wire import Drafted, DraftedItem, DraftItem

from .helpers import LANGUAGE, PROMPT, Bench, item, opened, proposals

SAMPLINGS = [
    Sampling(seed=11, temperature=1.0),
    Sampling(seed=12, temperature=1.3, top_p=0.9, top_k=9, min_p=0.01),
    Sampling(seed=13, temperature=0.9, presence_penalty=1.5, repetition_penalty=1.2, logit_bias={7: 2.0}),
]


def drawn(asked: DraftItem) -> DraftItem:
    """The item of a target that verifies by rejection."""
    return msgspec.structs.replace(asked, weights=asked.base == 0)


def ask(bench: Bench, *asked: DraftItem) -> list[tuple[DraftedItem, list[Weights | None]]]:
    """The answers to one Draft, each with what its tokens were drawn from."""
    before = len(bench.sent)
    bench.ask("a", *asked)
    answers = []
    for _, message in bench.sent[before:]:
        assert isinstance(message, Drafted)
        counts = [len(answer.tokens) // 4 for answer in message.items]
        rows = [None] * sum(counts) if message.weights is None else unpack_weights(message.weights, sum(counts))
        for answer, count in zip(message.items, counts, strict=True):
            answers.append((answer, rows[:count]))
            del rows[:count]
    return answers


def by_hand(tokens: Sequence[int], k: int, sampling: Sampling) -> tuple[list[int], list[Weights]]:
    """Draws and weights from the whole rows of the language."""
    drafted: list[int] = []
    rows: list[Weights] = []
    for _ in range(k):
        state = 0
        for token in [*tokens, *drafted]:
            state = LANGUAGE.next_state(state, token)
        row = adjust(LANGUAGE.rows([state])[0], sampling, History(tokens, 4), drafted)
        share = probabilities(row[None, :], [sampling])[0]
        order = np.lexsort((np.arange(len(row)), -row))
        order = order[share[order] > 0]
        rows.append(weights_of(order, share[order]))
        drafted.append(draw(rows[-1], sampling.seed, len(tokens), len(tokens) + len(drafted)))
    return drafted, rows


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"seed{s.seed}")
def test_tokens_are_drawn_from_the_adjusted_distribution_and_its_weights_go_along(sampling: Sampling) -> None:
    """Round after round, with penalties over the committed and drafted tokens up to each position."""
    bench = opened()
    tokens, base = list(PROMPT), 0
    for turn in range(12):
        ((answer, rows),) = ask(bench, drawn(item(1, tokens, base, 4, sampling, prompt_length=4)))
        assert (proposals(answer), rows) == by_hand(tokens, 4, sampling)
        base = len(tokens)
        tokens += [*proposals(answer)[: turn % 5], 7 * turn % 61]


def test_drawn_and_coupled_sessions_in_one_batch_answer_as_they_do_alone() -> None:
    """Neither kind disturbs the other; coupled proposals have no weights, and greedy ones are never drawn."""
    samplings = [*SAMPLINGS, Sampling(seed=3, temperature=0.8), Sampling(temperature=0.0)]
    asked = [item(n, [*PROMPT, n], 0, 3, sampling, prompt_length=4) for n, sampling in enumerate(samplings)]
    mixed = [drawn(one) if n != 3 else one for n, one in enumerate(asked)]
    together = {answer.session: (answer, rows) for answer, rows in ask(opened(), *mixed)}
    for n, one in enumerate(mixed):
        ((answer, rows),) = ask(opened(), one)
        assert together[n] == (answer, rows)
        assert all(row is not None for row in rows) == (n < 3)


def test_what_was_drawn_is_dropped_when_tokens_are_committed() -> None:
    """Also where they are the drawn ones: the next proposals are new draws, keyed by the new count."""
    bench, sampling = opened(), SAMPLINGS[0]
    ((answer, _),) = ask(bench, drawn(item(1, PROMPT, 0, 8, sampling)))
    tokens = [*PROMPT, *proposals(answer)[:3]]
    ((second, rows),) = ask(bench, item(1, tokens, len(PROMPT), 4, sampling))
    assert (proposals(second), rows) == by_hand(tokens, 4, sampling)
    assert proposals(second) != proposals(answer)[3:7]
    computed = bench.model.tokens_computed
    ((third, _),) = ask(bench, item(1, tokens, len(tokens), 4, sampling))
    assert proposals(third) == proposals(second), "the same place: the same draws"
    assert bench.model.tokens_computed == computed


def test_more_of_the_same_place_goes_on_with_the_same_draws() -> None:
    """Asked for two, then for five: the first two stay."""
    bench, sampling = opened(), SAMPLINGS[1]
    ((two, few),) = ask(bench, drawn(item(1, PROMPT, 0, 2, sampling)))
    ((five, many),) = ask(bench, item(1, PROMPT, len(PROMPT), 5, sampling))
    assert proposals(five)[:2] == proposals(two)
    assert many[:2] == few and len(many) == 5


def test_what_the_targets_vocabulary_lacks_has_no_weight() -> None:
    """It is left out before anything is drawn, so that no draw has to be dropped."""
    bench = Bench()
    bench.up("a", vocabulary_size=20)
    sampling = Sampling(seed=5, temperature=9.0)
    for session in range(20):
        ((answer, rows),) = ask(bench, drawn(item(session, [session], 0, 4, sampling)))
        assert len(rows) == 4
        assert all(token < 20 for row in rows for token in row.ids)  # type: ignore[union-attr]
        assert len({len(row.ids) for row in rows}) == 1  # type: ignore[union-attr]
        assert all(token < 20 for token in proposals(answer))


def test_copied_proposals_are_certain() -> None:
    """An ngram drafter's q' is all on the one token that it copies."""
    bench = Bench(strategy=NGram(max_context=512))
    bench.up("a")
    tokens = [5, 6, 7, 8, 5, 6]
    ((answer, rows),) = ask(bench, drawn(item(1, tokens, 0, 3, SAMPLINGS[0])))
    assert proposals(answer) == [7, 8, 5]
    assert rows == [certain(7), certain(8), certain(5)]
    ((plain, nothing),) = ask(bench, item(2, tokens, 0, 3, SAMPLINGS[0]))
    assert proposals(plain) == [7, 8, 5]
    assert nothing == [None] * 3


def test_a_session_may_change_over_when_it_opens_again() -> None:
    """The newest Draft that opens it says whether it draws."""
    bench, sampling = opened(), SAMPLINGS[0]
    for draws in (True, False, True):
        asked = item(1, PROMPT, 0, 4, sampling)
        ((_, rows),) = ask(bench, drawn(asked) if draws else asked)
        assert [row is not None for row in rows] == [draws] * 4
