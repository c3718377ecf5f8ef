"""`paceline schema`: the JSON Schema of topology files."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON Schema of topology files; editors complete and check with it."""
    from paceline.topology.spec import schema as topology_schema

    typer.echo(json.dumps(topology_schema(), indent=2))
