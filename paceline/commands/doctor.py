"""`paceline doctor`: is this machine ready, and for this topology?"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import typer

from paceline.commands.options import Json, OptionalTopologyFile
from paceline.commands.probes import Probe
from paceline.core.printable import printable

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(topology_file: OptionalTopologyFile = None, as_json: Json = False) -> None:
    """Check this machine: versions, devices, ports, models, keys, clocks, links. Exit 1 when something fails."""
    logging.getLogger("paceline").addHandler(logging.NullHandler())  # the report says what goes wrong
    found: list[Probe] = []
    for probe in _with_spinner(_probes(topology_file)):
        found.append(probe)
        if not as_json:  # as they come: importing torch or measuring links takes a second or two
            _print(probe)
    failed = any(probe.status == "fail" for probe in found)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [probe.report() for probe in found]}, indent=2))
    if failed:
        raise typer.Exit(1)


def _print(probe: Probe) -> None:
    status = typer.style(f"{probe.status:<4}", fg=_STYLES[probe.status])
    line = f"{probe.name:<18} {probe.detail}" + (f" → {probe.advice}" if probe.advice else "")
    typer.echo(f"{status}  {printable(line)}")


def _with_spinner(probes: Iterator[Probe]) -> Iterator[Probe]:
    """Shows that something goes on until the next line is there, where someone looks at it."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield from probes
        return
    from rich.console import Console

    console = Console(stderr=True)
    while True:
        with console.status("looking …"):
            probe = next(probes, None)
        if probe is None:
            return
        yield probe


def _probes(topology_file: OptionalTopologyFile) -> Iterator[Probe]:
    from paceline.commands import broker_probes, certificate_probes, link_probes, probes, topology_probes
    from paceline.deployment import hosts_here
    from paceline.topology.spec import load_topology

    topology = load_topology(topology_file, look_at_bundles=False) if topology_file else None
    hosts = sorted(hosts_here(topology)) if topology else []
    needs = topology_probes.needs(topology, hosts)
    yield from probes.versions(needs)
    yield from probes.machine(topology_probes.threads(topology, hosts))
    yield from probes.clocks()
    yield from probes.gpu(needs)
    yield from probes.providers(needs)
    if topology is not None and topology_file is not None:
        yield from topology_probes.host(topology, hosts)
        yield from topology_probes.models(topology, hosts)
        yield from topology_probes.keys(topology, hosts)
        yield from certificate_probes.certificates(topology, topology_file, hosts)
        broker = list(broker_probes.broker(topology, hosts))
        yield from broker
        reachable = all(probe.status == "ok" for probe in broker if probe.name == "broker")
        links = link_probes.measure_links(topology, hosts) if reachable else {}
        running = link_probes.drafters_that_answer(topology, hosts, links)
        yield from topology_probes.ports(topology, running, hosts)
        yield from link_probes.probes(topology, links, hosts)
