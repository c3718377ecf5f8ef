"""Which transport a node of a topology talks over: the one place that knows them all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.topology.links.base import Transport
from paceline.topology.spec import Topology


@asynccontextmanager
async def open_transport(topology: Topology, node: str) -> AsyncIterator[Transport]:
    """The transport of one node, closed at the end. UserError when a certificate or the broker's password is amiss."""
    transport = make_transport(topology, node)
    try:
        yield transport
    finally:
        await transport.close()


def make_transport(topology: Topology, node: str) -> Transport:
    """node: the name under which it is known to the others. A memory transport reaches only who shares it."""
    if topology.link.transport == "memory":
        from paceline.topology.links.memory import MemoryTransport

        return MemoryTransport()
    from paceline.topology.links.tcp import TcpTransport

    return TcpTransport()
