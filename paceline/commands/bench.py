"""`paceline bench`: plain, standard, star, lanes and auto side by side, under the same load, in one run."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.folded_log import folded_warnings
from paceline.commands.options import Json, TopologyFile, finite, round_trip
from paceline.core.errors import UserError

if TYPE_CHECKING:
    from paceline.bench import Job, Measured, Mode
    from paceline.bench_texts import Texts
    from paceline.topology.spec import Topology

TEXTS = (
    "def add(a, b):\n",
    "import os\n\n\nclass ",
    '"""This module provides ',
    "for name in sorted(",
    "    def __init__(self, ",
    "try:\n    import ",
    "from collections import ",
    "if __name__ == ",
)
TOY_PROMPT_TOKENS = 16


def bench(
    topology_file: TopologyFile,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Requests to each target. Default: 4 × in flight.")
    ] = None,
    in_flight: Annotated[int, typer.Option("--in-flight", min=1, help="Requests at each target at a time.")] = 4,
    modes: Annotated[
        str | None,
        typer.Option(
            "--modes",
            metavar="MODE,…",
            help="Of plain, standard, star, lanes and auto, with commas between. Default: all.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens of an answer.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=2.0, callback=finite, help="0 is greedy.")
    ] = 0.0,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns of each mode; the median one counts.")] = 1,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Emulated nodes on virtual time: seconds instead of minutes.")
    ] = False,
    rtt: Annotated[
        str | None,
        typer.Option("--rtt", metavar="TIME", help="With --virtual: round trip of every link, such as 10ms."),
    ] = None,
    rtt_ms: Annotated[float | None, typer.Option("--rtt-ms", min=0.0, callback=finite, hidden=True)] = None,
    as_json: Json = False,
) -> None:
    """Measure plain, standard, star, two-lane and auto side by side, and check that their texts are the same."""
    from paceline import bench as core
    from paceline.bench_texts import compared
    from paceline.topology.spec import load_topology, require_models
    from paceline.topology.spec_checks import is_emulated

    topology = load_topology(topology_file)
    require_models(topology, str(topology_file))
    emulated = all(is_emulated(target) for target in topology.targets)
    if virtual and not emulated:
        raise UserError("--virtual needs a topology whose models are all emulated")
    seconds = round_trip(rtt) if rtt_ms is None else rtt_ms / 1000.0
    if seconds and not virtual:
        raise UserError("--rtt is for --virtual; real links have the round trip that they have")
    prompts = core.toy_prompts(64, TOY_PROMPT_TOKENS, _vocabulary_size(topology)) if emulated else list(TEXTS)
    count = requests or 4 * in_flight
    job = core.Job(prompts, count, min(in_flight, count), max_tokens, temperature)
    core.check_room(topology, job)
    asked = core.MODES if modes is None else [name.strip() for name in modes.split(",")]
    chosen = core.modes(topology, asked)
    if modes is not None and "star" in asked and "star" not in [mode.name for mode in chosen]:
        typer.echo("star: with one target it is the same as standard, so it is not measured.", err=True)
    turns = _measure(chosen, job, repeats, virtual, seconds or 0.0, quiet=as_json)
    texts = compared(chosen, job, turns)
    link = (seconds or 0.0) if virtual else None
    rows = [_row(mode, job, turns[mode.name], texts[mode.name], link) for mode in chosen]
    if as_json:
        typer.echo(json.dumps({"rows": rows, "emulated": emulated, "virtual_time": virtual}))
    else:
        _show(rows, job, emulated, virtual)
    for row in rows:
        if row["failed"]:
            typer.echo(f"{row['mode']}: {row['failed']} requests failed, such as {row['failure']}", err=True)
    if any(row["identical_text"] is False or row["failed"] for row in rows):
        raise typer.Exit(1)


def _measure(
    chosen: list[Mode], job: Job, repeats: int, virtual: bool, rtt: float, quiet: bool
) -> dict[str, list[Measured]]:
    """All turns of each mode; turns of the modes are interleaved."""
    turns: dict[str, list[Measured]] = {mode.name: [] for mode in chosen}
    for repeat in range(1 if virtual else repeats):
        for mode in chosen:
            if not quiet:
                _say_turn(f"{mode.name}, turn {repeat + 1} of {1 if virtual else repeats} …")
            with folded_warnings(mode.name):
                turns[mode.name].append(_turn(mode, job, virtual, rtt))
    if not quiet and sys.stderr.isatty():
        typer.echo("\r\x1b[K", err=True, nl=False)
    return turns


def _row(mode: Mode, job: Job, turns: list[Measured], texts: Texts, rtt: float | None) -> dict[str, Any]:
    """Of the median turn by its tokens a second; texts and failures are those of all turns."""
    from paceline.bench import row

    median = sorted(turns, key=lambda turn: turn.tokens_per_s)[len(turns) // 2]
    failures = [one.error for turn in turns for one in turn.all if one.error is not None]
    return {
        **row(mode, job, median, _predicted(mode, job, median, rtt)),
        "identical_text": texts.identical,
        "text": texts.value,
        "failed": len(failures),
        "failure": failures[0] if failures else None,
    }


def _say_turn(words: str) -> None:
    """In place on a terminal, else a line of its own: real models take minutes."""
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K{words}", err=True, nl=False)
    else:
        typer.echo(words, err=True)


def _turn(mode: Mode, job: Job, virtual: bool, rtt: float) -> Measured:
    if virtual:
        from paceline import bench_virtual

        return bench_virtual.measure(mode, job, rtt)
    from paceline import bench_real

    return asyncio.run(bench_real.measure(mode, job))


def _predicted(mode: Mode, job: Job, measured: Measured, rtt: float | None) -> float | None:
    """What the planner says of requests with such prompts, where it can: whatever it stumbles on must not cost what
    was measured."""
    from paceline.topology.planner import predicted_tokens_per_s
    from paceline.topology.planner_inputs import Conditions

    lengths = [one.prompt_tokens for one in measured.all if one.prompt_tokens is not None]
    if not lengths:
        return None
    conditions = Conditions(
        prompt_tokens=max(1, round(sum(lengths) / len(lengths))),
        output_tokens=job.max_tokens,
        in_flight=job.in_flight,
        rtt=rtt,
        requests=job.requests,
    )
    try:
        return predicted_tokens_per_s(mode.topology, conditions)
    except (UserError, ArithmeticError):
        return None


def _vocabulary_size(topology: Topology) -> int:
    from paceline.topology.spec import Profile

    return min((target.profile or Profile()).vocabulary_size for target in topology.targets)


def _show(rows: list[dict[str, Any]], job: Job, emulated: bool, virtual: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    kind = "emulated, virtual time" if virtual else "emulated" if emulated else "measured here"
    title = f"{kind}: {job.in_flight} in flight a target, {job.max_tokens} tokens each; times in ms"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    headings = ("mode", "N", "lanes", "k", "tok/s", "plan", "TTFT", "gap", "p99", "σ", "whole", "A", "busy", "text")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("mode", "text") else "right", no_wrap=True)
    for row in rows:
        gaps, busy = row["itl_ms"], row["drafter_utilization"]
        table.add_row(
            row["mode"],
            str(row["targets"]),
            str(row["lanes"]),
            str(row["draft_length"]),
            f"{row['tokens_per_s']:.0f}",
            _figure(row["predicted_tokens_per_s"], ".0f"),
            _figure(row["ttft_ms"]["p50"], ".0f"),
            _figure(gaps["p50"], ".3g"),
            _figure(gaps["p99"], ".3g"),
            _figure(gaps["std"], ".1f"),
            _figure(row["e2e_ms"]["p50"], ".0f"),
            _figure(row["acceptance_length"], ".2f"),
            _figure(busy, ".0%"),
            row["text"],
        )
    console = Console()
    console.print(table)
    console.print(
        "N: targets under load. k: draft length. plan: tokens/s predicted. TTFT: to the first "
        "token. gap, p99, σ: of the time between pieces of a stream. whole: of a request. A: "
        "tokens a drafted round. busy: the drafter. text: whether it is what plain decoding wrote, "
        "or the first mode; – where no other turn served all of its requests, rejection where "
        "texts may differ because drafts are drawn.",
        style="dim",
        highlight=False,
    )


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
