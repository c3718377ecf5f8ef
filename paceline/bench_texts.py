"""Whether the modes of a bench wrote the same texts: each target's answers, of every turn, against one reference.

The reference is the first turn of plain decoding, or without it of the first mode that serves the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from paceline.bench import Job, Measured, Mode, Timed


class Texts(Enum):
    """What comparing says, the worst first; the values are the words of the table."""

    DIFFER = "DIFFERS"
    FAILED = "failed"
    DRAWN = "rejection"  # drafts that are drawn change the texts, though not what is likely
    NOT_COMPARED = "–"
    SAME = "same"

    @property
    def identical(self) -> bool | None:
        """None where some target's texts were not compared."""
        return {Texts.SAME: True, Texts.DIFFER: False}.get(self)


def compared(modes: Sequence[Mode], job: Job, turns: Mapping[str, Sequence[Measured]]) -> dict[str, Texts]:
    """What holds for all targets of each mode. turns: what each mode measured, by its name."""
    references: dict[str, str] = {}  # target → mode
    for mode in sorted(modes, key=lambda mode: mode.name != "plain"):
        for target in mode.targets:
            if not _drawn(mode, target, job):
                references.setdefault(target, mode.name)
    order = list(Texts)
    return {mode.name: min(_of(mode, job, turns, references), key=order.index) for mode in modes}


def _of(
    mode: Mode, job: Job, turns: Mapping[str, Sequence[Measured]], references: Mapping[str, str]
) -> Iterator[Texts]:
    for target in mode.targets:
        if _drawn(mode, target, job):
            yield Texts.DRAWN
            continue
        reference, own = turns[references[target]][0], turns[mode.name]
        others = own[1:] if references[target] == mode.name else own
        if not others:
            yield Texts.NOT_COMPARED
        for turn in others:
            yield _answers(turn.answers.get(target, ()), reference.answers.get(target, ()), job.requests)


def _answers(ours: Sequence[Timed], theirs: Sequence[Timed], requests: int) -> Texts:
    """One that is missing differs from any."""
    pairs = list(zip(ours, theirs, strict=False))
    whole = [pair for pair in pairs if not any(one.error for one in pair)]
    if len(pairs) < requests or any(our.token_ids != their.token_ids for our, their in whole):
        return Texts.DIFFER
    return Texts.SAME if len(whole) == len(pairs) else Texts.FAILED


def _drawn(mode: Mode, target: str, job: Job) -> bool:
    """Whether drafts are drawn and rejected: then texts have the right distribution, and are others than plain ones."""
    spec = mode.topology.target(target)
    return job.temperature > 0.0 and spec.verification == "rejection" and bool(spec.drafters.names)


def same_texts(measured: Measured, reference: Measured) -> bool:
    """Whether both served the same targets the same number of requests, at least one, with the same whole answers."""
    pairs = [(answers, reference.answers.get(target, ())) for target, answers in measured.answers.items()]
    same = [_answers(ours, theirs, max(1, len(ours), len(theirs))) is Texts.SAME for ours, theirs in pairs]
    return all(same) and len(same) == len(reference.answers) > 0
