"""The rule once more, plainly, in Python's own integers and floats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from paceline.core.sampling import Sampling

MASK = (1 << 64) - 1


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
