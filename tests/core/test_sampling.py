"""Filters, penalties, choice and acceptance, against a plain reference, in numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import special

from paceline.core import sampling as rule
from paceline.core.sampling import History, Sampling, accepted, adjust, adjust_values, choose

from .helpers import reference_adjusted, reference_choice


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_ties_go_to_the_lowest_id(library: str) -> None:
    """Equal logits: greedy takes the lowest id, and top-k keeps the lowest ids."""
    row = np.array([[1.0, 3.0, 3.0, 2.0, 3.0]])
    rows = torch.from_numpy(row) if library == "torch" else row
    assert choose(rows, [Sampling(temperature=0)], [0]).tolist() == [1]
    for seed in range(50):
        assert choose(rows, [Sampling(seed=seed, top_k=1)], [seed]).tolist() == [1]
    kept = {int(choose(rows, [Sampling(seed=seed, top_k=2)], [0])[0]) for seed in range(200)}
    assert kept == {1, 2}
    wide = np.zeros((1, 1000))
    wide_rows = torch.from_numpy(wide) if library == "torch" else wide
    kept = {int(choose(wide_rows, [Sampling(seed=seed, top_k=3)], [0])[0]) for seed in range(200)}
    assert kept == {0, 1, 2}


VOCABULARY = 12
_logits = st.lists(
    st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, 1.0, -1.0, 2.5])),
    min_size=VOCABULARY,
    max_size=VOCABULARY,
)
_tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
_samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.8]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.11]),
    top_k=st.sampled_from([0, 1, 2, 5, 40]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5, width=32), max_size=3),
)


@settings(max_examples=400, deadline=None)
@given(_logits, _samplings, _tokens, _tokens, _tokens, st.integers(0, 2**31 - 1))
def test_order_of_steps_equals_a_plain_sampler(
    logits: list[float], s: Sampling, prompt: list[int], output: list[int], drafted: list[int], position: int
) -> None:
    """Bias, penalties, temperature, min-p, top-k, top-p in this order, over committed and drafted tokens."""
    values = reference_adjusted(logits, s, prompt, [*output, *drafted])
    expected, margin = reference_choice(values, s, position)
    assume(margin > 1e-9)
    row = np.array(logits)
    history = History([*prompt, *output], len(prompt))
    ours = adjust(row, s, history, drafted)
    assert row.tolist() == logits
    assert ours.tolist() == pytest.approx(values, abs=1e-12)
    theirs = adjust(torch.tensor(logits, dtype=torch.float64), s, history, drafted)
    assert theirs.tolist() == ours.tolist()
    ranked = sorted(ours.tolist())
    assume(s.temperature > 0 or ranked[-1] - ranked[-2] > 1e-9 or ranked[-1] == ranked[-2] == max(values))
    assert choose(ours[None, :], [s], [position]).tolist() == [expected]
    assert choose(theirs[None, :], [s], [position]).tolist() == [expected]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(_logits, _samplings, st.integers(0, 10_000)), min_size=1, max_size=8))
def test_a_row_does_not_depend_on_its_batch(rows: list[tuple[list[float], Sampling, int]]) -> None:
    """Greedy, filtered and plain rows together give what each gives alone, in numpy and torch."""
    logits = np.array([row for row, _, _ in rows])
    samplings, positions = [s for _, s, _ in rows], [p for _, _, p in rows]
    alone = [int(choose(logits[i : i + 1], [samplings[i]], [positions[i]])[0]) for i in range(len(rows))]
    assert choose(logits, samplings, positions).tolist() == alone
    assert choose(torch.from_numpy(logits), samplings, positions).tolist() == alone


def test_numpy_and_torch_choose_alike_over_a_wide_vocabulary() -> None:
    """2 000 rows of 3 000 logits, all kinds of sampling: the same tokens from both libraries."""
    random = np.random.default_rng(1)
    logits = random.normal(0, 3, (2000, 3000))
    kinds = [{}, {"temperature": 0.0}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05, "temperature": 0.6}]
    samplings = [Sampling(seed=int(random.integers(2**63)), **kinds[i % len(kinds)]) for i in range(2000)]
    positions = random.integers(0, 2**31, 2000).tolist()
    ours = choose(logits, samplings, positions)
    assert np.array_equal(ours, choose(torch.from_numpy(logits), samplings, positions).numpy())
    assert len(set(ours.tolist())) > 500


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(_logits, _samplings, st.integers(0, 10_000)), min_size=1, max_size=5), st.integers(2, 6))
def test_candidates_equal_the_vocabulary_when_they_hold_the_support(
    rows: list[tuple[list[float], Sampling, int]], held: int
) -> None:
    """A drafter that samples from its likeliest candidates alone chooses as from the whole row."""
    logits = np.array([row for row, _, _ in rows])
    ids = np.sort((-logits).argsort(-1, kind="stable")[:, :held], -1)
    candidates = np.take_along_axis(logits, ids, -1)
    whole = np.full_like(logits, -np.inf)
    np.put_along_axis(whole, ids, candidates, -1)
    samplings, positions = [s for _, s, _ in rows], [p for _, _, p in rows]
    expected = choose(whole, samplings, positions).tolist()
    assert choose(candidates, samplings, positions, ids).tolist() == expected
    both = choose(torch.from_numpy(candidates), samplings, positions, torch.from_numpy(ids))
    assert both.tolist() == expected
    cut = [Sampling(seed=s.seed, temperature=1.0, top_k=held, top_p=s.top_p) for s in samplings]
    assert choose(candidates, cut, positions, ids).tolist() == choose(logits, cut, positions).tolist()


def test_penalties_see_committed_and_drafted_tokens() -> None:
    """Presence and frequency count output and draft, repetition also the prompt; what the prompt alone holds stays."""
    row = np.array([2.0, 2.0, 2.0, 2.0, -2.0])
    history = History([0, 1, 1, 4], prompt_length=1)
    s = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    assert adjust(row, s, history, [2, 1]).tolist() == [1.0, 1.0 - 0.5 - 0.75, 1.0 - 0.75, 2.0, -4.0 - 0.75]
    assert adjust(row, s, history).tolist() == [1.0, 1.0 - 0.5 - 0.5, 2.0, 2.0, -4.0 - 0.75]
    history.extend([3])
    assert adjust(row, s, history).tolist()[3] == 1.0 - 0.75
    assert adjust_values(row[[1, 3]], [1, 3], s, history, [3]).tolist() == [0.0, 1.0 - 0.5 - 0.5]


def test_ids_outside_the_row_are_ignored_by_bias_and_penalties() -> None:
    """A bias or a drafted id past the row's width changes nothing and raises nothing."""
    row = np.array([0.0, 1.0])
    s = Sampling(logit_bias={5: 3.0, 1: -2.0}, repetition_penalty=1.5)
    assert adjust(row, s, History([9], 0), [77]).tolist() == [0.0, -1.0]


def test_accepted_counts_the_agreeing_prefix() -> None:
    """Acceptance ends at the first difference, also when later tokens agree again."""
    assert accepted([1, 2, 3], [1, 2]) == 2
    assert accepted([1, 2, 3], [9, 2]) == 0
    assert accepted([1, 2, 3], [1, 9]) == 1
    assert accepted([4], []) == 0


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_log_probabilities_equal_log_softmax(library: str) -> None:
    """The chosen token's and the top tokens' values are scipy's log_softmax, ties by id."""
    row = np.random.default_rng(5).normal(0, 4, 300)
    row[[7, 200]] = row.max() + 1.0
    expected = special.log_softmax(row)
    value, top = rule.log_probabilities(torch.from_numpy(row) if library == "torch" else row, 42, 5)
    assert value == pytest.approx(expected[42], abs=1e-12)
    assert [token for token, _ in top] == np.argsort(-row, kind="stable")[:5].tolist()
    assert [token for token, _ in top][:2] == [7, 200]
    assert [p for _, p in top] == pytest.approx(expected[[token for token, _ in top]].tolist(), abs=1e-12)
    assert rule.log_probabilities(row, 42, 0)[1] == []
