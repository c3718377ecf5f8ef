"""Arguments and options that several commands share: same name, same meaning everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TopologyFile = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="The YAML file that describes the deployment.")]
OptionalTopologyFile = Annotated[
    Path | None, typer.Argument(metavar="TOPOLOGY", help="The YAML file that describes the deployment.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Where status files and logs go; kept afterwards.")
]
NoDrafter = Annotated[bool, typer.Option("--no-drafter", help="Decode plainly: no drafter, no speculation.")]
