"""A plan in sentences: whether to speculate, why not, what would be better, and what users will notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.costs import MAX_DRAFT_LENGTH
from paceline.topology.planner_ahead import ahead_words
from paceline.topology.planner_inputs import DrafterTimes, Group, Inputs
from paceline.topology.planner_steady import PLAIN, Setting, Steady, best_settings, steady

if TYPE_CHECKING:
    from paceline.topology.planner import GroupPlan

WORTH_SAYING = 1.03  # a better setting is named from this gain on
OFTEN_LATE = 0.3  # share of the rounds whose drafts nobody waits for any more


def sentences(inputs: Inputs, groups: Sequence[GroupPlan]) -> Iterator[str]:
    """Everything that is to be said, the verdicts first."""
    for one in groups:
        yield _verdict(one, inputs)
    for one in groups:
        yield from _ahead(one, inputs)
        yield from _crowd(one, inputs)
        yield from _noticed(one)


def called(group: Group) -> str:
    """The group's name in a sentence."""
    if group.count <= 3:
        return ", ".join(group.names)
    return f"{group.names[0]} … {group.names[-1]} ({group.count} targets)"


def setting_words(setting: Setting) -> str:
    """`k = 4, 2 lanes`."""
    if setting == PLAIN:
        return "plain decoding"
    return f"k = {setting.draft_length}, {setting.lanes} lane{_s(setting.lanes)}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _verdict(one: GroupPlan, inputs: Inputs) -> str:
    group, plain, now = one.group, one.plain.tokens_per_s, one.sees.tokens_per_s
    name = called(group)
    if not group.drafters:
        return f"{name}: plain decoding, {now:.0f} tokens/s; it has no drafter."
    better = (
        f" {setting_words(one.best)} would make {one.best_sees.tokens_per_s:.0f} tokens/s"
        f" ({one.best_sees.tokens_per_s / plain:.2f} × plain)."
    )
    if not one.speculate:
        trial = _speculating(one, inputs)
        return f"{name}: do not speculate. {_reason(trial, group)}{_nearer(group, inputs.drafters)}"
    if one.configured.load.k == 0:
        return f"{name}: is set to plain decoding, {now:.0f} tokens/s.{better}"
    if now < plain:
        why = _reason(one.configured, group)
        against = f"({now:.0f} against {plain:.0f} tokens/s)"
        return f"{name}: as it is set, speculation is slower than plain decoding {against}. {why}{better}"
    text = f"{name}: {now / plain:.2f} × plain decoding, {now:.0f} against {plain:.0f} tokens/s a target."
    if one.best_sees.tokens_per_s > now * WORTH_SAYING:
        text += better
    return text


def _speculating(one: GroupPlan, inputs: Inputs) -> Steady:
    """What to explain where plain decoding wins: the setting as written, or the best one that does speculate."""
    if one.configured.load.k:
        return one.configured
    fixed = [[Setting(1, k) for k in range(1, 17)]]
    group = [one.group]
    return steady(group, inputs.drafters, best_settings(group, inputs.drafters, fixed))[0]


def _reason(one: Steady, group: Group) -> str:
    """Where the time of a round goes, and what of it is to blame."""
    cycle, plain = one.cycle, group.verify.ms(one.load.sessions)
    parts = {
        "drafting": cycle.draft * 1e3,
        "the link": group.rtt * 1e3,
        "waiting for the drafter, which others keep busy": cycle.wait * 1e3,
        "verifying": cycle.verify * 1e3,
        "waiting for the target, which verifies its other lanes": (
            cycle.seconds - cycle.draft - cycle.wait - group.rtt - cycle.verify
        )
        * 1e3,
    }
    listed = ", ".join(f"{ms:.3g} {what}" for what, ms in parts.items() if ms > 0.005)
    text = (
        f"With {setting_words(one.setting)} a round takes {cycle.seconds * 1e3:.3g} ms ({listed}) and brings a request "
        f"{one.acceptance:.2f} tokens; in that time plain decoding brings {cycle.seconds * 1e3 / plain:.2f}."
    )
    blame = max(parts, key=lambda what: parts[what] - (plain if what == "verifying" else 0.0))
    if blame == "verifying":
        return text + f" Verifying {one.load.tokens:.0f} tokens costs {parts[blame] / plain:.1f} × a plain pass."
    if one.acceptance < 1.5:
        return text + " The drafter is right too seldom."
    return text + {"the link": " Most of it is the link."}.get(blame, f" Most of it is {blame}.")


def _nearer(group: Group, drafters: Mapping[str, DrafterTimes]) -> str:
    """How near a drafter would have to be. More requests in flight do not help over a far link: lanes that fill the
    round trip take from each pass what A brings, so alone or not it pays where A · t_plain > S + V + round trip."""
    if group.rtt * 1e3 < 0.25 * group.verify.ms(1):
        return ""
    here = [replace(group, rtt=0.0)]
    plain = group.verify.ms(group.decoding)
    room = []
    for k in range(1, MAX_DRAFT_LENGTH + 1):
        one = steady(here, drafters, [Setting(1, k)])[0]
        room.append((one.acceptance * plain - one.cycle.seconds * 1e3, k))
    most, k = max(room)
    if most <= 0:
        return " A nearer drafter would not change that."
    return f" It would pay with a round trip under {most:.3g} ms (k = {k})."


def _ahead(one: GroupPlan, inputs: Inputs) -> Iterator[str]:
    """Rates are those of the formulas, as what drafting ahead makes is."""
    group = one.group
    if group.drafters:
        plain, best = (steady([group], inputs.drafters, [setting])[0].tokens_per_s for setting in (PLAIN, one.best))
        yield from ahead_words(called(group), group, inputs, plain, best)


def _crowd(one: GroupPlan, inputs: Inputs) -> Iterator[str]:
    """How many targets a drafter can serve, and whether it has room for their sessions."""
    group, load = one.group, one.configured.load
    if not load.k:
        return
    drafter = group.drafters[0]
    if one.configured.drafted < 0.999:
        yield (
            f"{drafter}: has room for {one.configured.drafted:.0%} of the sessions; the others are decoded plainly. "
            f"Raise its max_sessions ({inputs.drafters[drafter].max_sessions})."
        )
    if one.n_full is not None and inputs.drafters[drafter].messages == 1:
        limit = (
            "at any number of targets speculation beats plain decoding"
            if one.n_break_even is None
            else f"up to {one.n_break_even} speculation beats plain decoding"
            if one.n_break_even
            else "with these numbers it never beats plain decoding"
        )
        yield f"{drafter}: never idle from {one.n_full} target{_s(one.n_full)} like {group.names[0]} on; {limit}."


def _noticed(one: GroupPlan) -> Iterator[str]:
    sees = one.sees
    if one.configured.load.k and sees.undrafted - (1.0 - one.configured.drafted) > OFTEN_LATE:
        yield (
            f"{called(one.group)}: drafts come so late that a target gives up waiting for them: in the simulation "
            f"{sees.undrafted:.0%} of the rounds go without one. So tokens/s and what users see are near plain "
            "decoding's, while round ms and A are of rounds that wait for their drafts."
        )
    if one.configured.load.k and sees.gap_ms.count:
        yield (
            f"{called(one.group)}: tokens come {sees.bunch.mean:.1f} at a time every {sees.gap_ms.p50:.3g} ms "
            f"(p99 {sees.gap_ms.p99:.3g} ms), {sees.token_ms.mean:.3g} ms a token on average; "
            f"the first after {sees.ttft_ms.mean:.3g} ms."
        )
