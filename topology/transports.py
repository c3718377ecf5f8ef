"""Which transport a node of a topology talks over: the one place that knows them all."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.errors import UserError
from paceline.topology.links.base import Transport
from paceline.topology.spec import Topology

if TYPE_CHECKING:
    from paceline.topology.links.mqtt_life import Place


@asynccontextmanager
async def open_transport(topology: Topology, node: str, *, quiet: bool = False) -> AsyncIterator[Transport]:
    """The transport of one node, closed at the end. UserError when a certificate or the broker's password is amiss.

    quiet: beside the node itself, for who only measures.
    """
    transport = make_transport(topology, node, quiet=quiet)
    try:
        yield transport
    finally:
        await transport.close()


def make_transport(topology: Topology, node: str, *, quiet: bool = False) -> Transport:
    """node: the name under which it is known to the others. A memory transport reaches only who shares it."""
    if topology.link.transport == "memory":
        from paceline.topology.links.memory import MemoryTransport

        return MemoryTransport()
    if topology.link.transport == "mqtt":
        from paceline.topology.links.mqtt import MqttTransport

        return MqttTransport(replace(mqtt_place(topology, node), quiet=quiet))
    from paceline.topology.tls import tcp_transport

    return tcp_transport(topology, node)


def renew_transport(transport: Transport, topology: Topology, node: str) -> bool:
    """Certificates as their files are now, for TCP connections made from now on. UserError when one is amiss.

    Returns whether the transport has any.
    """
    from paceline.topology.links.tcp import TcpTransport
    from paceline.topology.tls import tcp_transport

    if not isinstance(transport, TcpTransport):
        return False
    transport.renew(tcp_transport(topology, node))
    return transport.encrypted


def mqtt_place(topology: Topology, node: str) -> Place:
    """Where that node lives at the topology's broker. UserError when a certificate or the password cannot be read."""
    from paceline.topology.links.mqtt_life import TOPIC_PREFIX, Place
    from paceline.topology.links.mqtt_paho import Broker

    link, address = topology.link, topology.link.broker_address
    assert link.broker is not None
    tls = None
    try:
        if link.broker.startswith("mqtts:"):
            tls = ssl.create_default_context(cafile=link.ca)
            if link.cert is not None:
                tls.load_cert_chain(link.cert, link.key)
        password_file = link.password_file_of(node)
        password = password_file.read_text().strip() if password_file is not None else None
        key = topology.security.key_file.read_bytes().strip() if topology.security.key_file is not None else b""
    except OSError as error:  # TLS's errors are among them
        raise UserError(f"cannot read what the broker {link.broker} needs: {error}") from None
    broker = Broker(address.host, address.port, tls, link.username_of(node), password)
    return Place(broker, topology.name, node, key, link.topic_prefix or TOPIC_PREFIX)
