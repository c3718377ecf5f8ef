"""From a topology to the processes that this machine is to run, and where they leave their logs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import PacelineError, UserError
from paceline.topology.spec import Topology
from paceline.topology.spec_checks import BROKER
from paceline.topology.supervisor import Node, node_command

ALL_NODES = "nodes"


def nodes_here(
    topology: Topology, topology_file: Path, run_dir: Path, *, with_drafters: bool = True, everything: bool = False
) -> tuple[list[Node], list[Node]]:
    """(the local broker and drafters, targets) that belong on this machine; `everything` ignores hosts.

    A drafter that dies is started again, and so is the broker. With the memory link all nodes are one process.
    """
    options = () if with_drafters else ("--no-drafter",)
    if topology.link.transport == "memory":
        command = node_command(ALL_NODES, topology_file, None, run_dir, *options)
        return [], [Node(ALL_NODES, command, drain=topology.longest_drain)]
    drafters = [
        Node(drafter.name, node_command("drafter", topology_file, drafter.name, run_dir), restart=True)
        for drafter in topology.drafters
        if with_drafters and (everything or _is_here(topology, drafter.host))
    ]
    targets = [
        Node(
            target.name,
            node_command("target", topology_file, target.name, run_dir, *options),
            restart=not everything,
            drain=target.drain,
        )
        for target in topology.targets
        if everything or _is_here(topology, target.host)
    ]
    if topology.link.local_broker and with_drafters:
        drafters.insert(0, Node(BROKER, node_command("broker", topology_file, None, run_dir), restart=True))
    if not drafters and not targets:
        raise UserError(f"{topology_file}: none of its hosts has an address of this machine")
    return drafters, targets


def _is_here(topology: Topology, host: str | None) -> bool:
    """Whether one of this machine's addresses is the host's."""
    if host is None:
        return True
    address = topology.hosts[host].address
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return True
    return False


def writable(run_dir: Path) -> Path:
    """The directory of `--run-dir`, made for its owner alone where it is missing. UserError when nothing can be
    written there."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir).close()
    except OSError as error:
        raise UserError(f"--run-dir {run_dir}: {error.strerror}") from None
    return run_dir


@contextlib.contextmanager
def run_directory(run_dir: Path | None) -> Iterator[Path]:
    """The run's directory; a temporary one is kept when something went wrong, since the logs are in it."""
    if run_dir is not None:
        yield writable(run_dir)
        return
    directory = Path(tempfile.mkdtemp(prefix="paceline-"))
    try:
        yield directory
    except (UserError, KeyboardInterrupt):
        shutil.rmtree(directory, ignore_errors=True)
        raise
    except PacelineError as error:
        raise PacelineError(f"{error} (logs: {directory})") from error
    shutil.rmtree(directory, ignore_errors=True)
