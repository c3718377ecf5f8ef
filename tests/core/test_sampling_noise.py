"""Noise is the same everywhere and uniform, and what is drawn with it follows the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from paceline.core import sampling as rule
from paceline.core.sampling import Sampling, accepted, choose

from .helpers import MASK, reference_hash, reference_support, reference_uniform

SEEDS = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0xDEADBEEF]
POSITIONS = [0, 1, 4095, 2**31 - 1]
IDS = [0, 1, 2, 257, 151_936, 2**31 - 1, 2**32 - 1]


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
