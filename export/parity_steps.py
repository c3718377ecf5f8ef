"""One step on both sides: keys and values of every layer first, then logits; what differs first is named."""

from __future__ import annotations

import numpy as np

from paceline.edge.runtimes.base import Top
from paceline.export.parity_cases import Feed, Step
from paceline.export.parity_figures import Parity, ParityFailed, Tolerance
from paceline.export.parity_subjects import Floats, Subject, TorchSubject


def check_step(
    reference: TorchSubject, subject: Subject, step: Step, layers: int, allowed: Tolerance, parity: Parity
) -> None:
    """Raises ParityFailed, naming the first layer that differs, else the logits."""
    expected = reference.logits(step.feeds)
    got = subject.step(step.feeds)
    for layer in range(layers):
        _check_kv(reference, subject, step, layer, allowed.kv, parity)
    largest = 0.0
    for feed, logits, ids, candidates in zip(step.feeds, expected, got.ids, got.logits, strict=True):
        difference, relative = parity.compare(logits[feed.asked], Top(ids, candidates))
        largest = max(largest, difference)
        if not relative <= allowed.logits:
            raise ParityFailed(
                f"{_head(step, parity)}: row {feed.row}'s logits differ by {relative:.3g} standard deviations"
                f" (allowed {allowed.logits:g}); {_suspect_of_logits(logits, feed, Top(ids, candidates), layers)}"
            )
    parity.steps += 1
    parity.cases[step.case] = max(parity.cases.get(step.case, 0.0), largest)


def _check_kv(
    reference: TorchSubject, subject: Subject, step: Step, layer: int, allowed: float, parity: Parity
) -> None:
    """The step's new entries, and those before them: these it must leave alone."""
    for feed in step.feeds:
        expected = reference.kv(layer, feed.row, 0, feed.stop)
        got = subject.kv(layer, feed.row, 0, feed.stop)
        wrong = {}
        for name, ours, theirs in zip(("keys", "values"), expected, got, strict=True):
            difference = (np.abs(theirs - ours) / max(float(ours.std()), 1e-6)).max((1, 2))  # of each position
            parity.kv_difference = max(parity.kv_difference, float(difference.max()))
            bad = ~(difference <= allowed)  # NaN is bad
            if bad.any():
                wrong[name] = float(difference[bad].max()), int(bad.argmax())
        if wrong:
            largest, position = max(size for size, _ in wrong.values()), min(place for _, place in wrong.values())
            raise ParityFailed(
                f"{_head(step, parity)}: layer {layer}'s {' and '.join(wrong)} differ first, by {largest:.3g} standard"
                f" deviations (allowed {allowed:g}), from position {position} of row {feed.row} on;"
                f" {_suspect_of_kv(layer, set(wrong), feed, position)}"
            )


def _head(step: Step, parity: Parity) -> str:
    agreed = ", ".join(parity.cases) or "nothing yet"
    return f"the bundle differs from {parity.reference} in {step}; before it agreed: {agreed}"


def _suspect_of_kv(layer: int, wrong: set[str], feed: Feed, position: int) -> str:
    if position < feed.start:
        return (
            "that was right before this step, which overwrote it: look at past_lengths and where the cache is written"
        )
    if wrong == {"keys"}:
        return f"values agree: look at layer {layer}'s key projection or norm, at the rotary embedding and past_lengths"
    if wrong == {"values"}:
        return f"keys agree: look at layer {layer}'s value projection"
    before = "input_ids and the embedding" if layer == 0 else f"layer {layer - 1}'s attention and MLP"
    return f"look at {before}, and at layer {layer}'s input norm and projections"


def _suspect_of_logits(expected: Floats, feed: Feed, got: Top, layers: int) -> str:
    """expected: logits [tokens, vocabulary] of all of the feed's tokens."""
    distances = [np.abs(got.logits - row[got.ids]).max() for row in expected]
    nearest = int(np.argmin(distances))
    if nearest != feed.asked and distances[nearest] < 0.1 * distances[feed.asked]:
        return f"they are those of new token {nearest}: the input logit_idx is not followed"
    return f"all keys and values agree: look at layer {layers - 1}'s attention and MLP, the final norm and the head"
