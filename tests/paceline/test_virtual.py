"""Virtual time: nodes overlap as processes would, and the formulas of the cost model come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cloud.requests import Request
from paceline.core.costs import Situation, throughput
from paceline.core.profile import StepTimes
from paceline.core.sampling import Sampling
from paceline.topology.spec import Topology, parse_topology
from paceline.virtual import VirtualWorld

LANGUAGE = {"vocabulary_size": 64, "seed": 3}


def topology(
    targets: int = 1,
    *,
    step_ms: Any = 2,
    verify_ms: Any = 20,
    agreement: float = 0.8,
    max_batch: int = 1,
    **target: Any,
) -> Topology:
    """Emulated targets of one emulated drafter."""
    drafter = {
        "name": "d",
        "model": "toy",
        "runtime": "emulated",
        "max_batch": max_batch,
        "max_sessions": 1024,
        "max_context": 8192,
        "profile": {**LANGUAGE, "step_ms": step_ms, "agreement": agreement},
    }
    common = {"model": "toy", "engine": "emulated", "drafters": {"names": ["d"]}, "max_context": 8192, **target}
    profile = {**LANGUAGE, "verify_ms": verify_ms}
    data = {
        "version": 1,
        "name": "virtual",
        "drafters": [drafter],
        "targets": [{"name": f"t{index}", "profile": profile, **common} for index in range(targets)],
    }
    return parse_topology(yaml.safe_dump(data), "virtual.yaml", Path())


def started(world: VirtualWorld, sessions: int = 1, tokens: int = 6000) -> VirtualWorld:
    """The world with so many requests at each target, which all end after so many tokens."""
    number = 0
    for target in world.targets.values():
        for _ in range(sessions):
            number += 1
            prompt = (number % 64, number * 7 % 64, 5)
            target.submit(Request(f"r{number}", prompt, Sampling(seed=number, temperature=0.0), tokens))
    return world


def tokens_a_second(world: VirtualWorld, warm: float = 1.0, seconds: float = 8.0) -> float:
    """Of all targets together, after a warm-up."""
    world.run(warm)
    before = sum(target.engine.statistics.tokens for target in world.targets.values())
    world.run(warm + seconds)
    return (sum(target.engine.statistics.tokens for target in world.targets.values()) - before) / seconds


@pytest.mark.parametrize("targets", [1, 2, 4, 8])
def test_a_star_with_serial_service_runs_at_the_rate_of_the_formula(targets: int) -> None:
    """N targets at one drafter that serves one Draft at a time: T = max(N·S, S + V)."""
    case = Situation(StepTimes.constant(2), StepTimes.constant(20), 0.8, targets=targets)
    measured = tokens_a_second(started(VirtualWorld(topology(targets, draft_length=4))))
    assert measured == pytest.approx(targets * throughput(case, 4), rel=0.05)


def test_two_lanes_hide_drafting_behind_verifying() -> None:
    """At S = V and equal lane size two lanes do nearly twice the rounds of one."""
    one = tokens_a_second(started(VirtualWorld(topology(step_ms=5, draft_length=4)), 4))
    two = tokens_a_second(started(VirtualWorld(topology(step_ms=5, draft_length=4, lanes=2)), 8))
    assert two / one > 1.85


def test_a_world_repeats_itself() -> None:
    """Virtual time has no luck in it: the same topology gives the same tokens at the same times."""
    arrivals = []
    for _ in range(2):
        world = started(VirtualWorld(topology(2, draft_length="auto", lanes="auto"), rtt=0.003), 3, 60)
        world.run(3.0)
        arrivals.append([a.arrivals for target in world.targets.values() for a in target.answers.values()])
    assert arrivals[0] == arrivals[1]
    assert all(sum(count for _, count in one) == 60 for one in arrivals[0])


def test_a_world_that_is_looked_at_on_the_way_goes_on_as_it_would_have() -> None:
    """Stopped after every published round, while messages have come that nobody has looked at yet."""
    arrivals = []
    for step in (3.0, None):
        world = started(VirtualWorld(topology(lanes=2, draft_length=4)), 4, 120)
        (target,) = world.targets.values()
        statistics = target.engine.statistics
        while step is None and statistics.tokens < 4 * 120:
            world.run(lambda tokens=statistics.tokens, counted=statistics: counted.tokens > tokens)  # type: ignore[misc]
        world.run(3.0)
        arrivals.append([answer.arrivals for answer in target.answers.values()])
    assert arrivals[0] == arrivals[1]


@pytest.mark.parametrize("lanes", [1, 3, "auto"])
@pytest.mark.parametrize("draft_length", [0, 5, "auto"])
def test_texts_do_not_depend_on_lanes_or_draft_length(lanes: Any, draft_length: Any) -> None:
    """Every setting gives the tokens of plain decoding."""
    expected = started(VirtualWorld(topology(draft_length=0)), 5, 80)
    world = started(VirtualWorld(topology(draft_length=draft_length, lanes=lanes), rtt=0.01), 5, 80)
    for one in (expected, world):
        one.run(30.0)
    ours, theirs = (
        {name: answer.token_ids for name, answer in one.targets["t0"].answers.items()} for one in (world, expected)
    )
    assert ours == theirs
    assert all(len(ids) == 80 for ids in ours.values())


def test_a_link_that_takes_long_is_waited_for() -> None:
    """With a round trip of 30 ms a round takes S + V + 30 ms."""
    case = Situation(StepTimes.constant(2), StepTimes.constant(20), 0.8, rtt=0.03)
    measured = tokens_a_second(started(VirtualWorld(topology(draft_length=4), rtt=0.03)))
    assert measured == pytest.approx(throughput(case, 4), rel=0.05)


def test_sixty_four_targets_share_a_process() -> None:
    """64 targets run for a second of virtual time, all of them at the same pace."""
    world = started(VirtualWorld(topology(64, draft_length=2, max_batch=64)))
    tokens_a_second(world, 0.5, 1.0)
    counts = [target.engine.statistics.tokens for target in world.targets.values()]
    assert min(counts) > 0.6 * max(counts) > 0
