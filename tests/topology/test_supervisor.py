"""Starting processes: what goes wrong before one runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.topology.supervisor import Node, Supervisor

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_process_that_cannot_be_started_is_a_failure(tmp_path: Path) -> None:
    """Nobody waits for it to become ready."""
    async with Supervisor(tmp_path) as supervisor:
        supervisor.start(Node("node", ("/no/such/program",)))
        with pytest.raises(PacelineError, match="node cannot be started"):
            await supervisor.wait_ready(["node"], timeout=10)
