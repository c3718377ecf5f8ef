"""A report as JSON. Keys are only ever added within one `format`; times are in milliseconds."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.edge.report.analysis import STAGES, Analysis, Spread
from paceline.edge.report.prediction import Prediction, predict
from paceline.edge.report.recording import AHEAD, DRAFT, READ
from paceline.edge.report.verdict import sentences

FORMAT = 1


def summary(analysis: Analysis) -> dict[str, Any]:
    """Everything that tables and pages show, without the curves."""
    recording, device = analysis.recording, analysis.device
    start, end = analysis.span
    known = int(np.sum(analysis.rounds["proposed"][analysis.accepted >= 0]))
    return {
        **recording.info["drafter_spec"],
        "format": FORMAT,
        "run": analysis.title,
        "drafter": recording.name,
        "emulated": recording.info["drafter_spec"]["runtime"] == "emulated",
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recording.wall(start))),
        "seconds": end - start,
        "targets": recording.targets,
        "rounds": len(analysis.rounds),
        "rounds_ahead": analysis.rounds_ahead,
        "sessions": len(np.unique(analysis.all_rounds[["target", "session"]])),
        "steps": len(analysis.draft_steps),
        "busy": {
            "drafting": analysis.busy(DRAFT),
            "reading": analysis.busy(READ),
            "ahead": analysis.busy(AHEAD),
            "in_all": analysis.utilization,
        },
        "latency_ms": milliseconds(analysis.latency),
        "stages_ms": {name: milliseconds(values) for name, values in analysis.stages.items()},
        "stage_names": STAGES,
        "away_ms": milliseconds(analysis.away),
        "round_ms": milliseconds(analysis.cycle),
        "step_ms": milliseconds(analysis.draft_steps["total"]),
        "batch": float(np.mean(analysis.draft_steps["batch"])) if len(analysis.draft_steps) else 0.0,
        "tokens": {
            "drafted": analysis.drafted_tokens,
            "verified": known,
            "accepted": analysis.accepted_tokens,
            "read": int(np.sum(recording.steps["read"], dtype=np.int64)),
            "drafted_per_s": analysis.drafted_tokens / (end - start) if end > start else 0.0,
        },
        "acceptance_length": analysis.acceptance_length,
        "agreement": analysis.agreement,
        "energy": _energy(analysis),
        "temperature": {name.removeprefix("temp."): _range(device.channel(name)[1]) for name in device.names("temp.")},
        "clock_mhz": {name.removeprefix("clock."): _range(device.channel(name)[1]) for name in device.names("clock.")},
        "load": {name.removeprefix("load."): _range(device.channel(name)[1]) for name in device.names("load.")},
        "memory_bytes": {n.removeprefix("memory."): _range(device.channel(n)[1]) for n in device.names("memory.")},
        "throttled": device.throttled,
        "sensors": recording.info["sensors"],
        "environment": recording.info["environment"],
        "prediction": _prediction(predict(analysis)),
        "lost": recording.lost,
        "damaged": recording.damaged,
        "cut": recording.cut,
        "limits": sentences(analysis),
    }


def milliseconds(values: NDArray[Any]) -> dict[str, float]:
    """mean, p50, p90 and p99 of seconds."""
    return {name: 1e3 * value for name, value in asdict(Spread.of(values)).items()}


def _energy(analysis: Analysis) -> dict[str, Any]:
    """Joules while drafting, and in all; a token's are those while drafting."""
    device = analysis.device
    busy, whole = device.busy_joules, device.joules
    watts = device.channel("power")[1]
    return {
        "watts": _range(watts),
        "busy_joules": busy,
        "joules": whole,
        "joules_a_drafted_token": _over(busy, analysis.drafted_tokens),
        "joules_an_accepted_token": _over(busy, analysis.accepted_tokens),
        "joules_an_accepted_token_with_pauses": _over(whole, analysis.accepted_tokens),
    }


def _over(joules: float | None, tokens: int) -> float | None:
    return joules / tokens if joules is not None and tokens else None


def _range(values: NDArray[Any]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {"min": float(np.min(values)), "mean": float(np.mean(values)), "max": float(np.max(values))}


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in prediction.rows], "why": prediction.why}
