"""What `doctor` says of certificates: loading the topology has refused unusable ones, this tells how long they last."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator
from pathlib import Path

from paceline.commands.probes import Probe
from paceline.commands.topology_probes import here
from paceline.topology.certificate_checks import expires, way_to_renew
from paceline.topology.credentials import KEYS_COMMAND, certificates_folder, needs_certificate, node_files
from paceline.topology.spec import TargetSpec, Topology

SOON_DAYS = 30


def certificates(topology: Topology, topology_file: Path, hosts: Collection[str] = ()) -> Iterator[Probe]:
    """One line for each certificate that this machine's nodes show, and for the authority's. hosts: this machine's."""
    for file, renewal in _shown_here(topology, topology_file, hosts).items():
        try:
            end = expires(file)
        except (OSError, ValueError) as error:  # a file that was just changed
            yield Probe("certificate", "fail", f"{file}: {error}", renewal)
            continue
        left = (end - datetime.datetime.now(datetime.timezone.utc)).days
        detail = f"{file} expires in {left} days ({end:%Y-%m-%d})"
        soon = left < SOON_DAYS
        yield Probe(
            "certificate", "warn" if soon else "ok", detail, renewal if soon else "", {"file": str(file), "days": left}
        )


def _shown_here(topology: Topology, topology_file: Path, hosts: Collection[str]) -> dict[Path, str]:
    """Each file, and what to do when it is about to expire."""
    security, drafters = topology.security, {drafter.name: drafter for drafter in topology.drafters}
    folder = certificates_folder(security)
    files: dict[Path, str] = {}
    for node in here(topology, hosts):
        if isinstance(node, TargetSpec) and node.api.cert is not None:
            files[node.api.cert] = "get a new one"
        if folder is not None and needs_certificate(security, topology.link.transport, node, drafters):
            own = node_files(folder, node.name)
            files[own.authority] = f"run: {KEYS_COMMAND} {topology_file} --force, and give every node its new files"
            files[own.certificate] = way_to_renew(folder, str(topology_file), node.name)
    return files
