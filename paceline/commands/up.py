"""`paceline up`: starts and supervises what belongs on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.commands.options import NoDrafter, RunDir, TopologyFile

if TYPE_CHECKING:
    from paceline.topology.spec import Topology


def up(topology_file: TopologyFile, no_drafter: NoDrafter = False, run_dir: RunDir = None) -> None:
    """Start and supervise what belongs on this machine, until Ctrl-C; what dies is started again."""
    from paceline.deployment import run_directory
    from paceline.topology.process import configure_logging
    from paceline.topology.spec import load_topology, require_models

    configure_logging()
    topology = load_topology(topology_file)
    require_models(topology, str(topology_file))
    with run_directory(run_dir) as directory:
        asyncio.run(_up(topology, topology_file, directory, not no_drafter))


async def _up(topology: Topology, topology_file: Path, run_dir: Path, with_drafters: bool) -> None:
    from paceline.deployment import nodes_here
    from paceline.topology.process import notify
    from paceline.topology.supervisor import Supervisor, first_of

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    drafters, targets = nodes_here(topology, topology_file, run_dir, with_drafters=with_drafters)
    async with Supervisor(run_dir) as supervisor:
        for node in (*drafters, *targets):
            supervisor.start(node)
        typer.echo(f"starting {', '.join(supervisor.children)}; logs and status files in {run_dir}")
        stopping = asyncio.create_task(stop.wait())
        ready = asyncio.create_task(supervisor.wait_ready(list(supervisor.children)))
        await first_of(ready, stopping)
        if ready.done():
            ready.result()
            for target in topology.targets:
                if target.name in supervisor.children or not drafters:
                    typer.echo(f"{target.name} serves http://{target.api.listen}/v1")
            typer.echo("ready; Ctrl-C stops everything")
            notify("READY=1")
            failed = asyncio.create_task(supervisor.failed.wait())
            await first_of(stopping, failed)
            failed.cancel()
        for task in (ready, stopping):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await supervisor.stop([node.name for node in targets if node.name in supervisor.children])
        supervisor.check()
