"""What `paceline run` shows a person: the texts, then who did how much and how fast."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.core.printable import printable

LEGEND = (
    "tokens a round: accepted draft tokens and the target's own one, where there was a draft; without draft: rounds "
    "that went without one; verify: one pass of the target; busy: share of the drafter's time that it drafted."
)

_EMPTY_LINES = re.compile(r"\n(?:[ \t]*\n){6,}")


def show(report: dict[str, Any]) -> None:
    """Prints a run's report on stdout."""
    console = Console(highlight=False)
    for output in report["outputs"]:
        text = Text(folded(output["prompt"]), style="dim")
        text.append(folded(output["text"]), style="bold")
        times = f"{len(output['token_ids'])} tokens, first after {output['ttft_ms']:.0f} ms"
        title = f"{output['target']} · {times} · ended by {output['finish_reason']}"
        console.print(Panel(text, title=Text(title), title_align="left", border_style="dim"))
    console.print(_targets(report))
    for target in report["targets"]:
        if (ahead := target["draft_ahead"]) and ahead["rounds"]:
            late = 100 * ahead["late"] / ahead["rounds"]
            share = f"{100 * ahead['hit_rate']:.0f} % of {ahead['rounds']} rounds had their draft made ahead"
            console.print(f"{target['name']}: {share}, for {late:.0f} % it came late.", style="dim")
    if report["drafters"]:
        console.print(_drafters(report))
        console.print(LEGEND, style="dim")


def folded(text: str) -> str:
    """The text, with a note of their number in place of empty lines that would fill the screen."""
    shown = printable(text.replace("\r\n", "\n"), lines=True)
    return _EMPTY_LINES.sub(lambda run: f"\n… {run[0].count(chr(10)) - 1} empty lines …\n", shown)


def _targets(report: dict[str, Any]) -> Table:
    table = Table(title="targets", title_justify="left")
    for heading in (
        "target",
        "tokens/s",
        "tokens a round",
        "rounds",
        "without draft",
        "verify p50 ms",
        "verify p99 ms",
    ):
        table.add_column(heading, justify="left" if heading == "target" else "right")
    for target in report["targets"]:
        verify = target["verify_ms"] or {}
        table.add_row(
            target["name"],
            _number(target["tokens_per_s"], 1),
            _number(target["acceptance_length"] if target["rounds"] else None, 2),
            _number(target["rounds"], 0),
            _number(target["fallback_rounds"], 0),
            _number(verify.get("p50"), 1),
            _number(verify.get("p99"), 1),
        )
    return table


def _drafters(report: dict[str, Any]) -> Table:
    table = Table(title="drafters", title_justify="left")
    for heading in ("drafter", "busy", "sessions", "queue p50 ms", "draft p50 ms", "draft p99 ms", "kB in", "kB out"):
        table.add_column(heading, justify="left" if heading == "drafter" else "right")
    for drafter in report["drafters"]:
        queue, draft = drafter["queue_ms"] or {}, drafter["draft_ms"] or {}
        busy = drafter["utilization"]
        table.add_row(
            drafter["name"],
            "–" if busy is None else f"{100 * busy:.0f} %",
            _number(drafter["sessions_peak"], 0),
            _number(queue.get("p50"), 2),
            _number(draft.get("p50"), 1),
            _number(draft.get("p99"), 1),
            _number((drafter["bytes_in"] or 0) / 1000.0, 1),
            _number((drafter["bytes_out"] or 0) / 1000.0, 1),
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
