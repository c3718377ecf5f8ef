"""What drafting ahead adds to a plan, by the formulas and for a target alone on its drafter: it is not simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.costs import (
    MAX_DRAFT_LENGTH,
    MAX_LANES,
    ahead_hit_rate,
    expected_tokens,
    lane_draft_seconds,
    verify_seconds,
    way_round_seconds,
)
from paceline.topology.planner_inputs import DrafterTimes, Group, Inputs

MOST_BRANCHES = 16
WORTH_SAYING = 1.1


@dataclass(frozen=True)
class AheadEstimate:
    """One lane with all sessions. hits: share of its rounds in which every session finds its draft made ahead."""

    draft_length: int
    hits: float
    tokens_per_s: float


def ahead_estimate(group: Group, drafter: DrafterTimes, branches: int | None = None) -> AheadEstimate:
    """The best draft length with so many branches, as many as there are outcomes by default, or the configured one."""
    lengths = range(1, MAX_DRAFT_LENGTH + 1)
    if branches is not None and group.draft_length:
        lengths = range(group.draft_length, group.draft_length + 1)
    return max((_estimate(group, drafter, k, branches) for k in lengths), key=lambda one: one.tokens_per_s)


def _estimate(group: Group, drafter: DrafterTimes, k: int, branches: int | None) -> AheadEstimate:
    sessions, agreement = group.decoding, group.agreement
    wanted = min(MOST_BRANCHES, k + 1) if branches is None else branches
    hits = ahead_hit_rate(agreement, group.second_choice, k, wanted) ** sessions
    full = agreement**k
    draft = lane_draft_seconds(
        drafter.step, sessions, k, drafter.token_ms, most=drafter.sequences, full_acceptance=full
    )
    verify = verify_seconds(group.verify, sessions, k)
    seconds = way_round_seconds(draft, verify, group.rtt, step=draft / k, hits=hits)
    return AheadEstimate(k, hits, sessions * expected_tokens(agreement, k) / seconds)


def ahead_tokens_per_s(group: Group, inputs: Inputs) -> float | None:
    """What a target that drafts ahead makes as it is set; None where the formula does not apply: in several lanes,
    with several targets or drafters, or with a budget."""
    lanes = min(MAX_LANES if group.lanes is None else group.lanes, group.decoding)
    if not _alone(group, inputs) or lanes > 1 or group.verify_budget is not None:
        return None
    return ahead_estimate(group, inputs.drafters[group.drafters[0]], group.draft_ahead).tokens_per_s


def drafts_ahead(group: Group, inputs: Inputs) -> bool:
    """Whether the target is set to, and one of its drafters can."""
    return group.draft_ahead > 0 and any(inputs.drafters[name].drafts_ahead for name in group.drafters)


def _alone(group: Group, inputs: Inputs) -> bool:
    return len(inputs.groups) == group.count == len(group.drafters) == 1


def ahead_words(name: str, group: Group, inputs: Inputs, plain: float, best: float) -> Iterator[str]:
    """A sentence where a target drafts ahead, or should. plain, best: tokens a second without."""
    alone = _alone(group, inputs)
    if group.draft_ahead and not drafts_ahead(group, inputs):
        yield f"{name}: draft_ahead brings nothing at {', '.join(group.drafters)}, which cannot draft ahead."
        return
    if group.draft_ahead and not (alone and group.lanes in (1, None)):
        yield f"{name}: draft_ahead is not in these figures; it adds to them where the drafter is idle."
        return
    if not alone or not inputs.drafters[group.drafters[0]].drafts_ahead:
        return
    drafter = inputs.drafters[group.drafters[0]]
    if group.draft_ahead:
        one = ahead_estimate(group, drafter, group.draft_ahead)
        yield (
            f"{name}: draft_ahead is not in these figures. By the formulas {one.hits:.0%} of the rounds find their "
            f"draft made ahead, and k = {one.draft_length} makes {one.tokens_per_s:.0f} tokens/s "
            f"({one.tokens_per_s / plain:.2f} × plain)."
        )
        return
    one = ahead_estimate(group, drafter)
    if one.tokens_per_s >= WORTH_SAYING * max(plain, best):
        branches = min(MOST_BRANCHES, one.draft_length + 1)
        yield (
            f"{name}: draft_ahead: {branches} with k = {one.draft_length} would make about {one.tokens_per_s:.0f} "
            f"tokens/s ({one.tokens_per_s / plain:.2f} × plain)."
        )
