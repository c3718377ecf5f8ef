"""Rejection verification: enumerated in rational arithmetic, then with its keyed noise by chi-square."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceline.core import rejection
from paceline.core.rejection import Block, Weights, accept, certain, draw, residual, verify_blocks, weights_of
from paceline.core.sampling import Sampling, choose, probabilities, row_key, stream_key

VOCABULARY = 3
Text = tuple[int, ...]
StopsBefore = Callable[[Text, Weights], bool]  # (committed and drafted tokens, q' of the next one) → it isn't verified


class Models:
    """A target and a drafter over three tokens: rational rows by what came before, made up as they are asked for."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._p: dict[Text, list[Fraction]] = {}
        self._q: dict[Text, Weights] = {}

    def p(self, text: Text) -> list[Fraction]:
        if text not in self._p:
            weights = [self._random.choice([0, 1, 1, 2, 5]) for _ in range(VOCABULARY)]
            weights[self._random.randrange(VOCABULARY)] += 1
            self._p[text] = [Fraction(weight, sum(weights)) for weight in weights]
        return self._p[text]

    def q(self, text: Text) -> Weights:
        if text not in self._q:
            ids = sorted(self._random.sample(range(VOCABULARY), self._random.randint(1, VOCABULARY)))
            self._q[text] = Weights(ids, [self._random.randint(1, 4) for _ in ids])
        return self._q[text]


def shares(weights: Weights) -> list[Fraction]:
    return [Fraction(weight, sum(weights.weights)) for weight in weights.weights]


def drafts(models: Models, text: Text, k: int, stops_before: StopsBefore) -> Iterator[tuple[Fraction, Text]]:
    """Every draft of at most k tokens after `text` with its probability."""
    weights = models.q(text)
    if k == 0 or stops_before(text, weights):
        yield Fraction(1), ()
        return
    for token, share in zip(weights.ids, shares(weights), strict=True):
        for probability, rest in drafts(models, (*text, token), k - 1, stops_before):
            yield share * probability, (token, *rest)


def outcomes(models: Models, text: Text, draft: Text) -> Iterator[tuple[Fraction, Text]]:
    """Everything that a round may emit for one draft, with its probability: each coin falls either way."""
    steps = [text + draft[:count] for count in range(len(draft) + 1)]
    weights = [models.q(step) for step in steps[:-1]]
    p = [[models.p(step)[token] for token in w.ids] for step, w in zip(steps, weights, strict=False)]
    drawn = [w.ids.index(token) for w, token in zip(weights, draft, strict=True)]
    for chosen in range(len(draft) + 1):
        weight, scale = Fraction(1), Fraction(1)
        if draft:
            coins: list[Fraction] = []

            def coin(count: int, probability: Fraction, chosen: int = chosen, coins: list[Fraction] = coins) -> bool:
                coins.append(probability if count == chosen else 1 - probability)
                return count == chosen

            accepted, scale = accept(p, [shares(w) for w in weights], drawn, coin)
            assert accepted == chosen
            assert all(0 <= probability <= 1 for probability in coins)
            for probability in coins:
                weight *= probability
        if not weight:
            continue
        row = np.array([models.p(steps[chosen])], dtype=object)
        left = rational_residual(row, scale, None if chosen == len(draft) else weights[chosen])
        for token in range(VOCABULARY):
            yield weight * left[token] / sum(left), (*draft[:chosen], token)


def rational_residual(row: np.ndarray, scale: Fraction, weights: Weights | None) -> list[Fraction]:
    class Exact(Weights):
        """The same weights with rational shares."""

        @property
        def shares(self) -> list[Fraction]:  # type: ignore[override]
            return shares(self)

    left: list[Fraction] = residual(row, scale, [Exact(*weights) if weights else None])[0].tolist()
    return left


def decoded(models: Models, length: int, k: int, stops_before: StopsBefore, stop: int | None) -> dict[Text, Fraction]:
    """The distribution of texts of `length` tokens (or up to a stop token), decoded round by round."""
    texts: dict[Text, Fraction] = {(): Fraction(1)}
    ended: Counter[Text] = Counter()
    while texts:
        text, probability = texts.popitem()
        budget = min(k, length - len(text) - 1)  # the round's last token needs no draft
        for drafted, draft in drafts(models, text, budget, stops_before):
            for weight, emitted in outcomes(models, text, draft):
                after = text + emitted
                if stop in emitted:
                    after = after[: after.index(stop) + 1]
                into = ended if len(after) == length or stop in emitted else texts
                into[after] = into.get(after, Fraction(0)) + probability * drafted * weight
    return dict(ended)


def plainly(models: Models, length: int, stop: int | None, text: Text = ()) -> dict[Text, Fraction]:
    """The same by the target alone."""
    if len(text) == length or (stop is not None and stop in text):
        return {text: Fraction(1)}
    whole: dict[Text, Fraction] = {}
    for token, probability in enumerate(models.p(text)):
        for after, rest in plainly(models, length, stop, (*text, token)).items():
            whole[after] = probability * rest
    return {after: probability for after, probability in whole.items() if probability}


STOPS: dict[str, StopsBefore] = {
    "never": lambda text, weights: False,
    "by the tokens before": lambda text, weights: len(text) > 0 and sum(text) % 3 == 1,
    "by the weights": lambda text, weights: max(shares(weights)) < Fraction(1, 2),
    "by both": lambda text, weights: text[-1:] == (2,) and len(weights.ids) > 1,
}


@pytest.mark.parametrize("why", STOPS)
@pytest.mark.parametrize("seed", range(6))
def test_the_round_loop_decodes_exactly_the_targets_distribution(seed: int, why: str) -> None:
    """All drafts, coins and last tokens enumerated: texts of four tokens have the target's probabilities, to the digit,
    whatever the drafter's weights, wherever a draft ends early, and with a stop token."""
    models = Models(seed)
    for k, stop in ((1, None), (2, 1), (3, None)):
        texts = {text: p for text, p in decoded(models, 4, k, STOPS[why], stop).items() if p}
        assert texts == plainly(models, 4, stop)


def test_ending_a_draft_by_the_token_drawn_would_bias_the_text() -> None:
    """What the rule forbids shows at once: dropping a draft because of the token that was drawn at its place."""
    models = Models(1)
    picky: Counter[Text] = Counter()
    for drafted, draft in drafts(models, (), 1, STOPS["never"]):
        for weight, emitted in outcomes(models, (), () if draft == (models.q(()).ids[0],) else draft):
            picky[emitted[:1]] += drafted * weight
    assert dict(picky) != plainly(models, 1, None)


@pytest.mark.parametrize("seed", range(8))
def test_one_draft_token_is_accepted_as_often_as_any_rule_can(seed: int) -> None:
    """With k = 1 the acceptance is Σ min(p, q'), exactly."""
    models = Models(seed)
    accepted = Fraction(0)
    for drafted, draft in drafts(models, (), 1, STOPS["never"]):
        accepted += sum(drafted * weight for weight, emitted in outcomes(models, (), draft) if len(emitted) == 2)
    q = dict(zip(models.q(()).ids, shares(models.q(())), strict=True))
    assert accepted == sum(min(p, q.get(token, Fraction(0))) for token, p in enumerate(models.p(())))


@pytest.mark.parametrize("seed", range(8))
def test_blocks_accept_at_least_as_much_as_deciding_token_by_token(seed: int) -> None:
    """The expected accepted length of a block is not below that of one token after the other."""
    models = Models(seed)
    block = by_token = Fraction(0)
    for drafted, draft in drafts(models, (), 3, STOPS["never"]):
        block += sum(drafted * weight * (len(emitted) - 1) for weight, emitted in outcomes(models, (), draft))
        reached = Fraction(1)
        for count, token in enumerate(draft):
            weights = models.q(draft[:count])
            share = shares(weights)[weights.ids.index(token)]
            reached *= min(models.p(draft[:count])[token] / share, 1)
            by_token += drafted * reached
    assert block >= by_token


# --- draws -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 65535), min_size=1, max_size=64))
def test_each_candidate_has_as_many_words_as_it_has_weight(weights: list[int]) -> None:
    """Where one candidate ends and the next begins among the 2^64 words, and that the surplus word is thrown away."""
    total = sum(weights)
    for place, end in enumerate(itertools.accumulate(weights)):
        first = -(-(end << 64) // total)  # the first word that belongs to what follows
        assert rejection._place(weights, iter([first - 1])) == place
        if end < total:
            fallback = iter([first, (1 << 64) - 1])
            assert rejection._place(weights, fallback) in (place + 1, len(weights) - 1)
    surplus = (1 << 64) % total
    words = iter([0, (1 << 64) - 1])
    assert rejection._place(weights, words) == (len(weights) - 1 if surplus else 0)


def test_draws_follow_the_weights() -> None:
    """40 000 seeds at one position, by chi-square; and draws at two positions or bases are independent."""
    weights = Weights([3, 8, 9, 500], [40_000, 9_000, 900, 100])
    drawn = [draw(weights, seed, 7, 9) for seed in range(40_000)]
    counts = Counter(drawn)
    expected = [40_000 * share for share in weights.shares]
    assert stats.chisquare([counts[token] for token in weights.ids], expected).pvalue > 1e-3
    for other in ((7, 10), (8, 9)):
        table = Counter(zip(drawn, (draw(weights, seed, *other) for seed in range(40_000)), strict=True))
        counts_of = [[table[a, b] for b in weights.ids[:3]] for a in weights.ids[:3]]
        assert stats.chi2_contingency(counts_of).pvalue > 1e-3


def test_no_two_streams_share_a_key() -> None:
    """Keys of all streams, bases and positions of a long text differ, also from the coupled ones."""
    keys = [row_key(5, position) for position in range(200)]
    for base, stream in itertools.product(range(200), (rejection.DRAFT, rejection.ACCEPT, rejection.RESIDUAL)):
        keys += [stream_key(5, base, position, stream) for position in range(base, base + 17)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_weights_are_the_likeliest_candidates_in_proportion() -> None:
    """Ascending ids, the largest weight 65535, nothing below 1/512 of it."""
    p = np.array([0.5, 0.25, 0.125, 0.001, 0.0009, 0.0])
    assert weights_of(np.array([9, 2, 4, 7, 1, 3]), p) == Weights([2, 4, 7, 9], [32768, 16384, 131, 65535])
    assert weights_of(np.arange(64)[::-1].copy(), np.full(64, 1 / 64)) == Weights(list(range(64)), [65535] * 64)
    assert weights_of(np.array([6, 1]), np.array([1.0, 0.0])) == Weights([6], [65535])
    assert certain(6) == Weights([6], [1])


# --- with keyed noise ------------------------------------------------------------------------------

LENGTH, SEEDS, WIDE = 3, 12_000, 5
KINDS = {
    "good": Sampling(temperature=0.9),
    "bad": Sampling(temperature=0.9),
    "filtered": Sampling(temperature=1.3, top_p=0.9, top_k=4),
}


def rows_of(texts: list[Text], seed: int) -> np.ndarray:
    """Logits that depend on the whole text."""
    made = {text: np.random.default_rng([seed, *text, 77]).normal(0, 1.2, WIDE) for text in set(texts)}
    return np.stack([made[text] for text in texts])


def drafted(texts: list[Text], seeds: list[int], k: int, kind: str) -> list[Block]:
    """As a drafter does it: k draws after each text, from its own distribution."""
    sampling, blocks = KINDS[kind], [Block(seed, len(text), [], []) for seed, text in zip(seeds, texts, strict=True)]
    for _ in range(k):
        before = [text + tuple(block.tokens) for text, block in zip(texts, blocks, strict=True)]
        logits = rows_of(before, 1) * 0.8 + (0 if kind == "bad" else 1) * rows_of(before, 0)
        order = (-logits).argsort(-1, kind="stable")
        ranked = probabilities(np.take_along_axis(logits, order, -1), [sampling] * len(texts))
        for block, ids, row in zip(blocks, order, ranked, strict=True):
            weights = weights_of(ids[:4], row[:4])
            block.tokens.append(draw(weights, block.seed, block.base, block.base + len(block.tokens)))  # type: ignore[attr-defined]
            block.weights.append(weights)  # type: ignore[attr-defined]
    return blocks


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_the_round_loop_follow_the_target(kind: str) -> None:
    """12 000 seeds with a good and a bad drafter: all texts of three tokens, against the target's own probabilities."""
    sampling = KINDS[kind]
    texts: list[Text] = [()] * SEEDS
    accepted = 0
    while True:
        left = [place for place, text in enumerate(texts) if len(text) < LENGTH]
        if not left:
            break
        for k in (2, 1, 0):
            now = [place for place in left if min(2, LENGTH - len(texts[place]) - 1) == k]
            before = [texts[place] for place in now]
            if not now:
                continue
            if k == 0:
                rows = rows_of(before, 0)
                chosen = choose(
                    rows,
                    [Sampling(place, sampling.temperature, sampling.top_p, sampling.top_k) for place in now],
                    [len(b) for b in before],
                )
                emitted = [[token] for token in chosen.tolist()]
            else:
                blocks = drafted(before, now, k, kind)
                rows = rows_of(
                    [text + tuple(b.tokens[:i]) for text, b in zip(before, blocks, strict=True) for i in range(k + 1)],
                    0,
                )
                emitted = verify_blocks(probabilities(rows, [sampling] * len(rows)), blocks)
                accepted += sum(len(tokens) - 1 for tokens in emitted)
            for place, tokens in zip(now, emitted, strict=True):
                texts[place] += tuple(tokens)
    expected = {}
    for text in itertools.product(range(WIDE), repeat=LENGTH):
        steps = probabilities(rows_of([text[:i] for i in range(LENGTH)], 0), [sampling] * LENGTH)
        expected[text] = SEEDS * float(np.prod([row[token] for row, token in zip(steps, text, strict=True)]))
    counts = Counter(texts)
    assert all(expected[text] > 0 for text in counts)
    likely = [text for text, count in expected.items() if count >= 5]
    rare = [SEEDS - sum(values[text] for text in likely) for values in (counts, expected)]
    observed = [counts[text] for text in likely] + rare[:1] * (rare[1] > 5)
    wanted = [expected[text] for text in likely] + rare[1:] * (rare[1] > 5)
    scale = sum(observed) / sum(wanted)
    assert stats.chisquare(observed, [count * scale for count in wanted]).pvalue > 1e-3
    assert accepted > (0.25 if kind == "bad" else 0.5) * SEEDS


def test_numpy_and_torch_verify_alike() -> None:
    """500 blocks of different lengths, by the same noise: the same tokens."""
    random = np.random.default_rng(4)
    blocks, logits = [], []
    for seed in range(500):
        row = random.normal(0, 2, (int(random.integers(2, 6)), 300))
        weights = []
        for near in row[:-1] + random.normal(0, 1, (len(row) - 1, 300)):
            ids = (-near).argsort(kind="stable")[: int(random.integers(1, 40))]
            p = np.exp(near[ids])
            weights.append(weights_of(ids, p / p.sum()))
        tokens = [draw(w, seed, 50, 50 + i) for i, w in enumerate(weights)]
        blocks.append(Block(seed, 50, tokens, weights))
        logits.append(row)
    samplings = [Sampling(temperature=0.8, top_p=0.95)] * sum(len(rows) for rows in logits)
    rows = np.concatenate(logits)
    ours = verify_blocks(probabilities(rows, samplings), blocks)
    assert verify_blocks(probabilities(torch.from_numpy(rows), samplings), blocks) == ours
    lengths = Counter(len(tokens) for tokens in ours)
    assert len(lengths) > 3
    alone = [verify_blocks(probabilities(r, samplings[: len(r)]), [b])[0] for r, b in zip(logits, blocks, strict=True)]
    assert alone == ours


def test_a_drafter_that_draws_from_the_targets_own_distribution_is_always_accepted() -> None:
    """p = q': every token is kept, and what follows comes from p."""
    weights = Weights([0, 1, 2], [1, 2, 1])
    p = np.tile([0.25, 0.5, 0.25], (4, 1))
    for seed in range(300):
        tokens = [draw(weights, seed, 3, 3 + i) for i in range(3)]
        assert verify_blocks(p, [Block(seed, 3, tokens, [weights] * 3)])[0][:3] == tokens
