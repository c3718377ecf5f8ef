"""What users see, by simulation: requests with prompts and ends, chance and all, in given settings."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import UserError
from paceline.topology.planner_inputs import DrafterTimes, Group, Inputs
from paceline.topology.planner_steady import Setting, Steady
from paceline.topology.simulation import simulate
from paceline.topology.simulation_world import (
    Outcome,
    Requests,
    SimulatedDrafter,
    SimulatedTarget,
    World,
)

REQUESTS = 12  # each request in flight is followed by so many, the first of which is warm-up
FOREVER = 1e6  # seconds
JITTER = 2e-5  # seconds that messages are late, on average: nodes that always meet at the same instant are no model
MOST_ROUNDS = 20_000  # of all lanes: what a fraction of a second allows
UNBEARABLE_ROUNDS = 2_000_000  # where one target's requests last so much longer than another's rounds


def simulate_mix(inputs: Inputs, settings: Sequence[Setting], rates: Sequence[Steady], seed: int = 0) -> Outcome:
    """All targets with the inputs' requests. rates: what the formulas say, to know how long to look.

    UserError where the rounds of one target are too short beside the requests of another.
    """
    conditions = inputs.conditions
    if conditions.requests is not None:
        return simulate(world(inputs, settings, seconds=FOREVER, requests=conditions.requests, seed=seed))
    life, rounds = 0.0, 0.0
    for group, one in zip(inputs.groups, rates, strict=True):
        passes = conditions.output_tokens / one.acceptance + conditions.prompt_tokens / group.prefill_chunk + 1
        life = max(life, passes * one.cycle.seconds)
        rounds += group.count * one.load.filled / one.cycle.seconds  # a second
    if 3 * life * rounds > UNBEARABLE_ROUNDS:
        quick = min(zip(inputs.groups, rates, strict=True), key=lambda pair: pair[1].cycle.seconds)[0]
        raise UserError(
            f"{quick.names[0]}'s passes are too short beside a request of the slowest target, {life:.3g} s: plan them "
            "apart, or with step times that are more alike"
        )
    seconds = max(3 * life, min(REQUESTS * life, MOST_ROUNDS / rounds))
    return simulate(world(inputs, settings, seconds=seconds, warm_up=life, seed=seed))


def world(
    inputs: Inputs,
    settings: Sequence[Setting],
    *,
    seconds: float,
    warm_up: float = 0.0,
    requests: int | None = None,
    seed: int = 0,
) -> World:
    """The same as a world to simulate. requests: how many come to each target, None for no end."""
    order = {name: index for index, name in enumerate(inputs.drafters)}
    targets = []
    for group, setting in zip(inputs.groups, settings, strict=True):
        target = _target(group, setting, order, inputs, requests)
        targets += [target] * group.count
    drafters = tuple(_drafter(drafter) for drafter in inputs.drafters.values())
    return World(drafters, tuple(targets), seconds=seconds, warm_up=warm_up, jitter=JITTER, seed=seed)


def _drafter(drafter: DrafterTimes) -> SimulatedDrafter:
    return SimulatedDrafter(
        step=drafter.step,
        token_ms=drafter.token_ms,
        max_messages=0 if drafter.messages == float("inf") else int(drafter.messages),
        max_sequences=0 if drafter.sequences == float("inf") else int(drafter.sequences),
        max_sessions=drafter.max_sessions,
    )


def _target(
    group: Group, setting: Setting, order: dict[str, int], inputs: Inputs, requests: int | None
) -> SimulatedTarget:
    conditions = inputs.conditions
    return SimulatedTarget(
        verify=group.verify,
        drafters=tuple(order[name] for name in group.drafters),
        policy=group.policy,
        agreement=group.agreement,
        draft_length=setting.draft_length,
        lanes=setting.lanes,
        rtt=group.rtt,
        max_sessions=group.max_sessions,
        prefill_chunk=group.prefill_chunk,
        weight=group.weight,
        deadline=group.deadline,
        verify_budget=group.verify_budget,
        requests=Requests(((conditions.prompt_tokens, conditions.output_tokens),), group.in_flight, count=requests),
        group=group.names[0],
    )
