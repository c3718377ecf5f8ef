"""Both transports, one loop."""

from __future__ import annotations

import pytest

from paceline.topology.links.base import Transport
from paceline.topology.links.memory import MemoryTransport
from paceline.topology.links.tcp import TcpTransport


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["tcp", "memory"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return TcpTransport() if request.param == "tcp" else MemoryTransport()
