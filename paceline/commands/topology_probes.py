"""What `doctor` asks of this machine for one topology: ports, models, keys, and the way to other hosts."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.commands.probes import Probe
from paceline.topology.spec import Address, DrafterSpec, TargetSpec, Topology

Node = DrafterSpec | TargetSpec
_WEIGHTS = {".safetensors", ".bin", ".onnx", ".plan", ".engine"}


def here(topology: Topology) -> Iterator[Node]:
    """Nodes without a host: those that run on this machine."""
    nodes: list[Node] = [*topology.drafters, *topology.targets]
    yield from (node for node in nodes if node.host is None)


def needs(topology: Topology | None) -> frozenset[str]:
    """Packages and devices that this machine's nodes cannot do without."""
    wanted: set[str] = set()
    for node in here(topology) if topology else ():
        if isinstance(node, TargetSpec):
            wanted |= {"fastapi", "uvicorn", "prometheus-client"}
        kind = node.engine if isinstance(node, TargetSpec) else "" if node.strategy == "ngram" else node.runtime
        wanted |= {"torch", "transformers", "safetensors"} if kind == "torch" else {kind}
        if node.device.startswith("cuda"):
            wanted.add("cuda")
    return frozenset(wanted - {"", "emulated"})


def threads(topology: Topology | None) -> int:
    """CPU threads that this machine's nodes use together; nodes that leave it open count as one."""
    return sum(node.threads or 1 for node in here(topology)) if topology else 0


def ports(topology: Topology) -> Iterator[Probe]:
    """Each address that a node of this machine listens on is free."""
    for node in here(topology):
        if isinstance(node, DrafterSpec) and topology.link.transport != "tcp":
            continue
        listen = node.listen if isinstance(node, DrafterSpec) else node.api.listen
        why = _bind(listen)
        if why is None:
            yield Probe(node.name, "ok", f"{listen} is free")
        else:
            key = "listen" if isinstance(node, DrafterSpec) else "api.listen"
            advice = f"stop the program that uses it, or choose another {key} (is the topology running already?)"
            yield Probe(node.name, "fail", f"{listen}: {why}", advice if why == "in use" else f"choose another {key}")


def models(topology: Topology) -> Iterator[Probe]:
    """Local models are there and look like models. Hub ids are not looked up: that would need the network."""
    seen: set[str] = set()
    for node in here(topology):
        emulated = "emulated" in (getattr(node, "runtime", ""), getattr(node, "engine", ""))
        if node.model is None or emulated or node.model in seen:
            continue
        seen.add(node.model)
        folder = Path(node.model)
        if not node.model.startswith("/"):
            yield Probe("model", "warn", f"{node.model} is a hub id", "it is downloaded when first used, unless cached")
        elif not folder.exists():
            cached = Path("~/.cache/paceline").expanduser() in folder.parents
            advice = "run scripts/fetch_models" if cached else f"put it there, or change the model of {node.name}"
            yield Probe("model", "fail", f"{folder} does not exist", advice)
        elif folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", "manifest.json")):
            yield Probe(
                "model", "fail", f"{folder} has no config.json", "it is no model folder; fetch or export it again"
            )
        else:
            yield Probe("model", "ok", str(folder))


def keys(topology: Topology) -> Iterator[Probe]:
    """Loading the topology has refused missing and open key files already; this says which are used."""
    files = {
        topology.security.key_file,
        *(node.api.key_file for node in here(topology) if isinstance(node, TargetSpec)),
    }
    for file in sorted(file for file in files if file is not None):
        yield Probe("key file", "ok", f"{file}, readable by its owner only")
    if topology.security.key_file is None:
        yield Probe("key file", "ok", "none; every drafter listens on loopback only")


def reach(topology: Topology) -> Iterator[Probe]:
    """Round trip to drafters on other hosts, as the time that a TCP connection takes."""
    if topology.link.transport != "tcp":
        return
    for target in topology.targets:
        for drafter in topology.drafters_of(target):
            if target.host is not None or drafter.host is None:
                continue
            address = topology.connect_address(drafter, target)
            name = f"{target.name} → {drafter.name}"
            try:
                start = time.perf_counter()
                with socket.create_connection((address.host, address.port), timeout=1.0):
                    yield Probe(name, "ok", f"{address}, {(time.perf_counter() - start) * 1e3:.1f} ms round trip")
            except OSError as error:
                why = error.strerror or str(error)
                yield Probe(name, "warn", f"{address}: {why}", "start the drafter there, or check the firewall")


def _bind(listen: Address) -> str | None:
    """Why nothing can listen there, or None."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(place)
            server.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "in use"
        if error.errno == errno.EADDRNOTAVAIL:
            return "is no address of this machine"
        return error.strerror or str(error)
    return None
