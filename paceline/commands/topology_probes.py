"""What `doctor` asks of this machine for one topology: which host it is, ports, models, keys.

Functions take `hosts`: those of the topology's hosts that are this machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from paceline.commands.probes import Probe
from paceline.core.errors import UserError
from paceline.ports import IN_USE, trouble
from paceline.topology.credentials import api_url
from paceline.topology.spec import DrafterSpec, TargetSpec, Topology
from paceline.topology.spec_bundles import bundles
from paceline.topology.tls import api_client_context

Node = DrafterSpec | TargetSpec
_WEIGHTS = {".safetensors", ".bin", ".onnx", ".plan", ".engine"}


def here(topology: Topology, hosts: Collection[str] = ()) -> Iterator[Node]:
    """Nodes that run on this machine: those of its hosts, and those without a host."""
    nodes: list[Node] = [*topology.drafters, *topology.targets]
    yield from (node for node in nodes if node.host is None or node.host in hosts)


def host(topology: Topology, hosts: Collection[str]) -> Iterator[Probe]:
    """Which host this machine is; no line where the topology names none."""
    for name in hosts:
        yield Probe("host", "ok", f"{name} ({topology.hosts[name].address})")
    if hosts or not topology.hosts:
        return
    others = "none of " + ", ".join(f"{name} ({one.address})" for name, one in topology.hosts.items())
    if nodes := ", ".join(node.name for node in here(topology)):
        yield Probe("host", "ok", f"{others}; without a host, so here: {nodes}")
    else:
        advice = "ask on one of them, or write an address of this machine into hosts"
        yield Probe("host", "warn", f"{others} has an address of this machine: nothing runs here", advice)


def needs(topology: Topology | None, hosts: Collection[str] = ()) -> frozenset[str]:
    """Packages and devices that this machine's nodes cannot do without."""
    wanted: set[str] = set()
    for node in here(topology, hosts) if topology else ():
        if isinstance(node, TargetSpec):
            wanted |= {"fastapi", "uvicorn", "prometheus-client"}
        kind = node.engine if isinstance(node, TargetSpec) else "" if node.strategy == "ngram" else node.runtime
        wanted |= {"torch", "transformers", "safetensors"} if kind == "torch" else {kind}
        if node.device.startswith("cuda"):
            wanted.add("cuda")
    return frozenset(wanted - {"", "emulated"})


def threads(topology: Topology | None, hosts: Collection[str] = ()) -> int:
    """CPU threads that this machine's nodes use together; nodes that leave it open count as one."""
    return sum(node.threads or 1 for node in here(topology, hosts)) if topology else 0


def ports(topology: Topology, running: Collection[str], hosts: Collection[str] = ()) -> Iterator[Probe]:
    """Each address that a node of this machine listens on is free, or that node's. running: drafters that answered."""
    for node in here(topology, hosts):
        if isinstance(node, DrafterSpec) and topology.link.transport != "tcp":
            continue
        listen = node.listen if isinstance(node, DrafterSpec) else node.api.listen
        why = trouble(listen)
        if why is None:
            yield Probe(node.name, "ok", f"{listen} is free")
        elif node.name in running or (isinstance(node, TargetSpec) and _serves(topology, node)):
            yield Probe(node.name, "ok", f"{listen}: it is running")
        else:
            kind, key = ("drafter", "listen") if isinstance(node, DrafterSpec) else ("target", "api.listen")
            advice = f"choose another {key}"
            if why == IN_USE:
                why += f", and what listens there does not answer as {node.name}"
                advice = f"is that {kind} hung, or of another deployment? Stop what uses the port, or {advice}"
            yield Probe(node.name, "fail", f"{listen}: {why}", advice)


def models(topology: Topology, hosts: Collection[str] = ()) -> Iterator[Probe]:
    """Local models are there and look like models. Hub ids are not looked up: that would need the network."""
    seen: set[str] = set()
    for node in here(topology, hosts):
        emulated = "emulated" in (getattr(node, "runtime", ""), getattr(node, "engine", ""))
        if node.model is None or emulated:
            continue
        misfits = [*_misfits(node, hosts)]
        for misfit in misfits:
            yield Probe("model", "fail", f"{node.name}: {misfit}")
        if misfits or node.model in seen:
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


def _misfits(node: Node, hosts: Collection[str]) -> Iterator[str]:
    """What a node could not load its model for, by the manifest of the bundle."""
    found = bundles({0: node}, {}, hosts) if isinstance(node, DrafterSpec) else bundles({}, {0: node}, hosts)
    return (finding.message for finding in found)


def keys(topology: Topology, hosts: Collection[str] = ()) -> Iterator[Probe]:
    """Loading the topology has refused missing and open key files already; this says which are used."""
    files = [("deployment key", topology.security.key_file)]
    for node in here(topology, hosts):
        if isinstance(node, TargetSpec) and node.api.key_file is not None:
            files.append((f"API key of {node.name}", node.api.key_file))
    for what, file in files:
        if file is not None:
            yield Probe("key file", "ok", f"{what}: {file}, readable by its owner only")
    if topology.security.key_file is None:  # beyond loopback the topology would have been refused
        reach = {
            "tcp": "every drafter listens on loopback only",
            "mqtt": "the broker is on loopback",
            "memory": "all nodes are one process",
        }
        yield Probe("key file", "ok", f"no deployment key: {reach[topology.link.transport]}")


def _serves(topology: Topology, target: TargetSpec) -> bool:
    """Whether that very target answers at its API's address."""
    import httpx

    url = api_url(topology.security, target).removesuffix("/v1") + "/health"
    try:
        answer = httpx.get(url, timeout=1.0, trust_env=False, verify=api_client_context(topology.security, target))
        return set(answer.json()["drafters"]) == set(target.drafters.names)
    except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, UserError):
        return False
