"""Over a link with every fault there is, no token differs from plain decoding: a short run of the benchmark."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "identity.py"


@pytest.fixture(scope="module")
def identity() -> ModuleType:
    """The benchmark as a module; `benchmarks` is no package, and its files import each other as scripts do."""
    spec = importlib.util.spec_from_file_location("identity_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARK.parent)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def worlds(identity: ModuleType) -> ModuleType:
    """Where the benchmark plans its worlds; imported with it."""
    return sys.modules[identity.random_plan.__module__]


def test_no_token_differs_under_faults(identity: ModuleType) -> None:
    """Random worlds: every id, text and end is plain decoding's, nothing leaks, and every fault really happened."""
    result = identity.compare(15_000, requests=12)
    assert result.failures == []
    assert result.differing == 0
    assert result.tokens >= 15_000
    assert result.emitted_with_draft > 2 * result.drafted_rounds
    assert result.drafted_rounds > 0.15 * result.rounds
    faults = {"lost", "doubled", "delayed", "nonsense", "restarts", "outages", "cancelled", "old link"}
    faults |= {"claims of room", "reconfigurations", "branches taken"}
    assert {name for name in faults if result.faults[name] == 0} == set()


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_a_perfect_drafter_on_a_good_link_is_used(identity: ModuleType, worlds: ModuleType, lanes: int) -> None:
    """Without faults, a drafter that agrees always has everything accepted in most rounds."""
    plan = worlds.Plan(seed=lanes, faults=worlds.Faults(latency=0.001), lanes=lanes, agreement=1.0)
    world = identity.World(plan, requests=12)
    world.run()
    result = identity.compare_world(world)
    assert result.failures == [] and world.leaks() == []
    assert result.drafted_rounds > 0.6 * result.rounds
    assert result.emitted_with_draft > 4 * result.drafted_rounds


def test_a_difference_would_be_seen(identity: ModuleType, worlds: ModuleType) -> None:
    """One wrong token of one request is found and counted."""
    world = identity.World(worlds.Plan(seed=1, faults=worlds.Faults()), requests=4)
    world.run()
    output = world.outputs["r2"]
    output.token_ids[-1] ^= 1
    result = identity.compare_world(world)
    assert (result.differing, len(result.failures)) == (1, 1)
    assert "r2" in result.failures[0]


def test_a_world_repeats_itself(identity: ModuleType) -> None:
    """The same plan gives the same messages and faults again, so that a failure can be studied."""
    plan = replace(identity.random_plan(5), lanes=2, drafters=3, policy="spread")
    seen = []
    for _ in range(2):
        world = identity.World(plan, requests=6)
        world.run()
        seen.append((dict(world.seen), world.clock.now()))
    assert seen[0] == seen[1]
    assert seen[0][0]["messages"] > 20
