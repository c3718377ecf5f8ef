"""A bundle against torch: every kind of step that its manifest declares, then real text. The figures go into it.

The reference is transformers' own forward of the original weights in float32. After each step the keys and values of
every layer are compared before the logits are: the first layer that differs is where a graph is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.sampling import Sampling, choose
from paceline.edge.runtimes.base import TOP, Top, top_of
from paceline.export.parity_cases import Feed, Step, steps
from paceline.export.parity_subjects import Floats, Subject, TorchSubject

ROWS = 4
TEXT_PROMPT = 16  # tokens; the others of a text are read one at a time, as a drafter does
TEXT_TOKENS = 112
TEMPERATURES = (0.0, 0.8)


class ParityFailed(PacelineError):
    """A bundle does not compute what its model computes; the message names the step and the first layer."""


@dataclass(frozen=True)
class Tolerance:
    """What may differ. kv, logits: largest difference, in units of the standard deviation of what is compared.
    agreement: least share of positions of real text at which both choose the same token."""

    kv: float
    logits: float
    agreement: float


# Several times what the embedded pair and random models of every family show. A quantised graph was compared before it
# was quantised, with float32's bounds: these are then for its loss alone, of which single keys have the most.
TOLERANCES = {
    "float64": Tolerance(0.002, 0.002, 0.995),
    "float32": Tolerance(0.002, 0.002, 0.995),
    "float16": Tolerance(0.1, 0.1, 0.97),
    "bfloat16": Tolerance(0.5, 0.5, 0.8),
    "int8": Tolerance(4.0, 1.0, 0.9),
    "int4": Tolerance(16.0, 4.0, 0.7),
}


@dataclass
class Parity:
    """What was measured; `asdict` of it is the manifest's `parity`."""

    reference: str
    subject: str
    tolerance: dict[str, float]
    steps: int = 0
    cases: dict[str, float] = field(default_factory=dict)  # largest difference of a logit, as it is
    kv_difference: float = 0.0  # largest, in standard deviations
    logit_difference: float = 0.0  # largest over cases and text, in standard deviations
    max_difference: float = 0.0  # the same as it is
    text_positions: int = 0
    top1_agreement: float = 0.0  # on real text
    agreement: dict[str, float] = field(default_factory=dict)  # temperature → share of equal coupled choices


class Extent(NamedTuple):
    """How much of a bundle is checked, as its manifest declares it."""

    layers: int
    max_context: int
    multi_token_batch: bool
    precision: str  # a key of TOLERANCES


def check(
    reference: TorchSubject,
    subject: Subject,
    extent: Extent,
    texts: Sequence[Sequence[int]],
    progress: Callable[[int], None] = lambda steps: None,
) -> Parity:
    """Runs everything on both sides, which need `ROWS` rows. texts: token ids of real text. Raises ParityFailed."""
    tolerance = TOLERANCES[extent.precision]
    parity = Parity(reference.name, subject.name, asdict(tolerance))
    every = [token for text in texts for token in text]
    plan = steps(every, rows=ROWS, max_context=extent.max_context, multi_token_batch=extent.multi_token_batch)
    for step in plan:
        _check_step(reference, subject, extent.layers, step, tolerance, parity)
        progress(1)
    _check_text(reference, subject, [text for text in texts if len(text) > 2 * TEXT_PROMPT], extent, parity, progress)
    return parity


def count(extent: Extent, texts: Sequence[Sequence[int]]) -> int:
    """How often `progress` is told."""
    plan = steps([0], rows=ROWS, max_context=extent.max_context, multi_token_batch=extent.multi_token_batch)
    return sum(1 for _ in plan) + len([text for text in texts if len(text) > 2 * TEXT_PROMPT])


def _check_step(
    reference: TorchSubject, subject: Subject, layers: int, step: Step, tolerance: Tolerance, parity: Parity
) -> None:
    expected = reference.logits(step.feeds)
    got = subject.step(step.feeds)
    for layer in range(layers):
        _check_kv(reference, subject, layer, step, tolerance.kv, parity)
    absolute = 0.0
    for index, feed in enumerate(step.feeds):
        row = Top(got.ids[index], got.logits[index])
        difference, spread = _logit_difference(expected[index][feed.asked], row)
        absolute = max(absolute, difference)
        parity.logit_difference = max(parity.logit_difference, difference / spread)
        if not difference <= tolerance.logits * spread:
            suspect = _suspect_of_logits(expected[index], feed, row, layers, tolerance)
            raise ParityFailed(
                f"{_head(step, parity)}: row {feed.row}'s logits differ by {difference / spread:.3g} standard"
                f" deviations (allowed {tolerance.logits:g}); {suspect}"
            )
    parity.steps += 1
    parity.cases[step.case] = max(parity.cases.get(step.case, 0.0), absolute)
    parity.max_difference = max(parity.max_difference, absolute)


def _check_kv(
    reference: TorchSubject, subject: Subject, layer: int, step: Step, allowed: float, parity: Parity
) -> None:
    wrong: dict[str, tuple[float, Feed, int]] = {}
    for feed in step.feeds:
        # The new entries, and those before them: a step must leave these alone.
        sides = zip(
            ("keys", "values"),
            reference.kv(layer, feed.row, 0, feed.stop),
            subject.kv(layer, feed.row, 0, feed.stop),
            strict=True,
        )
        for name, expected, got in sides:
            difference = np.abs(got - expected) / max(float(expected.std()), 1e-6)
            largest = float(difference.max())
            parity.kv_difference = max(parity.kv_difference, largest)
            if not largest <= allowed and name not in wrong:
                bad = ~(difference <= allowed)
                wrong[name] = largest, feed, int(np.argmax(bad.any((1, 2))))
    if not wrong:
        return
    largest, feed, position = next(iter(wrong.values()))
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
            "that was written earlier, so this step overwrote it: look at past_lengths and where the cache is written"
        )
    if wrong == {"keys"}:
        return f"values agree: look at layer {layer}'s key projection or norm, at the rotary embedding and past_lengths"
    if wrong == {"values"}:
        return f"keys agree: look at layer {layer}'s value projection"
    before = "input_ids and the embedding" if layer == 0 else f"layer {layer - 1}'s attention and MLP"
    return f"look at {before}, and at layer {layer}'s input norm and projections"


def _suspect_of_logits(expected: Floats, feed: Feed, got: Top, layers: int, tolerance: Tolerance) -> str:
    for index, row in enumerate(expected):
        difference, spread = _logit_difference(row, got)
        if index != feed.asked and difference <= tolerance.logits * spread:
            return f"they are those of new token {index}: the input logit_idx is not followed"
    return f"all keys and values agree: look at layer {layers - 1}'s attention and MLP, the final norm and the head"


def _logit_difference(expected: Floats, got: Top) -> tuple[float, float]:
    """The largest difference of the candidates' logits, also rank by rank; and the spread of all logits."""
    best = np.sort(expected)[::-1][: len(got.ids)]
    own = np.abs(got.logits - expected[got.ids]).max()
    ranked = np.abs(got.logits - best).max()
    return float(max(own, ranked)), max(float(expected.std()), 1e-6)


def _check_text(
    reference: TorchSubject,
    subject: Subject,
    texts: Sequence[Sequence[int]],
    extent: Extent,
    parity: Parity,
    progress: Callable[[int], None],
) -> None:
    """Both sides read the texts; the drafter's side a token at a time, in ragged batches."""
    length = min(TEXT_TOKENS, extent.max_context)
    same = {temperature: 0 for temperature in TEMPERATURES}
    first = 0
    for begin in range(0, len(texts), ROWS):
        batch = [text[:length] for text in texts[begin : begin + ROWS]]
        expected = [reference.logits([Feed(row, 0, text, 0)])[0] for row, text in enumerate(batch)]
        for rows, tops in _read(subject, batch):
            logits = np.stack([expected[row][position] for row, position in rows])
            target = top_of(logits, TOP)
            for index in range(len(rows)):
                difference, spread = _logit_difference(logits[index], Top(tops.ids[index], tops.logits[index]))
                parity.max_difference = max(parity.max_difference, difference)
                parity.logit_difference = max(parity.logit_difference, difference / spread)
            first += int((target.ids[:, 0] == tops.ids[:, 0]).sum())
            for temperature in TEMPERATURES:
                pair = [_coupled(top, rows, begin, temperature) for top in (target, tops)]
                same[temperature] += int((pair[0] == pair[1]).sum())
            parity.text_positions += len(rows)
        progress(len(batch))
    total = max(1, parity.text_positions)
    parity.top1_agreement = round(first / total, 4)
    parity.agreement = {f"{temperature:g}": round(count / total, 4) for temperature, count in same.items()}
    least = min(parity.agreement.values())
    if texts and least < parity.tolerance["agreement"]:
        raise ParityFailed(
            f"on real text the bundle chooses the same token as {parity.reference} at {100 * least:.1f} % of"
            f" {total} positions, less than the {100 * parity.tolerance['agreement']:.1f} % that {extent.precision}"
            " must reach; each single step was within its tolerance"
        )


def _read(subject: Subject, batch: Sequence[Sequence[int]]) -> list[tuple[list[tuple[int, int]], Top]]:
    """(row, position) of each step's candidates, and the candidates. Rows begin after prompts of different lengths."""
    found = []
    begins = [TEXT_PROMPT + 3 * row for row in range(len(batch))]
    for row, (text, begin) in enumerate(zip(batch, begins, strict=True)):
        found.append(([(row, begin - 1)], subject.step([Feed(row, 0, text[:begin], begin - 1)])))
    for turn in range(max(len(text) for text in batch) - TEXT_PROMPT):
        live = [row for row, text in enumerate(batch) if begins[row] + turn < len(text)]
        for run in _neighbours(live):
            feeds = [Feed(row, begins[row] + turn, [batch[row][begins[row] + turn]], 0) for row in run]
            found.append(([(f.row, f.start) for f in feeds], subject.step(feeds)))
    return found


def _neighbours(rows: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][-1] == row - 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _coupled(top: Top, rows: Sequence[tuple[int, int]], text: int, temperature: float) -> Any:
    """The proposals that shared noise makes of these candidates; each text has a seed of its own."""
    samplings = [Sampling(seed=text + row, temperature=temperature) for row, _ in rows]
    return choose(top.logits, samplings, [position + 1 for _, position in rows], top.ids)
