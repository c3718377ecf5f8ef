"""`paceline keys init`: the deployment's key, its authority, and a certificate for each node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.commands.options import Json, OptionalTopologyFile
from paceline.core.errors import UserError

if TYPE_CHECKING:
    from paceline.topology.keyring import Keyring

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Make the deployment's key and certificates."""


@app.command()
def init(
    topology_file: OptionalTopologyFile = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to; default as the file says.")
    ] = None,
    node: Annotated[list[str] | None, typer.Option("--node", metavar="NAME", help="Without a file: a node.")] = None,
    renew: Annotated[
        list[str] | None, typer.Option("--renew", metavar="NAME", help="Give this node a new certificate and key.")
    ] = None,
    days: Annotated[
        int | None, typer.Option("--days", min=1, max=36500, help="How long new certificates last.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make everything anew; what is there stops working.")] = False,
    as_json: Json = False,
) -> None:
    """Make deployment.key, ca.pem with ca.key, and NAME.pem with NAME.key for each node; only what is missing."""
    from paceline.topology.keyring import Keyring

    if (topology_file is None) == (node is None):
        raise UserError("give a topology file, or --out DIR and a --node NAME for each node")
    plan = _of_names(node or [], out) if topology_file is None else _of_topology(topology_file, out)
    strangers = sorted(set(renew or ()) - set(plan.nodes))
    if strangers:
        raise UserError(f"--renew {strangers[0]}: there is no such node; there are {', '.join(plan.nodes)}")
    keyring = Keyring(plan.folder, plan.key_file, force=force)
    keyring.fill(plan.deployment, plan.nodes, api_keys=plan.api_keys, renew=renew or (), days=days)
    if as_json:
        copies = {machine: [str(file) for file in files] for machine, files in plan.machines.items()}
        typer.echo(json.dumps({"made": [str(file) for file in keyring.made], "machines": copies}, indent=2))
    else:
        _show(plan, keyring)


@dataclass(frozen=True)
class _Plan:
    """What is to be there. nodes: name → addresses of its API; machines: label → the files that belong there."""

    deployment: str
    folder: Path
    key_file: Path
    nodes: dict[str, list[str]]
    api_keys: list[Path]
    machines: dict[str, list[Path]]


def _of_names(names: Sequence[str], out: Path | None) -> _Plan:
    from paceline.topology.credentials import name_problem, node_files

    if out is None:
        raise UserError("--node needs --out DIR, where the files are to go")
    for name in names:
        problem = name_problem(name)
        if problem:
            raise UserError(f"--node {problem}")
    key_file = out / "deployment.key"
    machines = {f"the machine of {name}": [key_file, *node_files(out, name)] for name in names}
    return _Plan("paceline", out, key_file, {name: [] for name in names}, [], machines)


def _of_topology(topology_file: Path, out: Path | None) -> _Plan:
    from paceline.topology.credentials import certificates_folder, node_files
    from paceline.topology.spec import DrafterSpec, TargetSpec, load_topology

    topology = load_topology(topology_file, look_at_keys=False, look_at_bundles=False)
    security = topology.security
    folder = out or certificates_folder(security)
    if folder is None:
        write = "security: {key_file: secrets/deployment.key}"
        raise UserError(f"{topology_file} names no place for keys: write {write}, or give --out")
    key_file = folder / "deployment.key" if out is not None or security.key_file is None else security.key_file
    nodes: dict[str, list[str]] = {}
    api_keys: list[Path] = []
    machines: dict[str, list[Path]] = {}
    every: list[DrafterSpec | TargetSpec] = [*topology.drafters, *topology.targets]
    for node in every:
        host = topology.hosts[node.host] if node.host is not None else None
        label = f"{node.host} ({host.address})" if host is not None else "this machine"
        files = machines.setdefault(label, [key_file])
        files += [file for file in node_files(folder, node.name) if file not in files]
        listen = node.listen if isinstance(node, DrafterSpec) else node.api.listen
        nodes[node.name] = [host.address] if host is not None else []
        if not listen.is_any and not listen.is_loopback:
            nodes[node.name].append(listen.host)
        if isinstance(node, TargetSpec) and node.api.key_file is not None:
            api_keys.append(node.api.key_file)
            files += [node.api.key_file] if node.api.key_file not in files else []
    return _Plan(topology.name, folder, key_file, nodes, list(dict.fromkeys(api_keys)), machines)


def _show(plan: _Plan, keyring: Keyring) -> None:
    made = ", ".join(file.name for file in keyring.made)
    typer.echo(f"made in {plan.folder}: {made}" if made else f"everything is there already in {plan.folder}")
    for machine, files in plan.machines.items():
        typer.echo(f"{machine}: {' '.join(map(str, files))}")
    typer.echo(f"{plan.folder / 'ca.key'} stays here, or better offline: whoever has it can make nodes.")
