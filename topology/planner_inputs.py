"""What a plan is made from: the topology's numbers with those given beside it, and which of them are missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.profile import StepTimes
from paceline.topology.spec import DrafterSpec, Profile, TargetSpec, Topology
from paceline.topology.spec_bundles import drafts_ahead

LOCAL_RTT = 1e-4  # seconds, between processes of one machine
NGRAM_STEP = StepTimes.constant(0.05)  # looking n-grams up, in Python


@dataclass(frozen=True)
class Conditions:
    """What users ask for and how far apart the nodes are.

    rtt: seconds, up + down, of every link; None where nobody said. in_flight: requests at each target at all times.
    requests: how many each target gets in all, the first ones at once; None for no end; so many are in flight at the
    most. agreement: overrides the profiles'.
    """

    prompt_tokens: int = 128
    output_tokens: int = 256
    in_flight: int = 1
    rtt: float | None = None
    agreement: float | None = None
    requests: int | None = None


@dataclass(frozen=True)
class DrafterTimes:
    """One drafter in numbers. messages: lanes in a step; sequences: sessions in a step (inf: any number).

    drafts_ahead: whether it can.
    """

    name: str
    step: StepTimes
    token_ms: float
    messages: float
    sequences: float
    max_sessions: int
    drafts_ahead: bool = True


@dataclass(frozen=True)
class Group:
    """`count` targets that are alike, and how they are set. lanes and draft_length are None for `auto`."""

    names: tuple[str, ...]
    count: int
    drafters: tuple[str, ...]
    verify: StepTimes
    agreement: float
    rtt: float
    in_flight: int
    lanes: int | None
    draft_length: int | None
    max_sessions: int
    prefill_chunk: int
    weight: float
    policy: Literal["failover", "spread"]
    deadline: float | None
    verify_budget: int | None = None
    draft_ahead: int = 0
    second_choice: float = 0.4

    @property
    def decoding(self) -> int:
        """Requests that are decoded at a time; others wait."""
        return max(1, min(self.in_flight, self.max_sessions))


@dataclass(frozen=True)
class Inputs:
    """Everything a plan depends on."""

    groups: tuple[Group, ...]
    drafters: Mapping[str, DrafterTimes]
    conditions: Conditions
    emulated: bool


def gather(topology: Topology, conditions: Conditions, profiles: Mapping[str, Profile]) -> Inputs:
    """Raises UserError with one sentence when numbers are missing. profiles: by node, in place of the topology's."""
    if conditions.requests is not None:
        conditions = replace(conditions, in_flight=min(conditions.in_flight, conditions.requests))
    nodes = {node.name: node for node in nodes_of(topology)}
    for name in profiles:
        if name not in nodes:
            raise UserError(f"--profile {name}=…: {topology.name} has no node {name}; it has {', '.join(nodes)}")
    missing = list(_missing(topology, conditions, profiles))
    if missing:
        raise UserError(_what_is_missing(missing))
    merged = {name: profiles.get(name) or node.profile or Profile() for name, node in nodes.items()}
    rtt = _rtt(topology, conditions)
    used = [drafter for drafter in topology.drafters if topology.targets_of(drafter)]
    return Inputs(
        groups=_groups([_group(target, topology, merged, conditions, rtt) for target in topology.targets]),
        drafters={drafter.name: _drafter_times(drafter, merged[drafter.name]) for drafter in used},
        conditions=replace(conditions, rtt=rtt),
        emulated=any(target.engine == "emulated" for target in topology.targets),
    )


def nodes_of(topology: Topology) -> list[DrafterSpec | TargetSpec]:
    """Drafters, then targets."""
    return [*topology.drafters, *topology.targets]


def _missing(topology: Topology, conditions: Conditions, profiles: Mapping[str, Profile]) -> Iterator[tuple[str, str]]:
    """(node, number) of what is neither in the topology nor given."""
    for target in topology.targets:
        if target.engine != "emulated" and not _says(target, profiles, "verify_ms"):
            yield target.name, "verify_ms"
    for drafter in topology.drafters:
        if drafter.runtime == "emulated" or not topology.targets_of(drafter):
            continue
        if drafter.strategy != "ngram" and not _says(drafter, profiles, "step_ms"):
            yield drafter.name, "step_ms"
        if conditions.agreement is None and not _says(drafter, profiles, "agreement"):
            yield drafter.name, "agreement"


def _says(node: DrafterSpec | TargetSpec, profiles: Mapping[str, Profile], key: str) -> bool:
    profile = profiles.get(node.name) or node.profile
    return profile is not None and key in profile.model_fields_set


def _what_is_missing(missing: list[tuple[str, str]]) -> str:
    by_node: dict[str, list[str]] = {}
    for node, number in missing:
        by_node.setdefault(node, []).append(number)
    numbers = "; ".join(f"{node}: {' and '.join(names)}" for node, names in by_node.items())
    how = "measure each with `paceline profile MODEL` on its machine and give the files as --profile NODE=FILE"
    agreement = "; agreement (accepted share of a first draft token) may also be given as --agreement 0.8"
    return f"not known are {numbers}: {how}{agreement if any(n == 'agreement' for _, n in missing) else ''}"


def _rtt(topology: Topology, conditions: Conditions) -> float:
    if conditions.rtt is not None:
        return conditions.rtt
    for target in topology.targets:
        for drafter in topology.drafters_of(target):
            if drafter.host != target.host:
                raise UserError(
                    f"{target.name} and {drafter.name} are on different machines: say how long a round trip between "
                    "them takes, as --rtt 10ms (`paceline doctor` or ping measures it)"
                )
    return 0.0 if topology.link.transport == "memory" else LOCAL_RTT


def _drafter_times(drafter: DrafterSpec, profile: Profile) -> DrafterTimes:
    """An emulated drafter counts max_batch in Draft messages, a real one in sessions."""
    emulated = drafter.runtime == "emulated"
    ngram = drafter.strategy == "ngram" and "step_ms" not in profile.model_fields_set
    return DrafterTimes(
        name=drafter.name,
        step=NGRAM_STEP if ngram else profile.step_ms,
        token_ms=profile.prompt_token_ms,
        messages=drafter.max_batch if emulated else math.inf,
        sequences=math.inf if emulated else drafter.max_batch,
        max_sessions=drafter.max_sessions,
        drafts_ahead=drafts_ahead(drafter),
    )


def _group(
    target: TargetSpec, topology: Topology, merged: Mapping[str, Profile], conditions: Conditions, rtt: float
) -> Group:
    """A target as a group of one. With failover the first drafter serves, with spread all of them."""
    drafters = target.drafters.names[: 1 if target.drafters.policy == "failover" else None]
    agreement = conditions.agreement
    if agreement is None:
        agreement = sum(merged[name].agreement for name in drafters) / max(1, len(drafters))
    return Group(
        names=(target.name,),
        count=1,
        drafters=drafters,
        verify=merged[target.name].verify_ms,
        agreement=agreement,
        rtt=rtt,
        in_flight=conditions.in_flight,
        lanes=None if target.lanes == "auto" else target.lanes,
        draft_length=None if target.draft_length == "auto" else target.draft_length,
        max_sessions=target.max_sessions,
        prefill_chunk=target.prefill_chunk,
        weight=target.weight,
        policy=target.drafters.policy,
        deadline=target.deadline,
        verify_budget=target.verify_budget,
        draft_ahead=target.draft_ahead if drafters else 0,
        second_choice=sum(merged[name].second_choice for name in drafters) / max(1, len(drafters)),
    )


def _groups(singles: list[Group]) -> tuple[Group, ...]:
    """Puts equal targets together."""
    merged: dict[Group, list[str]] = {}
    for single in singles:
        merged.setdefault(replace(single, names=()), []).extend(single.names)
    return tuple(replace(group, names=tuple(names), count=len(names)) for group, names in merged.items())
