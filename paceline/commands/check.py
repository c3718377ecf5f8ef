"""`paceline check`: is this topology right, and who talks to whom?"""

from __future__ import annotations

import dataclasses
import json

import typer

from paceline.commands.options import Json, TopologyFile
from paceline.core.errors import UserError
from paceline.core.printable import printable


def check(topology_file: TopologyFile, as_json: Json = False) -> None:
    """Validate a topology and show who talks to whom. Exit 2 with every problem when it is wrong."""
    from paceline.topology.overview import connections, who_talks_to_whom
    from paceline.topology.spec import SpecErrors, load_topology, missing_models
    from paceline.topology.spec_errors import dotted

    try:
        topology = load_topology(topology_file)
    except UserError as error:
        if not as_json:
            raise
        found = [dataclasses.asdict(p) for p in error.problems] if isinstance(error, SpecErrors) else []
        problems = found or [{"file": str(topology_file), "message": str(error)}]
        typer.echo(json.dumps({"ok": False, "problems": problems}, indent=2))
        raise typer.Exit(2) from None
    absent = [f"{dotted(finding.path)}: {finding.message}" for finding in missing_models(topology)]
    if as_json:
        rows = [dataclasses.asdict(row) for row in connections(topology)]
        report = {"ok": True, "name": topology.name, "connections": rows, "missing_models": absent}
        typer.echo(json.dumps({**report, "topology": topology.model_dump(mode="json")}, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(who_talks_to_whom(topology), crop=False)
    for line in absent:
        console.print(printable(f"not here yet: {line}"), markup=False, soft_wrap=True)
    console.print(printable(f"{topology_file} is valid."), markup=False, soft_wrap=True)
