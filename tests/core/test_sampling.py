"""The rule: noise, filters, penalties and the round loop, against plain references."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import special, stats

from paceline.core import sampling as rule
from paceline.core.sampling import History, Sampling, accepted, adjust, adjust_values, choose

MASK = (1 << 64) - 1
SEEDS = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0xDEADBEEF]
POSITIONS = [0, 1, 4095, 2**31 - 1]
IDS = [0, 1, 2, 257, 151_936, 2**31 - 1, 2**32 - 1]


# --- a plain reference, in Python's own integers and floats ----------------------------------------


def reference_mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def reference_hash(seed: int, position: int, token: int) -> int:
    key = reference_mix(
        reference_mix((seed + 0x9E3779B97F4A7C15) & MASK) ^ ((position + 1) * 0x9E3779B97F4A7C15 & MASK)
    )
    return reference_mix((key + (token + 1) * 0x9E3779B97F4A7C15) & MASK)


def reference_uniform(seed: int, position: int, token: int) -> float:
    return (reference_hash(seed, position, token) >> 12) * 2.0**-52 + 2.0**-53


def reference_adjusted(
    logits: Sequence[float], s: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Bias first, then repetition over all tokens, then frequency and presence over the output."""
    values = [value + s.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    counts = Counter(output)
    for token in {*prompt, *output}:
        value = values[token]
        values[token] = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
    for token, count in counts.items():
        values[token] -= s.frequency_penalty * count + s.presence_penalty
    return values


def reference_support(values: Sequence[float], s: Sampling) -> tuple[dict[int, float], float]:
    """Scaled logits of what temperature, min-p, top-k and top-p leave, and how far the nearest cut-off is."""
    scaled = sorted(((-value / s.temperature, token) for token, value in enumerate(values)))
    best = -scaled[0][0]
    margin = math.inf
    kept = []
    for negative, token in scaled:
        if s.min_p > 0:
            threshold = best + math.log(s.min_p)
            margin = min(margin, abs(-negative - threshold))
            if -negative < threshold:
                continue
        kept.append((token, -negative))
    if s.top_k > 0:
        kept = kept[: s.top_k]
    if s.top_p < 1:
        total = math.fsum(math.exp(value - best) for _, value in kept)
        before, short = 0.0, []
        for token, value in kept:
            margin = min(margin, abs(before / total - s.top_p))
            if short and before >= s.top_p * total:
                break
            short.append((token, value))
            before += math.exp(value - best)
        kept = short
    return dict(kept), margin


def reference_choice(values: Sequence[float], s: Sampling, position: int) -> tuple[int, float]:
    """The token, and the smaller of the margins that rounding could decide."""
    if s.temperature == 0:
        return min(range(len(values)), key=lambda token: (-values[token], token)), math.inf
    support, margin = reference_support(values, s)
    noisy = sorted(
        (
            (value - math.log(-math.log(reference_uniform(s.seed, position, token))), token)
            for token, value in support.items()
        ),
        reverse=True,
    )
    if len(noisy) > 1:
        margin = min(margin, noisy[0][0] - noisy[1][0])
    return noisy[0][1], margin


# --- noise -----------------------------------------------------------------------------------------


def _keys_and_ids() -> tuple[np.ndarray, np.ndarray]:
    keys = [rule.row_key(seed, position) for seed in SEEDS for position in POSITIONS]
    return np.array(keys, np.int64)[:, None], np.array(IDS, np.int64)[None, :]


def test_hashes_equal_plain_integers_in_numpy_and_torch() -> None:
    """The hash is the same u64 in numpy, torch and Python's integers, at the extremes too."""
    keys, ids = _keys_and_ids()
    ours = rule.token_hash(keys, ids)
    theirs = rule.token_hash(torch.from_numpy(keys), torch.from_numpy(ids))
    assert np.array_equal(ours, theirs.numpy())
    expected = [[reference_hash(seed, position, token) for token in IDS] for seed in SEEDS for position in POSITIONS]
    assert (ours.view(np.uint64) == np.array(expected, np.uint64)).all()


def test_uniforms_are_bit_equal_and_gumbels_agree() -> None:
    """Uniforms are the same bits in numpy, torch and plain Python; Gumbel noise agrees to 1e-12."""
    keys, ids = _keys_and_ids()
    ours, theirs = rule.uniform(keys, ids), rule.uniform(torch.from_numpy(keys), torch.from_numpy(ids)).numpy()
    assert ours.dtype == theirs.dtype == np.float64
    assert np.array_equal(ours.view(np.int64), theirs.view(np.int64))
    expected = [[reference_uniform(seed, position, token) for token in IDS] for seed in SEEDS for position in POSITIONS]
    assert ours.tolist() == expected
    wide = np.arange(50_000)[None, :]
    noise = rule.gumbel(keys, wide)
    assert np.abs(noise - rule.gumbel(torch.from_numpy(keys), torch.from_numpy(wide)).numpy()).max() < 1e-12
    assert np.isfinite(noise).all()


def _unmixed(value: int) -> int:
    """The inverse of splitmix64's finalizer."""

    def unshift(value: int, by: int) -> int:
        result = value
        for _ in range(64 // by + 1):
            result = value ^ (result >> by)
        return result

    value = unshift(value, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    value = unshift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return unshift(value, 30)


@pytest.mark.parametrize(("hashed", "expected"), [(0, 2.0**-53), (MASK, 1 - 2.0**-53)])
def test_uniform_is_never_zero_or_one(hashed: int, expected: float) -> None:
    """The smallest and the largest hash there are still give finite noise."""
    key = np.array([[rule.signed((_unmixed(hashed) - 0x9E3779B97F4A7C15) & MASK)]])
    ids = np.zeros((1, 1), np.int64)
    assert int(rule.token_hash(key, ids)[0, 0]) & MASK == hashed
    for keys, columns in ((key, ids), (torch.from_numpy(key), torch.from_numpy(ids))):
        assert float(rule.uniform(keys, columns)[0, 0]) == expected
        assert math.isfinite(float(rule.gumbel(keys, columns)[0, 0]))


def test_noise_is_uniform_and_independent() -> None:
    """Neighbouring seeds, positions and ids share nothing: 200 000 values each, uniform and uncorrelated."""
    count = 200_000
    base = rule.uniform(np.array([[rule.row_key(7, 11)]]), np.arange(count + 1)[None, :])[0]
    assert stats.kstest(base, "uniform").pvalue > 1e-3
    others = [
        base[1:],
        rule.uniform(np.array([[rule.row_key(8, 11)]]), np.arange(count)[None, :])[0],
        rule.uniform(np.array([[rule.row_key(7, 12)]]), np.arange(count)[None, :])[0],
    ]
    for other in others:
        assert abs(np.corrcoef(base[:count], other)[0, 1]) < 4.5 / math.sqrt(count)
    along = rule.uniform(np.array([[rule.row_key(3, position)] for position in range(20_000)]), np.array([[5]]))[:, 0]
    assert stats.kstest(along, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 4.5 / math.sqrt(20_000)


def test_choice_seeds_are_distinct_and_pure() -> None:
    """Choice i of n has its own u64 seed for every request seed, the same each time."""
    seeds = {rule.choice_seed(seed, index) for seed in [*SEEDS, *range(1000, 2000)] for index in range(16)}
    assert len(seeds) == (len(SEEDS) + 1000) * 16
    assert all(0 <= seed <= MASK for seed in seeds)
    assert rule.choice_seed(2**64 - 1, 3) == rule.choice_seed(2**64 - 1, 3)


# --- choosing --------------------------------------------------------------------------------------


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


# --- the distribution ------------------------------------------------------------------------------

ROW = [1.2, 0.3, -0.7, 2.0, 2.0, 0.0, -3.0, 1.1]
DISTRIBUTIONS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=1.7),
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=0.8, top_p=0.8),
    Sampling(temperature=1.2, min_p=0.2),
    Sampling(temperature=1.5, min_p=0.05, top_k=6, top_p=0.9),
]


@pytest.mark.parametrize("s", DISTRIBUTIONS, ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}-min{s.min_p}")
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_plain_sampler_follows_p(s: Sampling, vary: str) -> None:
    """10⁵ draws over seeds, and over positions of one seed, follow the filtered softmax (chi-square)."""
    draws = 100_000
    support, _ = reference_support(ROW, s)
    probabilities = special.softmax(list(support.values()))
    if vary == "seed":
        fields = {name: getattr(s, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        samplings, positions = [Sampling(seed=seed, **fields) for seed in range(draws)], [17] * draws
    else:
        samplings, positions = [s] * draws, list(range(draws))
    tokens = choose(np.tile(np.array(ROW), (draws, 1)), samplings, positions)
    counts = np.bincount(tokens, minlength=len(ROW))
    assert set(np.flatnonzero(counts)) <= set(support)
    observed = counts[list(support)]
    assert observed.sum() == draws
    if len(support) > 1:
        assert stats.chisquare(observed, probabilities * draws).pvalue > 1e-3


@pytest.mark.parametrize(("drafter", "lowest", "highest"), [("bad", 0.0, 0.45), ("good", 0.55, 0.98)])
def test_round_loop_equals_the_plain_sampler(drafter: str, lowest: float, highest: float) -> None:
    """For 10⁵ seeds, drafting k random tokens and keeping those that equal the target's own changes no token."""
    seeds, length, width = 100_000, 4, 8
    random = np.random.default_rng(3)
    target = random.normal(0, 1.5, (width, width))
    guess = target + random.normal(0, 0.3, target.shape) if drafter == "good" else random.normal(0, 1.5, target.shape)
    samplings = [Sampling(seed=int(seed)) for seed in random.integers(0, 2**63, seeds)]

    def next_tokens(table: np.ndarray, last: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return choose(table[last], [samplings[row] for row in rows], positions.tolist())

    everyone = np.arange(seeds)
    plain = np.zeros((seeds, length + 1), np.int64)
    for position in range(1, length + 1):
        plain[:, position] = next_tokens(target, plain[:, position - 1], everyone, np.full(seeds, position))

    texts = np.zeros((seeds, length + 5), np.int64)
    lengths = np.ones(seeds, np.int64)  # the prompt is token 0
    drafted = kept = 0
    while (open_rows := np.flatnonzero(lengths <= length)).size:
        k = random.integers(0, 4, open_rows.size)
        drafts = np.zeros((open_rows.size, 4), np.int64)
        drafts[:, 0] = texts[open_rows, lengths[open_rows] - 1]  # the last committed token leads its row
        for j in range(1, 4):
            some = np.flatnonzero(k >= j)
            rows = open_rows[some]
            drafts[some, j] = next_tokens(guess, drafts[some, j - 1], rows, lengths[rows] + j - 1)
        own = np.full((open_rows.size, 4), -1, np.int64)
        for j in range(4):
            some = np.flatnonzero(k >= j)
            rows = open_rows[some]
            own[some, j] = next_tokens(target, drafts[some, j], rows, lengths[rows] + j)
        for row, count, draft, chosen in zip(open_rows, k, drafts.tolist(), own.tolist(), strict=True):
            agreed = accepted(chosen, draft[1 : count + 1])
            drafted, kept = drafted + count, kept + agreed
            emitted = chosen[: agreed + 1]
            texts[row, lengths[row] : lengths[row] + len(emitted)] = emitted
            lengths[row] += len(emitted)
    assert np.array_equal(texts[:, : length + 1], plain)
    assert lowest < kept / drafted < highest


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
