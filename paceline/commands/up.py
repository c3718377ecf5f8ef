"""`paceline up`: starts and supervises what belongs on this machine, until Ctrl-C.

The first Ctrl-C (or SIGTERM) lets targets finish what they run, the second ends everything. SIGHUP makes every node
read the topology again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.commands.options import NoDrafter, RunDir, TopologyFile

if TYPE_CHECKING:
    from paceline.topology.orders import Orders
    from paceline.topology.spec import Topology
    from paceline.topology.supervisor import Supervisor

log = logging.getLogger(__name__)


def up(topology_file: TopologyFile, no_drafter: NoDrafter = False, run_dir: RunDir = None) -> None:
    """Start and supervise what belongs on this machine, until Ctrl-C; what dies is started again.

    The first Ctrl-C or SIGTERM lets requests finish (at most `drain` seconds), the second ends at once. SIGHUP has
    every node read the topology and its certificates again.
    """
    from paceline.deployment import run_directory
    from paceline.topology.process import configure_logging
    from paceline.topology.spec import load_topology, require_models

    configure_logging()
    topology = load_topology(topology_file)
    require_models(topology, str(topology_file))
    with run_directory(run_dir) as directory:
        asyncio.run(_up(topology, topology_file, directory, not no_drafter, kept=run_dir is not None))


@contextlib.asynccontextmanager
async def _hurrying(orders: Orders, supervisor: Supervisor) -> AsyncIterator[None]:
    """Within the block, the first order to leave is confirmed, and the second reaches every node."""
    from paceline.topology.orders import ONE_ORDER_SECONDS

    async def hurry() -> None:
        await orders.stop.wait()
        supervisor.leaving = True
        drain = max((child.node.drain for child in supervisor.children.values()), default=0.0)
        wait = f", waiting up to {drain:g} s for requests; Ctrl-C again ends at once" if drain else ""
        with contextlib.suppress(OSError):  # the terminal may be what went
            typer.echo(f"stopping{wait}")
        await orders.end.wait()
        while True:
            supervisor.pass_on(signal.SIGTERM)
            await asyncio.sleep(ONE_ORDER_SECONDS)

    task = asyncio.create_task(hurry())
    try:
        yield
    finally:
        await supervisor.stop(list(supervisor.children))
        task.cancel()


async def _up(topology: Topology, topology_file: Path, run_dir: Path, with_drafters: bool, *, kept: bool) -> None:
    from paceline.deployment import api_url_of, nodes_here
    from paceline.topology.orders import Orders
    from paceline.topology.process import notify
    from paceline.topology.spec import load_topology
    from paceline.topology.supervisor import Supervisor, first_of

    orders = Orders(lambda: load_topology(topology_file))
    orders.listen()
    drafters, targets = nodes_here(topology, topology_file, run_dir, with_drafters=with_drafters)
    async with Supervisor(run_dir) as supervisor, _hurrying(orders, supervisor):
        for node in (*drafters, *targets):
            supervisor.start(node)
        where = f"{run_dir}{'' if kept else ' (removed at the end; --run-dir keeps them)'}"
        typer.echo(f"starting {', '.join(supervisor.children)}; logs and status files in {where}")
        stopping = asyncio.create_task(orders.stop.wait())
        ready = asyncio.create_task(supervisor.wait_ready(list(supervisor.children)))
        await first_of(ready, stopping)
        if ready.done():
            ready.result()
            for target in topology.targets:
                if target.name in supervisor.children or not drafters:
                    typer.echo(f"{target.name} serves {api_url_of(topology, target)}")
            typer.echo("ready; Ctrl-C stops everything")
            notify("READY=1")
            orders.follow(lambda new: _pass_on(supervisor, new, topology_file, with_drafters))
            failed = asyncio.create_task(supervisor.failed.wait())
            await first_of(stopping, failed)
            failed.cancel()
        for task in (ready, stopping):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await supervisor.stop([node.name for node in targets if node.name in supervisor.children])
        supervisor.check()


def _pass_on(supervisor: Supervisor, topology: Topology, topology_file: Path, with_drafters: bool) -> None:
    """Has every node read the topology again; processes that would come or go are those of the next start."""
    from paceline.deployment import nodes_here

    drafters, targets = nodes_here(topology, topology_file, supervisor.run_dir, with_drafters=with_drafters)
    nodes = {node.name: node for node in (*drafters, *targets)}
    if later := sorted(nodes.keys() ^ supervisor.children.keys()):
        log.info("at the next start: %s", ", ".join(f"{'add' if n in nodes else 'remove'} {n}" for n in later))
    for name, child in supervisor.children.items():
        if name in nodes:
            child.node = replace(child.node, drain=nodes[name].drain)
    supervisor.pass_on(signal.SIGHUP)
