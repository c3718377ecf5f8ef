"""What a topology will do, before anything is started: rounds, rates, what users see, memory, links, and advice.

Formulas (core/costs.py, planner_cycles.py) give rounds, N_full, N_break-even and the candidates for the best
setting; a short simulation of each candidate with the requests given says what users see of it. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.errors import UserError
from paceline.topology.planner_advice import sentences
from paceline.topology.planner_ahead import ahead_tokens_per_s, drafts_ahead
from paceline.topology.planner_inputs import Conditions, Group, Inputs, gather, nodes_of
from paceline.topology.planner_mix import simulate_mix
from paceline.topology.planner_resources import Memory, Traffic, memory, traffic
from paceline.topology.planner_steady import (
    PLAIN,
    Setting,
    Steady,
    best_settings,
    choices_of,
    n_break_even,
    n_full,
    steady,
)
from paceline.topology.simulation_world import Figures, Outcome
from paceline.topology.spec import Profile, Topology

ENOUGH_TOKENS, MOST_RUNS = 16_384, 16
FORMAT = 1  # of the JSON; grows when a key changes its meaning


@dataclass(frozen=True)
class Case:
    """All groups in one setting each: what the formulas say, and what a simulation does."""

    settings: tuple[Setting, ...]
    rates: tuple[Steady, ...]
    outcome: Outcome

    def figures(self, group: Group) -> Figures:
        """What the group's users see."""
        return self.outcome.groups[group.names[0]]


@dataclass(frozen=True)
class GroupPlan:
    """Targets that are alike. n_full and n_break_even: targets on one drafter; None for "does not speculate", and for
    "no limit"."""

    group: Group
    configured: Steady
    sees: Figures
    plain: Figures
    best: Setting
    best_sees: Figures
    n_full: int | None
    n_break_even: int | None
    traffic: Traffic | None

    @property
    def speculate(self) -> bool:
        """Whether any setting beats plain decoding."""
        return self.best != PLAIN


@dataclass(frozen=True)
class DrafterPlan:
    """One drafter. utilization: share of time it works, by the formulas; lanes of its that are drafted for at a time
    where that is more than one."""

    name: str
    targets: int
    utilization: float
    drafting: float


@dataclass(frozen=True)
class Plan:
    """Everything that `paceline plan` shows."""

    name: str
    inputs: Inputs
    groups: tuple[GroupPlan, ...]
    drafters: tuple[DrafterPlan, ...]
    memory: tuple[Memory, ...]
    advice: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of all targets as they are set."""
        return sum(one.group.count * one.sees.tokens_per_s for one in self.groups)

    @property
    def plain_tokens_per_s(self) -> float:
        """Of all targets without drafters."""
        return sum(one.group.count * one.plain.tokens_per_s for one in self.groups)


def plan(
    topology: Topology, conditions: Conditions | None = None, profiles: Mapping[str, Profile] | None = None
) -> Plan:
    """The plan of a topology. profiles: step times by node, in place of the topology's own.

    Raises UserError with one sentence where numbers are missing.
    """
    inputs = gather(topology, conditions or Conditions(), profiles or {})
    configured = _case(inputs, _configured(inputs))
    plain = _case(inputs, [PLAIN] * len(inputs.groups))
    best = _best(inputs, configured, plain)
    groups = tuple(_group_plan(inputs, i, configured, plain, best) for i in range(len(inputs.groups)))
    return Plan(
        name=topology.name,
        inputs=inputs,
        groups=groups,
        drafters=tuple(_drafter_plan(name, inputs, configured) for name in inputs.drafters),
        memory=tuple(found for node in nodes_of(topology) if (found := memory(node))),
        advice=tuple(sentences(inputs, groups)),
    )


def predicted_tokens_per_s(
    topology: Topology, conditions: Conditions, profiles: Mapping[str, Profile] | None = None
) -> float:
    """Of all targets as they are set, and nothing else of the plan: what a measurement is compared with. A few requests
    say little, so several runs of them are averaged.

    Drafting ahead is not simulated: there it is what the formula says, and a UserError where that does not apply.
    """
    inputs = gather(topology, conditions, profiles or {})
    for group in inputs.groups:
        if drafts_ahead(group, inputs) and group.draft_length != 0:
            if (ahead := ahead_tokens_per_s(group, inputs)) is not None:
                return ahead
            raise UserError(f"{group.names[0]}: no prediction of draft_ahead but for a target alone, in one lane")
    settings = _configured(inputs)
    rates = steady(inputs.groups, inputs.drafters, settings)
    tokens = (conditions.requests or ENOUGH_TOKENS) * conditions.output_tokens * len(topology.targets)
    runs = max(1, min(MOST_RUNS, ENOUGH_TOKENS // tokens))
    outcomes = [simulate_mix(inputs, settings, rates, seed) for seed in range(runs)]
    return sum(outcome.total_tokens_per_s for outcome in outcomes) / runs


def _case(inputs: Inputs, settings: Sequence[Setting]) -> Case:
    rates = steady(inputs.groups, inputs.drafters, settings)
    return Case(tuple(settings), tuple(rates), simulate_mix(inputs, settings, rates))


def _configured(inputs: Inputs) -> list[Setting]:
    """As the topology says; where it says auto, the best by the formulas."""
    return best_settings(inputs.groups, inputs.drafters, [choices_of(group) for group in inputs.groups])


def _best(inputs: Inputs, configured: Case, plain: Case) -> Case:
    """The candidate with most tokens a second for the requests given: all plain, as configured, and the formulas' best
    with any number of lanes, with one and with two."""
    best = plain
    tried = {plain.settings}
    candidates = [configured.settings, tuple(best_settings(inputs.groups, inputs.drafters))]
    for lanes in (1, 2):
        fixed = [
            [Setting(min(lanes, group.decoding), k) for k in range(17 if group.drafters else 1)]
            for group in inputs.groups
        ]
        candidates.append(tuple(best_settings(inputs.groups, inputs.drafters, fixed)))
    for settings in candidates:
        if settings in tried:
            continue
        tried.add(settings)
        case = configured if settings == configured.settings else _case(inputs, settings)
        if case.outcome.total_tokens_per_s > best.outcome.total_tokens_per_s * 1.01:
            best = case
    return best


def _group_plan(inputs: Inputs, index: int, configured: Case, plain: Case, best: Case) -> GroupPlan:
    group, one = inputs.groups[index], configured.rates[index]
    chosen = best.settings[index]
    sessions = one.load.drafted / one.load.filled / max(1, len(group.drafters))
    return GroupPlan(
        group=group,
        configured=one,
        sees=configured.figures(group),
        plain=plain.figures(group),
        best=PLAIN if chosen.draft_length == 0 else chosen,
        best_sees=best.figures(group),
        n_full=n_full(one, inputs.drafters),
        n_break_even=n_break_even(group, one.setting, inputs.drafters),
        traffic=traffic(one.acceptance, one.load.k, max(1.0, sessions)) if one.load.k else None,
    )


def _drafter_plan(name: str, inputs: Inputs, configured: Case) -> DrafterPlan:
    drafting = sum(
        group.count * one.cycle.shares.get(name, 0.0)
        for group, one in zip(inputs.groups, configured.rates, strict=True)
    )
    users = sum(group.count for group in inputs.groups if name in group.drafters)
    order = list(inputs.drafters).index(name)
    use = min(1.0, drafting) if inputs.drafters[name].messages == 1 else configured.outcome.utilization[order]
    return DrafterPlan(name, users, use, drafting)
