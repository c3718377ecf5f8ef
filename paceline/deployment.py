"""From a topology to the processes that this machine is to run, and where they leave their logs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import PacelineError, UserError
from paceline.topology.credentials import api_is_encrypted
from paceline.topology.spec import TargetSpec, Topology
from paceline.topology.spec_checks import BROKER
from paceline.topology.spec_values import Address
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
    here = set() if everything else hosts_here(topology)
    drafters = [
        Node(drafter.name, node_command("drafter", topology_file, drafter.name, run_dir), restart=True)
        for drafter in topology.drafters
        if with_drafters and (everything or drafter.host is None or drafter.host in here)
    ]
    targets = [
        Node(
            target.name,
            node_command("target", topology_file, target.name, run_dir, *options),
            restart=not everything,
            drain=target.drain,
        )
        for target in topology.targets
        if everything or target.host is None or target.host in here
    ]
    if topology.link.local_broker and with_drafters:
        drafters.insert(0, Node(BROKER, node_command("broker", topology_file, None, run_dir), restart=True))
    if not drafters and not targets:
        raise UserError(f"{topology_file}: none of its hosts has an address of this machine")
    return drafters, targets


def hosts_here(topology: Topology) -> set[str]:
    """Those of the topology's hosts that are this machine."""
    return {name for name, host in topology.hosts.items() if _is_own(host.address)}


def _is_own(address: str) -> bool:
    """Whether one of this machine's addresses is meant; a name is looked up."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return True
    return False


def api_url_of(topology: Topology, target: TargetSpec) -> str:
    """Where others find a target's API: an address of its host, where it listens at all of them."""
    listen = target.api.listen
    if listen.is_any:
        host = topology.hosts[target.host].address if target.host is not None else _own_address()
        listen = Address(host, listen.port)
    scheme = "https" if api_is_encrypted(topology.security, target) else "http"
    return f"{scheme}://{listen}/v1"


def _own_address() -> str:
    """The address that this machine shows to the network; its name where it is on none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: this only looks up the route
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


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
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    except PacelineError as error:
        if not any(directory.glob("*.log")):  # nothing was started yet
            shutil.rmtree(directory, ignore_errors=True)
            raise
        kind = UserError if isinstance(error, UserError) else PacelineError
        raise kind(f"{error} (logs are kept in {directory})") from error
    shutil.rmtree(directory, ignore_errors=True)
