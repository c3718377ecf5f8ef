"""The planner's figures against the real engines and drafters on virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.bench import Job, Mode, tokens_per_second, toy_prompts
from paceline.bench_virtual import measure
from paceline.topology.planner import predicted_tokens_per_s
from paceline.topology.planner_inputs import Conditions
from paceline.topology.spec import parse_topology

LANGUAGE = {"vocabulary_size": 64, "seed": 3}


@pytest.mark.parametrize(
    ("targets", "in_flight", "lanes", "rtt", "step_ms", "max_batch", "agreement", "budget"),
    [
        (1, 1, 1, 0.0, 2.0, 1, 0.8, None),
        (1, 1, 1, 0.08, 5.0, 1, 0.95, None),
        (1, 16, 1, 0.0, 5.0, 1, 0.95, None),
        (1, 16, 2, 0.02, 5.0, 1, 0.8, None),
        (1, 8, 2, 0.0, 10.0, 1, 0.3, None),
        (1, 8, 2, 0.02, 10.0, 1, 0.95, None),
        (1, 32, 1, 0.0, 10.0, 1, 0.8, None),
        (1, 16, 2, 0.0, 2.0, 1, 0.8, 12),
        (8, 1, 1, 0.005, 2.0, 1, 0.8, None),
        (8, 2, 1, 0.005, {1: 2.0, 64: 4.0}, 4, 0.8, None),
    ],
)
def test_predicted_rates_are_near_measured_ones(
    targets: int,
    in_flight: int,
    lanes: int,
    rtt: float,
    step_ms: Any,
    max_batch: int,
    agreement: float,
    budget: int | None,
) -> None:
    """Alone and under load, near and far, one lane and two, a serial star and a batching one, a full drafter, a budget:
    within 10 %."""
    drafter = {"name": "d", "model": "toy", "runtime": "emulated", "max_batch": max_batch, "max_sessions": 256}
    drafter["profile"] = {**LANGUAGE, "step_ms": step_ms, "agreement": agreement}
    target = {"model": "toy", "engine": "emulated", "lanes": lanes, "draft_length": 4, "drafters": {"names": ["d"]}}
    target["profile"] = {**LANGUAGE, "verify_ms": {1: 20.0, 64: 30.0, 256: 60.0}}
    if budget is not None:
        target["verify_budget"] = budget
    named = [{"name": f"t{index}", **target} for index in range(targets)]
    text = yaml.safe_dump({"version": 1, "name": "star", "drafters": [drafter], "targets": named})
    topology = parse_topology(text, "star.yaml", Path())
    requests = max(16 // targets, 3 * in_flight)
    job = Job(toy_prompts(requests, 61, 64), requests, in_flight, max_tokens=64)
    measured = measure(Mode("star", topology, tuple(one["name"] for one in named)), job, rtt)
    rate = sum(map(tokens_per_second, measured.answers.values()))
    predicted = predicted_tokens_per_s(topology, Conditions(61, 64, in_flight, rtt, requests=requests))
    assert predicted == pytest.approx(rate, rel=0.10)
