"""Real text on both sides: how often a drafter with the bundle would propose what one with torch would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.core.sampling import Sampling, choose
from paceline.edge.runtimes.base import TOP, Top, top_of
from paceline.export.parity_cases import ROWS, Feed
from paceline.export.parity_figures import Extent, Parity, ParityFailed
from paceline.export.parity_subjects import Subject, TorchSubject

PROMPT = 16  # tokens; the others of a text are read one at a time, as a drafter does
TOKENS = 112  # of a text
TEMPERATURES = (0.0, 0.8)


class Place(NamedTuple):
    """A row's candidates belong after the token at `position`."""

    row: int
    position: int


def check_text(
    reference: TorchSubject,
    subject: Subject,
    texts: Sequence[Sequence[int]],
    extent: Extent,
    parity: Parity,
    progress: Callable[[int], None],
) -> None:
    """Counts equal choices in `parity`; raises ParityFailed when they are too few. Single differences do not matter."""
    equal = dict.fromkeys(TEMPERATURES, 0)
    first = 0
    for begin in range(0, len(texts), ROWS):
        batch = [text[: min(TOKENS, extent.max_context)] for text in texts[begin : begin + ROWS]]
        whole = reference.logits([Feed(row, 0, text, 0) for row, text in enumerate(batch)])
        for places, got in _read(subject, batch):
            logits = np.stack([whole[place.row][place.position] for place in places])
            for row, ids, candidates in zip(logits, got.ids, got.logits, strict=True):
                parity.compare(row, Top(ids, candidates))
            expected = top_of(logits, TOP)
            first += int((expected.ids[:, 0] == got.ids[:, 0]).sum())
            for temperature in TEMPERATURES:
                ours, theirs = (_coupled(top, places, begin, temperature) for top in (expected, got))
                equal[temperature] += int((ours == theirs).sum())
            parity.text_positions += len(places)
        progress(len(batch))
    total = parity.text_positions
    parity.top1_agreement = round(first / total, 4)
    parity.agreement = {f"{temperature:g}": round(count / total, 4) for temperature, count in equal.items()}
    least, allowed = min(parity.agreement.values()), parity.tolerance["agreement"]
    if least < allowed:
        raise ParityFailed(
            f"on real text the bundle chooses the same token as {parity.reference} at {least:.1%} of {total} positions,"
            f" less than the {allowed:.1%} that {extent.precision} must reach; each single step was within its bounds"
        )


def _read(subject: Subject, batch: Sequence[Sequence[int]]) -> Iterator[tuple[list[Place], Top]]:
    """Whole prompts, of different lengths, then ragged batches of one token each, as long as a row has some."""
    begins = [min(PROMPT + 3 * row, len(text) // 2) for row, text in enumerate(batch)]
    for row, (text, begin) in enumerate(zip(batch, begins, strict=True)):
        yield [Place(row, begin - 1)], subject.step([Feed(row, 0, text[:begin], begin - 1)])
    for turn in range(max(len(text) for text in batch)):
        live = [row for row, text in enumerate(batch) if begins[row] + turn < len(text)]
        for run in _neighbours(live):
            feeds = [Feed(row, begins[row] + turn, [batch[row][begins[row] + turn]], 0) for row in run]
            yield [Place(feed.row, feed.start) for feed in feeds], subject.step(feeds)


def _neighbours(rows: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][-1] == row - 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _coupled(top: Top, places: Sequence[Place], text: int, temperature: float) -> Any:
    """The proposals that shared noise makes of these candidates; each text has a seed of its own."""
    samplings = [Sampling(seed=text + place.row, temperature=temperature) for place in places]
    return choose(top.logits, samplings, [place.position + 1 for place in places], top.ids)
