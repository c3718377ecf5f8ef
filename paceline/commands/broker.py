"""`paceline broker`: the broker of a topology that says `local_broker: true`, as the supervisor starts it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from paceline.commands.options import RunDir, TopologyFile
from paceline.core.errors import UserError


def broker(topology_file: TopologyFile, run_dir: RunDir = None) -> None:
    """Run this machine's MQTT broker in the foreground, until SIGTERM or Ctrl-C."""
    from paceline.deployment import writable
    from paceline.topology.broker import run_broker
    from paceline.topology.process import configure_logging
    from paceline.topology.spec import load_topology

    configure_logging()
    topology = load_topology(topology_file)
    if not topology.link.local_broker:
        raise UserError(f"{topology_file} has no link.local_broker: true")
    folder = writable(run_dir) if run_dir is not None else Path(tempfile.mkdtemp(prefix="paceline-"))
    run_broker(topology.link.broker_address, folder)
