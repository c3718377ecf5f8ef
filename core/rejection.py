"""Rejection verification: the drafter tells what it drew from, and the target takes as many tokens as it may.

At each position the drafter draws from q', integer weights of its likeliest tokens, and sends them along. The target
accepts a draft, or a part of it, with probabilities that depend on p and q' alone, and draws one more token from what
is left: block verification (Sun et al., arXiv 2403.10444), which accepts at least as much as deciding token by token.
What comes out is distributed as the target's own p, exactly. It is not, as with coupled noise, the token that the
target would have chosen without a draft.

Three things make that true, and everything that handles a draft has to keep them:
- Draws are independent: noise is keyed (seed, base, position, stream), where base counts the committed tokens that the
  draft follows. A round verifies one draft at its own base and commits at least a token, so no key serves twice.
- A token is drawn from exactly the weights that are sent with it.
- Whether position i is verified may depend on the tokens before i and on its q', never on the token drawn at i.

`accept` and `residual` take any numbers, so that tests can enumerate them in rational arithmetic.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.core.arrays import Array, library, like, on, take
from paceline.core.sampling import GOLDEN, MASK64, mix, stream_key, uniform

MAX_WEIGHT = (1 << 16) - 1
LEAST_SHARE = 1 / 512  # of the likeliest candidate's probability; rarer ones cost more bytes than they are accepted
DRAFT, ACCEPT, RESIDUAL = 1, 2, 3  # streams of noise


class Weights(NamedTuple):
    """q' of one position: candidate ids, ascending, and the weight of each, 1..65535."""

    ids: list[int]
    weights: list[int]

    @property
    def shares(self) -> list[float]:
        """q' as probabilities."""
        total = sum(self.weights)
        return [weight / total for weight in self.weights]


class Block(NamedTuple):
    """A draft to verify: `tokens` follow the first `base` committed ones, and were drawn from `weights`."""

    seed: int
    base: int
    tokens: Sequence[int]
    weights: Sequence[Weights]


# --- drafter ---------------------------------------------------------------------------------------


def weights_of(ids: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any]) -> Weights:
    """Integer weights of those candidates [C] that are worth their bytes; the first is the likeliest of all."""
    kept = np.flatnonzero(probabilities >= LEAST_SHARE * probabilities[0])
    kept = kept[ids[kept].argsort()]
    weights = np.rint(probabilities[kept] * (MAX_WEIGHT / probabilities[0])).astype(np.int64)
    return Weights(ids[kept].tolist(), weights.tolist())


def certain(token: int) -> Weights:
    """The weights of a proposal that is no draw."""
    return Weights([token], [1])


def draw(weights: Weights, seed: int, base: int, position: int) -> int:
    """A token with probability exactly w/Σw."""
    key = stream_key(seed, base, position, DRAFT)
    return weights.ids[_place(weights.weights, (_word(key, attempt) for attempt in itertools.count()))]


def _place(weights: Sequence[int], words: Iterator[int]) -> int:
    """An index by weight, exactly: each has as many products of a u64 and Σw as it has weight (Lemire, 1805.10941)."""
    ends = list(itertools.accumulate(weights))
    surplus = (1 << 64) % ends[-1]
    product = next(words) * ends[-1]
    while product & MASK64 < surplus:
        product = next(words) * ends[-1]
    return bisect.bisect_right(ends, product >> 64)


# --- target ----------------------------------------------------------------------------------------


def verify_blocks(probabilities: Array, blocks: Sequence[Block]) -> list[list[int]]:
    """What each block's round emits: accepted draft tokens and one more.

    probabilities: float64 [sum of (len(tokens) + 1), vocabulary], the target's own, a block's rows in order.
    """
    offered = _offered(probabilities, blocks)
    emitted, scales, row, rows = [], [], 0, []
    for block in blocks:
        count = len(block.tokens)
        q = [weights.shares for weights in block.weights]
        p = [values[: len(shares)] for values, shares in zip(offered[row : row + count], q, strict=True)]
        drawn = [weights.ids.index(token) for token, weights in zip(block.tokens, block.weights, strict=True)]
        accepted, scale = accept(p, q, drawn, _Coins(block))
        emitted.append(list(block.tokens[:accepted]))
        scales.append(scale)
        rows.append(row + accepted)
        row += count + 1
    left = residual(
        probabilities[rows],
        like(probabilities, scales, library(probabilities).float64)[:, None],
        [
            block.weights[len(t)] if len(t) < len(block.tokens) else None
            for block, t in zip(blocks, emitted, strict=True)
        ],
    )
    keys = [stream_key(b.seed, b.base, b.base + len(t), RESIDUAL) for b, t in zip(blocks, emitted, strict=True)]
    for tokens, last in zip(emitted, _pick(left, keys).tolist(), strict=True):
        tokens.append(last)
    return emitted


def accept(
    p: Sequence[Sequence[Any]], q: Sequence[Sequence[Any]], drawn: Sequence[int], coin: Callable[[int, Any], bool]
) -> tuple[int, Any]:
    """How many tokens of a block are accepted, and the scale of p in the residual that the next one is drawn from.

    p, q: probabilities of the candidates at each position, the target's and the drafter's (which sum to 1); drawn: the
    place of the token among them. coin(i, probability): one independent decision for each accepted length i ≥ 1.
    """
    scales: list[Any] = [1]
    for p_i, q_i, place in zip(p, q, drawn, strict=True):
        scales.append(min(scales[-1] * p_i[place] / q_i[place], 1))
    for count in range(len(drawn), 0, -1):
        probability = scale = scales[count]
        if count < len(drawn) and scale < 1:
            spare = _spare(scale, p[count], q[count])
            probability = spare / (spare + 1 - scale)
        if coin(count, probability):
            return count, scale
    return 0, 1


def _spare(scale: Any, p: Sequence[Any], q: Sequence[Any]) -> Any:
    """Σ max(scale · p − q, 0) over the vocabulary; beyond the candidates q is 0."""
    others = max(1 - sum(p), 0)
    return scale * others + sum(max(scale * p_x - q_x, 0) for p_x, q_x in zip(p, q, strict=True))


def residual(p: Array, scale: Array, weights: Sequence[Weights | None]) -> Array:
    """max(scale · p − q', 0), what the token after the accepted ones is drawn from, not normalised; p [B, V] itself
    where a block was accepted whole (None)."""
    left = p * scale
    for row, candidates in enumerate(weights):
        if candidates is None:
            left[row] = p[row]
            continue
        left[row, candidates.ids] -= like(p, candidates.shares, p.dtype)
    left = left.clip(0)
    return library(p).where((left.sum(-1) > 0)[:, None], left, p)  # nothing is left only by rounding


def _word(key: int, index: int = 0) -> int:
    """A hashed u64; what `uniform` makes its number of."""
    return mix((key + (index + 1) * GOLDEN) & MASK64)


class _Coins:
    """`coin` of `accept`, by keyed noise."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __call__(self, count: int, probability: float) -> bool:
        key = stream_key(self._block.seed, self._block.base, self._block.base + count - 1, ACCEPT)
        return (_word(key) >> 12) * 2.0**-52 + 2.0**-53 < probability


def _offered(probabilities: Array, blocks: Sequence[Block]) -> list[list[float]]:
    """The target's probabilities of each row's candidates; rows are filled up to the longest, for one gather."""
    rows = [w for block in blocks for w in (*block.weights, None)]
    width = max(len(w.ids) for w in rows if w is not None)
    ids = [w.ids + [0] * (width - len(w.ids)) if w is not None else [0] * width for w in rows]
    offered: list[list[float]] = take(probabilities, like(probabilities, ids, library(probabilities).int64)).tolist()
    return offered


def _pick(weights: Array, keys: Sequence[int]) -> Array:
    """A column of each row with probability proportional to its weight: the least exponential variate at that rate."""
    xp = library(weights)
    columns = xp.arange(weights.shape[-1], **on(weights))[None, :]
    noise = -xp.log(uniform(like(weights, keys, xp.int64)[:, None], columns))
    return (weights / noise).argmax(-1)
