"""Before `paceline run` starts anything, every port that is taken is named at once."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.ports import require_free
from paceline.topology.spec import parse_topology

TOPOLOGY = """
version: 1
name: star
drafters:
  - {{name: drafter, model: toy, runtime: emulated, listen: "127.0.0.1:{0}", profile: {{step_ms: 1, agreement: 0.8}}}}
targets:
  - {{name: one, model: toy, engine: emulated, profile: &v {{verify_ms: 5}}, drafters: &d {{names: [drafter]}},
     api: {{listen: "127.0.0.1:{1}"}}}}
  - {{name: two, model: toy, engine: emulated, profile: *v, drafters: *d, api: {{listen: "127.0.0.1:{2}"}}}}
"""


def test_all_ports_in_use_are_named_with_their_nodes() -> None:
    """As beside a running `up`: the drafter's and one target's; without drafters, the target's alone."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [server.getsockname()[1] for server in servers]
        topology = parse_topology(TOPOLOGY.format(*ports), "star.yaml", Path())
        servers[1].close()
        with pytest.raises(UserError) as refused:
            require_free(topology)
        assert str(refused.value) == (
            f"127.0.0.1:{ports[0]} (drafter), 127.0.0.1:{ports[2]} (two) are in use: stop what uses them, such as a "
            "running `paceline up`"
        )
        with pytest.raises(UserError, match=rf"^127.0.0.1:{ports[2]} \(two\) is in use: stop what uses it"):
            require_free(topology, with_drafters=False)
    require_free(topology)
