"""The rule: how a token is chosen from a row of logits, the same at both ends.

Shared-noise Gumbel coupling (Daliri et al., arXiv 2408.07978): token = argmax(log p + gumbel), where the
noise is a pure function of (seed, position, token id). No generator state exists, so the text depends on
(target, prompt, sampling parameters, seed) and on nothing else. The target always emits its own choice;
a draft token is accepted exactly when it equals that choice, which needs no acceptance ratio.

Every function takes numpy arrays (edge, no torch) or torch tensors (cloud). Hash and uniforms are
bit-equal in both; the Gumbel values agree to 1e-12 (the libraries' logarithms differ in the last bit).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.core.arrays import Array, column, float64, library, on, row_maximum, take

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one session's tokens are chosen. Neutral values switch a step off.

    seed: u64, the choice's own (see `choice_seed`). temperature 0 is greedy. Presence and frequency
    penalties count output tokens only, repetition all tokens; a draft's earlier tokens count as output.
    """

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}

    @property
    def adjusts(self) -> bool:
        """Whether logits change before the temperature: bias or penalties."""
        return bool(
            self.logit_bias or self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def filters(self) -> bool:
        """Whether min-p, top-k or top-p cut the distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class History:
    """The tokens that penalties look at: all of them, and the output among them."""

    def __init__(self, tokens: Sequence[int], prompt_length: int) -> None:
        self.seen = set(tokens)
        self.output = Counter(tokens[prompt_length:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds committed output tokens."""
        self.seen.update(tokens)
        self.output.update(tokens)


# --- noise -----------------------------------------------------------------------------------------


def mix(value: int) -> int:
    """splitmix64's finalizer on a u64."""
    value = ((value ^ (value >> 30)) * _MIX1) & MASK64
    value = ((value ^ (value >> 27)) * _MIX2) & MASK64
    return value ^ (value >> 31)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_SIGNED_GOLDEN, _SIGNED_MIX1, _SIGNED_MIX2 = signed(GOLDEN), signed(_MIX1), signed(_MIX2)


def choice_seed(seed: int, index: int) -> int:
    """The u64 seed of choice `index` of a request with `seed`."""
    return mix((mix(seed & MASK64) + (index + 1) * GOLDEN) & MASK64)


def row_key(seed: int, position: int) -> int:
    """The signed 64-bit key of one position's noise."""
    return signed(mix((mix((seed + GOLDEN) & MASK64) ^ ((position + 1) * GOLDEN)) & MASK64))


def stream_key(seed: int, base: int, position: int, stream: int) -> int:
    """The signed 64-bit key of one position's noise in a round of `rejection`, apart from all coupled noise.

    base: committed tokens at the round's start. stream: 1, 2, …, of independent draws (core/rejection.py).
    """
    mixed = row_key(seed, position) & MASK64
    return signed(mix(mixed ^ (((base + 1) << 2 | stream) * _MIX2 & MASK64)))


def token_hash(keys: Array, ids: Array) -> Array:
    """Signed 64-bit hashes of (row key, token id); int64 arrays that broadcast, wrapping arithmetic.

    numpy and torch have no common u64, but int64 multiplication wraps alike in both; a logical shift is an
    arithmetic one with the sign's copies masked off.
    """
    value = keys + (ids + 1) * _SIGNED_GOLDEN
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _SIGNED_MIX1
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _SIGNED_MIX2
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def uniform(keys: Array, ids: Array) -> Array:
    """float64 in (0, 1): the hash's top 52 bits and a half, never 0 or 1."""
    top = (token_hash(keys, ids) >> 12) & ((1 << 52) - 1)
    xp = library(top)
    return (top.astype(np.float64) if xp is np else top.to(xp.float64)) * 2.0**-52 + 2.0**-53


def gumbel(keys: Array, ids: Array) -> Array:
    """Standard Gumbel noise, float64, one value for each (row key, token id)."""
    u = uniform(keys, ids)
    xp = library(u)
    return -xp.log(-xp.log(u))


# --- choosing --------------------------------------------------------------------------------------


def choose(logits: Array, samplings: Sequence[Sampling], positions: Sequence[int], ids: Array | None = None) -> Array:
    """The token of each row: argmax of scaled, filtered logits plus noise.

    logits: [R, C] floats, bias and penalties already in (`adjust`). ids: int64 [R, C], ascending in each
    row, where columns are candidates and not the vocabulary. Returns int64 [R], same library and device.
    """
    sampled = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    tokens = _pick(logits.argmax(-1), ids)
    if not sampled:
        return tokens
    whole = len(sampled) == len(samplings)
    part = logits if whole else logits[sampled]
    part_ids = ids if ids is None or whole else ids[sampled]
    drawn = _draw(part, [samplings[r] for r in sampled], [positions[r] for r in sampled], part_ids)
    if whole:
        return drawn
    tokens[sampled] = drawn
    return tokens


def probabilities(logits: Array, samplings: Sequence[Sampling]) -> Array:
    """float64 [R, C]: the distributions that `choose` draws from at temperatures above 0, column by column.

    logits: [R, C] floats, bias and penalties already in, sorted by (−logit, id) where columns are candidates.
    """
    xp = library(logits)
    scaled = _scaled(logits, samplings)
    if any(s.filters for s in samplings):
        ranked, order = _filter(scaled, samplings)
        scaled = take(ranked, order.argsort(-1))
    weight = xp.exp(scaled - row_maximum(scaled))
    return weight / weight.sum(-1)[:, None]


def _scaled(logits: Array, samplings: Sequence[Sampling]) -> Array:
    return float64(logits) / column(logits, [s.temperature for s in samplings], library(logits).float64)


def _draw(logits: Array, samplings: Sequence[Sampling], positions: Sequence[int], ids: Array | None) -> Array:
    xp = library(logits)
    scaled = _scaled(logits, samplings)
    keys = column(logits, [row_key(s.seed, p) for s, p in zip(samplings, positions, strict=True)], xp.int64)
    if any(s.filters for s in samplings):
        scaled, order = _filter(scaled, samplings)
        ids = order if ids is None else take(ids, order)
    elif ids is None:
        ids = xp.arange(scaled.shape[-1], **on(logits))[None, :]
    best = (scaled + gumbel(keys, ids)).argmax(-1)
    return _pick(best, ids)


def _filter(scaled: Array, samplings: Sequence[Sampling]) -> tuple[Array, Array]:
    """Rows sorted by (−logit, id) with what min-p, top-k and top-p cut set to −inf, and the order."""
    xp = library(scaled)
    order = (-scaled).argsort(-1, kind="stable") if xp is np else (-scaled).argsort(dim=-1, stable=True)
    ranked = take(scaled, order)
    width = scaled.shape[-1]
    log_min_p = [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings]
    top_k = [s.top_k if s.top_k > 0 else width for s in samplings]
    top_p = [s.top_p if s.top_p < 1 else math.inf for s in samplings]  # a sum past 1 by rounding cuts nothing
    keep = ranked >= ranked[:, :1] + column(scaled, log_min_p, xp.float64)
    keep &= xp.arange(width, **on(scaled))[None, :] < column(scaled, top_k, xp.int64)
    weight = xp.where(keep, xp.exp(ranked - ranked[:, :1]), 0.0)
    before = weight.cumsum(-1) - weight
    keep &= before < column(scaled, top_p, xp.float64) * weight.sum(-1)[:, None]
    keep[:, 0] = True
    return xp.where(keep, ranked, -math.inf), order


def accepted(chosen: Sequence[int], draft: Sequence[int]) -> int:
    """How many draft tokens the target would have emitted itself; chosen[:accepted + 1] is committed."""
    for count, token in enumerate(draft):
        if chosen[count] != token:
            return count
    return len(draft)


# --- bias and penalties ----------------------------------------------------------------------------


def adjust(row: Array, sampling: Sampling, history: History, drafted: Sequence[int] = ()) -> Array:
    """A float64 copy of one row of logits [V] with logit_bias and penalties applied."""
    adjusted = float64(row)
    if adjusted is row:
        adjusted = row.copy() if library(row) is np else row.clone()
    touched = set(sampling.logit_bias)
    if sampling.repetition_penalty != 1.0:
        touched.update(history.seen, drafted)
    if sampling.presence_penalty or sampling.frequency_penalty:
        touched.update(history.output, drafted)
    width = row.shape[-1]
    ids = sorted(token for token in touched if 0 <= token < width)
    if ids:
        values = np.array([float(value) for value in adjusted[ids].tolist()])
        new = adjust_values(values, ids, sampling, history, drafted)
        adjusted[ids] = new if library(row) is np else library(row).as_tensor(new, **on(row))
    return adjusted


def adjust_values(
    values: np.ndarray[Any, Any],
    ids: Sequence[int],
    sampling: Sampling,
    history: History,
    drafted: Sequence[int] = (),
) -> np.ndarray[Any, Any]:
    """Logits [C] of the token `ids` after bias, then penalties over committed and drafted tokens."""
    extra = Counter(drafted)
    values = values.astype(np.float64)
    if sampling.logit_bias:
        values = values + np.array([sampling.logit_bias.get(token, 0.0) for token in ids])
    if sampling.repetition_penalty != 1.0:
        seen = np.array([token in history.seen or token in extra for token in ids])
        penalty = sampling.repetition_penalty
        values = np.where(seen, np.where(values > 0, values / penalty, values * penalty), values)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = np.array([history.output.get(token, 0) + extra.get(token, 0) for token in ids], np.float64)
        values = values - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return values


def log_probabilities(row: Array, chosen: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """Natural log-probability of `chosen` and the `top` likeliest (id, log p), from an unadjusted row [V]."""
    xp = library(row)
    values = float64(row)
    values = values - values.max()
    values = values - xp.log(xp.exp(values).sum())
    if not top:
        return float(values[chosen]), []
    order = (-values).argsort(kind="stable") if xp is np else (-values).argsort(dim=-1, stable=True)
    return float(values[chosen]), [(int(i), float(values[int(i)])) for i in order[:top].tolist()]


def _pick(best: Array, ids: Array | None) -> Array:
    """ids[r, best[r]] for each row, or `best` itself where columns are token ids."""
    if ids is None:
        return best
    if ids.shape[0] == 1:
        return ids[0][best]
    return take(ids, best[:, None])[:, 0]
