"""A bundle against torch: every kind of step that its manifest declares, then real text. The figures go into it.

The reference is transformers' own forward of the original weights in float32. After each step the keys and values of
every layer are compared before the logits are: the first layer that differs is where a graph is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.export.parity_cases import ROWS, Step, steps
from paceline.export.parity_figures import TOLERANCES, Extent, Parity
from paceline.export.parity_steps import check_step
from paceline.export.parity_subjects import Subject, TorchSubject
from paceline.export.parity_text import check_text


def check(
    reference: TorchSubject,
    subject: Subject,
    extent: Extent,
    texts: Sequence[Sequence[int]],
    progress: Callable[[int], None] = lambda steps: None,
) -> Parity:
    """Runs everything on both sides, which need `ROWS` rows. texts: token ids of real text, one text or more.

    Raises ParityFailed.
    """
    allowed = TOLERANCES[extent.precision]
    parity = Parity(reference.name, subject.name, allowed._asdict())
    for step in _steps(extent, [token for text in texts for token in text]):
        check_step(reference, subject, step, extent.layers, allowed, parity)
        progress(1)
    check_text(reference, subject, texts, extent, parity, progress)
    return parity


def count(extent: Extent, texts: Sequence[Sequence[int]]) -> int:
    """How often `progress` is told."""
    return sum(1 for _ in _steps(extent, [0])) + len(texts)


def _steps(extent: Extent, text: Sequence[int]) -> Iterator[Step]:
    return steps(text, rows=ROWS, max_context=extent.max_context, multi_token_batch=extent.multi_token_batch)
