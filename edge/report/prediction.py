"""What the planner says of a run, with the times and the acceptance that were measured in it, beside the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.errors import UserError
from paceline.core.profile import StepTimes
from paceline.edge.report.analysis import Analysis
from paceline.topology.planner_inputs import Conditions, gather
from paceline.topology.planner_mix import simulate_mix
from paceline.topology.planner_steady import best_settings, choices_of, steady
from paceline.topology.spec import Profile, Topology

ENOUGH_STEPS = 5  # of one batch, for its time to count
MOST_POINTS = 32


@dataclass(frozen=True)
class Compared:
    """One figure of the drafter or of its targets, predicted and measured."""

    what: str
    unit: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Prediction:
    """why: what is missing where nothing could be predicted."""

    rows: tuple[Compared, ...] = ()
    why: str = ""


def predict(analysis: Analysis) -> Prediction:
    """The planner's formulas for this drafter's targets; never raises for what a recording lacks."""
    try:
        topology = Topology.model_validate(analysis.recording.info["topology"])
    except (KeyError, ValueError):
        return Prediction(why="the recording holds no topology that this version can read")
    agreement = analysis.agreement
    if agreement is None or not len(analysis.draft_steps):
        return Prediction(why="no draft was verified while it was recorded")
    names = [name for name in analysis.recording.targets if name in {target.name for target in topology.targets}]
    profiles = {analysis.recording.name: _drafter_profile(analysis)}
    missing = []
    for name in names:
        profile = _target_profile(analysis, topology, name)
        if profile is None:
            missing.append(name)
        else:
            profiles[name] = profile
    if missing or not names:
        lacking = ", ".join(missing) or "the targets"
        return Prediction(why=f"the time of a verification is not known: no status of {lacking} beside the recording")
    return _formulas(analysis, _served_by(topology, analysis.recording.name, names), profiles, agreement)


def _formulas(analysis: Analysis, topology: Topology, profiles: dict[str, Profile], agreement: float) -> Prediction:
    numbers = {name: place for place, name in enumerate(analysis.recording.targets)}
    places = [numbers[target.name] for target in topology.targets]
    in_flight = max(1, round(float(np.mean([analysis.in_flight(place) for place in places]))))
    conditions = Conditions(in_flight=in_flight, agreement=agreement, rtt=_rtt(analysis, topology, profiles))
    try:
        inputs = gather(topology, conditions, profiles)
    except UserError as error:
        return Prediction(why=str(error))
    settings = best_settings(inputs.groups, inputs.drafters, [choices_of(group) for group in inputs.groups])
    rates = steady(inputs.groups, inputs.drafters, settings)
    counts = np.array([group.count for group in inputs.groups], np.float64)

    def mean(values: list[float]) -> float:
        return float(np.average(values, weights=counts))

    busy = simulate_mix(inputs, settings, rates).utilization[0]
    return Prediction(
        (
            Compared("draft", "ms", 1e3 * mean([r.cycle.draft for r in rates]), 1e3 * _mean(analysis.rounds["work"])),
            Compared("wait", "ms", 1e3 * mean([r.cycle.wait for r in rates]), 1e3 * _mean(analysis.rounds["queue"])),
            Compared("round", "ms", 1e3 * mean([r.cycle.seconds for r in rates]), 1e3 * _mean(analysis.cycle)),
            Compared("acceptance length", "tokens", mean([r.acceptance for r in rates]), analysis.acceptance_length),
            Compared(
                "a target's rate",
                "tokens/s",
                mean([r.tokens_per_s for r in rates]),
                _mean([analysis.committed_rate(place) for place in places]),
            ),
            Compared("drafter busy", "%", 100 * busy, 100 * analysis.utilization),
        )
    )


def _served_by(topology: Topology, drafter: str, names: list[str]) -> Topology:
    """The part of a topology that was seen: this drafter and the targets that came to it."""
    only: Any = topology.drafter(drafter)
    targets = [
        target.model_copy(update={"drafters": target.drafters.model_copy(update={"names": (drafter,)})})
        for target in topology.targets
        if target.name in names
    ]
    return topology.model_copy(update={"drafters": (only,), "targets": tuple(targets)})


def _drafter_profile(analysis: Analysis) -> Profile:
    """What the steps of each batch took on average; larger ones are never quicker."""
    steps = analysis.draft_steps
    sizes, counts = np.unique(steps["batch"], return_counts=True)
    common = sizes[counts >= min(ENOUGH_STEPS, int(np.max(counts)))][:MOST_POINTS]
    times = np.maximum.accumulate([1e3 * float(np.mean(steps["total"][steps["batch"] == size])) for size in common])
    step = StepTimes(tuple((int(size), float(ms)) for size, ms in zip(common, times, strict=True)))
    return Profile.model_construct(
        _fields_set={"step_ms", "agreement"}, step_ms=step, agreement=analysis.agreement, prompt_token_ms=0.0
    )


def _target_profile(analysis: Analysis, topology: Topology, name: str) -> Profile | None:
    """An emulated target's own; else what its status file says of its passes."""
    target = topology.target(name)
    if target.engine == "emulated":
        return target.profile or Profile()
    verify = analysis.recording.statuses.get(name, {}).get("verify_ms") or {}
    if not verify.get("count"):
        return None
    return Profile.model_construct(_fields_set={"verify_ms"}, verify_ms=StepTimes.constant(float(verify["mean"])))


def _rtt(analysis: Analysis, topology: Topology, profiles: dict[str, Profile]) -> float | None:
    """Between machines: what is left of the time away once the verification is taken off. None on one machine."""
    drafter = topology.drafters[0]
    if all(target.host == drafter.host for target in topology.targets):
        return None
    verify = np.mean([profiles[target.name].verify_ms.points[0][1] for target in topology.targets]) / 1e3
    return max(0.0, float(np.median(analysis.away)) - float(verify)) if len(analysis.away) else 0.0


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
