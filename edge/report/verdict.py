"""What limits a drafter, in a sentence or two: the first things to look at, with the figures that say so."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.edge.report.analysis import STAGES, Analysis
from paceline.edge.report.recording import AHEAD, DRAFT, READ

FULL = 0.85  # share of the time in forwards from which on the drafter itself is the limit
MATTERS = 0.15  # share of a round that is worth a sentence
LOW_ACCEPTANCE = 0.4
SHORT = 60.0  # seconds; sensors are asked twice in one


def sentences(analysis: Analysis) -> list[str]:
    """The limit first, then what else stands out."""
    if not len(analysis.rounds):
        return ["Nothing was drafted while this was recorded.", *_damage(analysis)]
    return [_limit(analysis), *_remarks(analysis)]


def shares(analysis: Analysis) -> dict[str, float]:
    """Of a round at the drafter, the share of each stage."""
    means = {name: float(np.mean(values)) for name, values in analysis.stages.items()}
    whole = sum(means.values())
    return {name: mean / whole if whole > 0 else 0.0 for name, mean in means.items()}


def _limit(analysis: Analysis) -> str:
    parts = shares(analysis)
    latency, away = float(np.mean(analysis.latency)), float(np.mean(analysis.away)) if len(analysis.away) else 0.0
    busy = analysis.utilization
    work = f"forwards take {busy:.0%} of the time"
    if ahead := analysis.busy(AHEAD):
        work += f", drafting ahead {ahead:.0%} besides"
    if parts["queue"] > 0.5 and busy > FULL:
        wait = float(np.mean(analysis.rounds["queue"]))
        return (
            f"The queue limits: {work}, and a Draft waits {wait * 1e3:.3g} ms of its "
            f"{latency * 1e3:.3g} ms for a place. Fewer targets, a second drafter or a larger max_batch would help."
        )
    if busy > FULL:
        kind = "reading prompts" if analysis.busy(READ) > analysis.busy(DRAFT) else "its token steps"
        return f"The drafter limits, by {kind}: {work}. A faster model, runtime or power mode would help."
    if away > latency:
        return (
            f"Link and targets limit: a session is away for {away * 1e3:.3g} ms of its round and here for "
            f"{latency * 1e3:.3g} ms, while {work}. The drafter could serve more targets."
        )
    name = max(parts, key=lambda part: parts[part])
    return (
        f"A round is at the drafter for {latency * 1e3:.3g} ms and away for {away * 1e3:.3g} ms; most of it: "
        f"{STAGES[name]}, {parts[name]:.0%}. {work[0].upper()}{work[1:]}."
    )


def _remarks(analysis: Analysis) -> Iterator[str]:
    device = analysis.device
    if throttled := device.throttled:
        yield f"The board was throttled meanwhile ({', '.join(throttled)}): times are longer than they need be."
    if lowered := device.lowered_clock:
        name, highest, usual = lowered
        yield (
            f"The {name.upper()} mostly ran at {usual:.0f} MHz of the {highest:.0f} MHz that it reached: pin its "
            "clock, or look at the power mode and the temperature."
        )
    parts = shares(analysis)
    for stage in ("catch_up", "choose", "loop", "send"):
        if parts[stage] > MATTERS:
            yield f"{STAGES[stage][0].upper()}{STAGES[stage][1:]}: {parts[stage]:.0%} of a round at the drafter."
    agreement = analysis.agreement
    if agreement is not None and agreement < LOW_ACCEPTANCE:
        yield f"Only {agreement:.0%} of the proposals that targets looked at were right: a better drafter pays."
    if analysis.recording.lost:
        yield f"{analysis.recording.lost} records were overwritten before they could be written."
    yield from _damage(analysis)
    if analysis.recording.cut:
        yield "The run was longer than what is kept: these are its last minutes."
    elif analysis.seconds < SHORT:
        yield f"The run lasted {analysis.seconds:.3g} s: below a minute, power, energy and percentiles are rough."


def _damage(analysis: Analysis) -> Iterator[str]:
    if damaged := analysis.recording.damaged:
        yield f"Damaged parts of the recording were left out: {damaged} blocks or records."
