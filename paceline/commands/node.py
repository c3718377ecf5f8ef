"""`paceline drafter|target`: one node in the foreground, as systemd or the supervisor starts it.

SIGTERM and Ctrl-C let it finish what it runs, given twice they end it; SIGHUP has it read the topology again.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from paceline.commands.options import NoDrafter, RunDir, TopologyFile
from paceline.core.errors import PacelineError, UserError
from paceline.deployment import ALL_NODES, writable
from paceline.topology.orders import Orders
from paceline.topology.process import configure_logging, follow_parent, notify
from paceline.topology.spec import load_topology, require_models
from paceline.topology.transports import make_transport, open_transport

if TYPE_CHECKING:
    from paceline.topology.links.base import Transport
    from paceline.topology.spec import Topology

NodeName = Annotated[str, typer.Argument(metavar="NAME", help="A name out of the topology.")]
Serve = Callable[[Orders], Coroutine[Any, Any, None]]


def drafter(topology_file: TopologyFile, name: NodeName, run_dir: RunDir = None) -> None:
    """Run one drafter in the foreground, until SIGTERM or Ctrl-C.

    Its targets go on without it. SIGHUP has it read certificates and the targets' weights again.
    """
    topology = _prepare(topology_file, run_dir)
    _named("drafter", name, topology, topology_file)
    run_until_signal(topology_file, [_drafter(topology, name, run_dir, lambda: notify("READY=1"))])


def target(topology_file: TopologyFile, name: NodeName, run_dir: RunDir = None, no_drafter: NoDrafter = False) -> None:
    """Run one target in the foreground, until SIGTERM or Ctrl-C.

    The first lets requests finish (at most `drain` seconds), the second ends at once. SIGHUP has it read the topology
    and its certificates again.
    """
    topology = _prepare(topology_file, run_dir)
    _named("target", name, topology, topology_file)
    run_until_signal(topology_file, [_target(topology, name, run_dir, lambda: notify("READY=1"), not no_drafter)])


def nodes(topology_file: TopologyFile, run_dir: RunDir = None, no_drafter: NoDrafter = False) -> None:
    """Run every node as threads of this process, which is what the memory link needs."""
    topology = _prepare(topology_file, run_dir)
    shared = make_transport(topology, ALL_NODES) if topology.link.transport == "memory" else None
    drafters = [] if no_drafter else [drafter.name for drafter in topology.drafters]
    targets = [target.name for target in topology.targets]
    waiting = len(drafters) + len(targets)

    def ready() -> None:
        nonlocal waiting
        waiting -= 1
        if waiting == 0:
            notify("READY=1")

    run_until_signal(
        topology_file,
        [
            *(_drafter(topology, name, run_dir, ready, shared) for name in drafters),
            *(_target(topology, name, run_dir, ready, not no_drafter, shared) for name in targets),
        ],
    )


def _prepare(topology_file: Path, run_dir: Path | None) -> Topology:
    configure_logging()
    topology = load_topology(topology_file, look_at_bundles=False)
    follow_parent(topology.longest_drain)
    require_models(topology, str(topology_file))
    if run_dir is not None:
        writable(run_dir)
    return topology


def _named(role: str, name: str, topology: Topology, topology_file: Path) -> None:
    known = {"drafter": [d.name for d in topology.drafters], "target": [t.name for t in topology.targets]}
    if name in known[role]:
        return
    other = "target" if role == "drafter" else "drafter"
    if name in known[other]:
        raise UserError(f"{name} is a {other}: paceline {other} {topology_file} {name}")
    raise UserError(f"{topology_file} has no {role} {name!r}; it has: {', '.join(known[role]) or 'none'}")


def _drafter(
    topology: Topology,
    name: str,
    run_dir: Path | None,
    ready: Callable[[], None],
    shared: Transport | None = None,
) -> Serve:
    async def serve(orders: Orders) -> None:
        from paceline.edge.drafter import run_drafter

        async with _transport(topology, name, shared) as transport:
            await run_drafter(
                topology,
                topology.drafter(name),
                transport,
                key=_key(topology),
                run_dir=run_dir,
                ready=ready,
                orders=orders,
            )

    return serve


def _target(
    topology: Topology,
    name: str,
    run_dir: Path | None,
    ready: Callable[[], None],
    with_drafters: bool,
    shared: Transport | None = None,
) -> Serve:
    async def serve(orders: Orders) -> None:
        from paceline.cloud.target import run_target

        async with _transport(topology, name, shared) as transport:
            await run_target(
                topology,
                topology.target(name),
                transport,
                key=_key(topology),
                run_dir=run_dir,
                with_drafters=with_drafters,
                ready=ready,
                orders=orders,
            )

    return serve


def _transport(topology: Topology, name: str, shared: Transport | None) -> AbstractAsyncContextManager[Transport]:
    return nullcontext(shared) if shared is not None else open_transport(topology, name)


def _key(topology: Topology) -> bytes:
    """Its length and mode were looked at when the topology was loaded."""
    path = topology.security.key_file
    return b"" if path is None else path.read_bytes().strip()


def run_until_signal(topology_file: Path, serves: Sequence[Serve]) -> None:
    """Runs nodes on one asyncio loop (uvloop where installed) until SIGTERM, SIGINT or the first failure."""

    async def main() -> None:
        orders = Orders(lambda: load_topology(topology_file, look_at_bundles=False))
        orders.listen()
        async with anyio.create_task_group() as tasks:
            for serve in serves:
                tasks.start_soon(serve, orders)

    try:
        anyio.run(main, backend_options={"use_uvloop": _has_uvloop()})
    except Exception as error:  # a task group wraps what went wrong, in groups of groups
        raise _first_failure(error) from None


def _first_failure(error: BaseException) -> BaseException:
    """Out of nested groups: a failure of ours before any other."""
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    found = [_first_failure(one) for one in inner] or [error]
    return next((one for one in found if isinstance(one, PacelineError)), found[0])


def _has_uvloop() -> bool:
    from importlib.util import find_spec

    return find_spec("uvloop") is not None
