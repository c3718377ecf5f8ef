"""`paceline doctor`: is this machine ready, and for this topology?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import typer

from paceline.commands.options import Json, OptionalTopologyFile
from paceline.commands.probes import Probe

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(topology_file: OptionalTopologyFile = None, as_json: Json = False) -> None:
    """Check this machine: versions, devices, ports, models, keys, clocks. Exit 1 when something fails."""
    failed = False
    found: list[Probe] = []
    probes = _probes(topology_file)
    if as_json:
        found = list(probes)
        failed = any(probe.status == "fail" for probe in found)
        typer.echo(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(probe) for probe in found]}, indent=2))
    else:
        for probe in probes:  # printed as they come: importing torch takes a second or two
            failed = failed or probe.status == "fail"
            status = typer.style(f"{probe.status:<4}", fg=_STYLES[probe.status])
            typer.echo(f"{status}  {probe.name:<18} {probe.detail}" + (f" → {probe.advice}" if probe.advice else ""))
    if failed:
        raise typer.Exit(1)


def _probes(topology_file: OptionalTopologyFile) -> Iterator[Probe]:
    from paceline.commands import probes, topology_probes
    from paceline.topology.spec import load_topology

    topology = load_topology(topology_file) if topology_file else None
    needs = topology_probes.needs(topology)
    yield from probes.versions(needs)
    yield from probes.machine(topology_probes.threads(topology))
    yield from probes.clocks()
    yield from probes.gpu(needs)
    yield from probes.providers(needs)
    if topology is not None:
        yield from topology_probes.ports(topology)
        yield from topology_probes.models(topology)
        yield from topology_probes.keys(topology)
        yield from topology_probes.reach(topology)
