"""What `paceline plan` shows a person: targets, drafters, memory, and then the advice in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from paceline.topology.planner import GroupPlan, Plan
from paceline.topology.planner_advice import called, setting_words
from paceline.topology.planner_resources import Memory

LEGEND = (
    "round: from one verification of a lane to its next; A: tokens a request gains in it; never idle from: targets "
    "like these that keep the drafter busy; pays up to: the most with which speculation beats plain decoding; "
    "× plain: against the same requests without a drafter; first, a token: time to the first token, and for each one "
    "after it."
)


def show(plan: Plan) -> None:
    """Prints a plan on stdout."""
    console = Console(highlight=False)
    console.print(_targets(plan))
    if plan.drafters:
        console.print(_drafters(plan))
    if plan.memory:
        console.print(_memory(plan.memory))
    console.print(LEGEND, style="dim")
    for sentence in plan.advice:
        console.print(f"• {sentence}", markup=False)


def title(plan: Plan) -> str:
    """The plan's name, what users are taken to ask for, and whether its times are real."""
    asked = plan.inputs.conditions
    source = "emulated models" if plan.inputs.emulated else "measured step times"
    length = f"{asked.prompt_tokens} + {asked.output_tokens} tokens"
    return f"{plan.name}: plan for {asked.in_flight} in flight a target, {length} ({source})"


def rows(plan: Plan) -> Iterator[dict[str, str]]:
    """One row for each group of targets: heading → cell."""
    for one in plan.groups:
        yield _row(one)


def _row(one: GroupPlan) -> dict[str, str]:
    cycle, load, sees = one.configured.cycle, one.configured.load, one.sees
    speculates = load.k > 0
    gain = sees.tokens_per_s / one.plain.tokens_per_s if one.plain.tokens_per_s else 0.0
    return {
        "targets": called(one.group),
        "set to": _set_to(one),
        "draft ms": f"{cycle.draft * 1e3:.3g}" if speculates else "–",
        "verify ms": f"{cycle.verify * 1e3:.3g}",
        "round ms": f"{cycle.seconds * 1e3:.3g}",
        "A": f"{one.configured.acceptance:.2f}",
        "never idle from": "–" if one.n_full is None else str(one.n_full),
        "pays up to": _limit(one) if speculates else "–",
        "tokens/s": f"{sees.tokens_per_s:.0f}",
        "× plain": f"{gain:.2f}",
        "first ms": f"{sees.ttft_ms.mean:.3g}",
        "a token ms": f"{sees.token_ms.mean:.3g}",
        "best": f"{setting_words(one.best)}: {one.best_sees.tokens_per_s:.0f}/s",
        "bytes a round": f"{one.traffic.up:.0f} up, {one.traffic.down:.0f} down" if one.traffic else "–",
    }


def _set_to(one: GroupPlan) -> str:
    more = {"draft_ahead": one.group.draft_ahead, "verify_budget": one.group.verify_budget}
    return ", ".join(
        [setting_words(one.configured.setting), *(f"{key} {set_to}" for key, set_to in more.items() if set_to)]
    )


def _limit(one: GroupPlan) -> str:
    return "any" if one.n_break_even is None else str(one.n_break_even or "none")


def _targets(plan: Plan) -> Table:
    """Sideways when there are few groups, so that it fits a terminal: one column for each."""
    table = Table(title=title(plan), title_justify="left", show_header=False)
    listed = list(rows(plan))
    table.add_column(style="dim", no_wrap=True)
    for _ in listed:
        table.add_column(overflow="fold")
    for heading in listed[0]:
        table.add_row(heading, *(row[heading] for row in listed))
    return table


def _drafters(plan: Plan) -> Table:
    table = Table(title="drafters", title_justify="left")
    for heading in ("drafter", "targets", "busy", "lanes drafted for at a time"):
        table.add_column(heading)
    for drafter in plan.drafters:
        table.add_row(drafter.name, str(drafter.targets), f"{drafter.utilization:.0%}", f"{drafter.drafting:.2f}")
    return table


def _memory(nodes: tuple[Memory, ...]) -> Table:
    table = Table(title="memory", title_justify="left")
    for heading in ("node", "keys and values", "for tokens", "weights"):
        table.add_column(heading)
    for node in nodes:
        table.add_row(node.node, size(node.kv_bytes), f"{node.kv_tokens}", size(node.weight_bytes))
    return table


def size(count: int | None) -> str:
    """Bytes for people; what is not known is said to be."""
    if count is None:
        return "not known here"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
