"""Arguments and options that several commands share: same name, same meaning everywhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from paceline.core.errors import UserError

TopologyFile = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="The YAML file that describes the deployment.")]
OptionalTopologyFile = Annotated[
    Path | None, typer.Argument(metavar="TOPOLOGY", help="The YAML file that describes the deployment.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Where status files and logs go; kept afterwards.")
]
NoDrafter = Annotated[bool, typer.Option("--no-drafter", help="Decode plainly: no drafter, no speculation.")]


def round_trip(text: str | None) -> float | None:
    """Seconds out of the option --rtt; None where it is not given. Raises UserError."""
    from paceline.topology.spec_values import read_seconds_option

    try:
        return None if text is None else read_seconds_option(text)
    except ValueError as error:
        raise UserError(f"--rtt {error}") from None


def finite(option: typer.CallbackParam, value: float | None) -> float | None:
    """The callback of an option that holds a number: `inf` and `nan` are numbers to Python, and within any bounds."""
    if value is not None and not math.isfinite(value):
        raise UserError(f"{option.opts[0]} must be a finite number, not {value}")
    return value


def gpu(device: str) -> None:
    """UserError where `--device` names none, for what runs on GPUs only."""
    if not device.startswith("cuda"):
        raise UserError(f"--device {device}: TensorRT runs on a GPU: give --device cuda:0")
