"""What targets do while all their requests decode: the formulas, and the setting that they say is best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.costs import (
    MAX_DRAFT_LENGTH,
    MAX_LANES,
    expected_tokens,
    full_targets,
    lane_draft_seconds,
)
from paceline.topology.planner_cycles import Cycle, Load, cycles
from paceline.topology.planner_inputs import DrafterTimes, Group

SWEEPS = 3
MOST_TARGETS = 4096  # looked at for N_full and N_break-even; more stand for "no limit"


@dataclass(frozen=True)
class Setting:
    """How a group is run. (1, 0) is plain decoding."""

    lanes: int
    draft_length: int


PLAIN = Setting(1, 0)


@dataclass(frozen=True)
class Steady:
    """One target of a group. tokens_per_s: L·b·A/T. acceptance: A, of a session that gets drafts; drafted: how many
    of its sessions do."""

    setting: Setting
    load: Load
    cycle: Cycle
    acceptance: float
    tokens_per_s: float

    @property
    def drafted(self) -> float:
        """Share of the sessions that get drafts; the drafters have no room for the others."""
        return self.load.drafted / self.load.sessions


def steady(groups: Sequence[Group], drafters: Mapping[str, DrafterTimes], settings: Sequence[Setting]) -> list[Steady]:
    """All groups at work together, each in its setting."""
    held = {name: _held(spec, groups) for name, spec in drafters.items()}
    loads = [_load(group, setting, held) for group, setting in zip(groups, settings, strict=True)]
    return [
        _of(load, setting, cycle) for load, setting, cycle in zip(loads, settings, cycles(loads, drafters), strict=True)
    ]


def _held(drafter: DrafterTimes, groups: Sequence[Group]) -> float:
    """Share of the sessions that are its that it has room for."""
    wanted = sum(g.count * g.decoding / len(g.drafters) for g in groups if drafter.name in g.drafters)
    return min(1.0, drafter.max_sessions / wanted) if wanted else 1.0


def _load(group: Group, setting: Setting, held: Mapping[str, float]) -> Load:
    sessions = float(group.decoding)
    speculates = bool(group.drafters) and setting.draft_length > 0
    share = sum(held[name] for name in group.drafters) / len(group.drafters) if speculates else 0.0
    lanes = min(setting.lanes, group.decoding)
    return Load(group, lanes, setting.draft_length if speculates else 0, sessions, sessions * share)


def _of(load: Load, setting: Setting, cycle: Cycle) -> Steady:
    acceptance = expected_tokens(load.group.agreement, load.verified)
    tokens = load.drafted * acceptance + load.sessions - load.drafted
    return Steady(setting, load, cycle, acceptance, tokens / cycle.seconds)


def total(groups: Sequence[Group], rates: Sequence[Steady]) -> float:
    """Tokens a second of all targets."""
    return sum(group.count * one.tokens_per_s for group, one in zip(groups, rates, strict=True))


def best_settings(
    groups: Sequence[Group], drafters: Mapping[str, DrafterTimes], fixed: Sequence[Sequence[Setting]] | None = None
) -> list[Setting]:
    """The settings with most tokens a second in all: of one group after the other, until nothing gets better.

    fixed: what may be chosen for each group; everything by default. Of equal ones the first: fewer lanes, shorter k.
    """
    choices = fixed or [list(_choices(group)) for group in groups]
    best = [options[0] for options in choices]
    most = total(groups, steady(groups, drafters, best))
    for _ in range(SWEEPS if len(groups) > 1 else 1):
        before = most
        for index, options in enumerate(choices):
            for option in options:
                trial = [*best[:index], option, *best[index + 1 :]]
                rate = total(groups, steady(groups, drafters, trial))
                if rate > most * (1 + 1e-6):
                    best, most = trial, rate
        if most == before:
            break
    return best


def _choices(group: Group) -> Iterator[Setting]:
    yield PLAIN
    if group.drafters:
        for lanes in range(1, min(MAX_LANES, group.decoding) + 1):
            for k in range(1, MAX_DRAFT_LENGTH + 1):
                yield Setting(lanes, k)


def choices_of(group: Group) -> list[Setting]:
    """What the topology leaves open: one setting, or several where it says `auto`."""
    lanes = [group.lanes] if group.lanes else range(1, min(MAX_LANES, group.decoding) + 1)
    lengths = [group.draft_length] if group.draft_length is not None else range(MAX_DRAFT_LENGTH + 1)
    return [Setting(count, k) for count in lanes for k in lengths]


def n_full(one: Steady, drafters: Mapping[str, DrafterTimes]) -> int | None:
    """Targets like this one that leave the first of its drafters no idle time; None where it does not speculate, and
    for more than MOST_TARGETS."""
    load = one.load
    if not load.k or not load.group.drafters:
        return None
    spec = drafters[load.group.drafters[0]]
    sessions = load.drafted / load.filled / len(load.group.drafters)
    whole = load.group.agreement**load.k
    draft = lane_draft_seconds(spec.step, sessions, load.k, spec.token_ms, most=spec.sequences, full_acceptance=whole)
    full = full_targets(draft, load.verify, load.group.rtt, lanes=load.filled)
    return full if full <= MOST_TARGETS else None


def n_break_even(group: Group, setting: Setting, drafters: Mapping[str, DrafterTimes]) -> int | None:
    """The largest number of targets like these with which speculation is still faster than plain decoding, each
    session with room at the drafter; 0 when it never is, None for more than MOST_TARGETS."""
    if not group.drafters or not setting.draft_length:
        return 0
    roomy = {name: replace(drafters[name], max_sessions=1 << 40) for name in group.drafters}

    def pays(count: int) -> bool:
        many = [replace(group, count=count)]
        return total(many, steady(many, roomy, [setting])) > total(many, steady(many, roomy, [PLAIN]))

    if not pays(1):
        return 0
    if pays(MOST_TARGETS):
        return None
    low, high = 1, MOST_TARGETS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
