"""`paceline plan`: what will this topology do, and is speculation worth it?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import Json, TopologyFile, finite, round_trip


def plan(
    topology_file: TopologyFile,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile", metavar="NODE=FILE", help="Measured step times of a node; may be given several times."
        ),
    ] = None,
    rtt: Annotated[
        str | None,
        typer.Option("--rtt", metavar="TIME", help="Round trip between targets and drafters, such as 10ms."),
    ] = None,
    agreement: Annotated[
        float | None,
        typer.Option(
            "--agreement", min=0.0, max=1.0, callback=finite, help="Share of draft tokens that are the target's own."
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of a prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1, help="Tokens of an answer.")] = 256,
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=1, max=4096, help="Requests at each target at all times.")
    ] = 1,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with curves, in one file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict rounds, rates, what users see, memory and traffic; say so when speculation does not pay."""
    from paceline.topology.planner import plan as make_plan
    from paceline.topology.planner_inputs import Conditions
    from paceline.topology.planner_json import to_json
    from paceline.topology.planner_profiles import read_profiles
    from paceline.topology.spec import load_topology

    conditions = Conditions(prompt_tokens, output_tokens, in_flight, round_trip(rtt), agreement)
    made = make_plan(load_topology(topology_file), conditions, read_profiles(profile or []))
    if html is not None:
        from paceline.commands.plan_page import write_page

        write_page(made, html)
    if as_json:
        typer.echo(json.dumps(to_json(made), indent=2))
        return
    from paceline.commands.plan_output import show

    show(made)
    if html is not None:
        typer.echo(f"curves: {html}")
