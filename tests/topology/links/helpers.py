"""Channels under test: every transport in one shape, and a plain socket against one of ours."""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import trustme

from paceline.topology.links.base import Channel, Listener, Transport
from paceline.topology.links.memory import MemoryTransport
from paceline.topology.links.mqtt import MqttTransport
from paceline.topology.links.mqtt_client import PUBLISH_OVERHEAD
from paceline.topology.links.mqtt_frames import HEADER
from paceline.topology.links.tcp import ServerTls, TcpTransport
from paceline.topology.links.tcp_channel import split_address

from .brokers import BROKERS, BrokerProcess


class End:
    """Records what one end of a channel is told."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.frames: list[bytes] = []
        self.reasons: list[str] = []
        self._changed = anyio.Event()
        channel.receive(self._on_frame, self._on_close)

    def _on_frame(self, frame: bytes) -> None:
        self.frames.append(frame)
        self._wake()

    def _on_close(self, reason: str) -> None:
        self.reasons.append(reason)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[End], bool]) -> None:
        with anyio.fail_after(10):
            while not condition(self):
                await self._changed.wait()

    async def closed(self) -> str:
        await self.until(lambda end: bool(end.reasons))
        return self.reasons[0]


def tls_transport() -> TcpTransport:
    """TCP inside TLS with a throw-away certificate of its own, which its dialer trusts."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.configure_cert(server)
    authority.configure_trust(client)
    shown = ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())
    return TcpTransport(server_tls=ServerTls(server, hashlib.sha256(shown).digest()), client_tls=client)


TRANSPORTS: dict[str, Callable[[], Transport]] = {"tcp": TcpTransport, "tls": tls_transport, "memory": MemoryTransport}
KINDS = (*TRANSPORTS, *BROKERS)


class Network:
    """A transport and an address at which it can listen."""

    def __init__(self, kind: str, broker: BrokerProcess | None = None) -> None:
        self.kind = kind
        self.transport = TRANSPORTS[kind]() if broker is None else broker.transport()
        self.address = "127.0.0.1:0" if kind in ("tcp", "tls") else "drafter"

    def overhead(self, inward: bool) -> int:
        """Bytes around each frame that goes to the drafter, or comes from it."""
        if isinstance(self.transport, MqttTransport):
            topic = self.transport.place.topic("drafter", "in" if inward else "out", "drafter")
            return len(topic) + PUBLISH_OVERHEAD + HEADER.size
        return 0 if self.kind == "memory" else 4

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[Listener, Callable[[], Awaitable[Channel]]]]:
        """A listener, and how to get the next channel it accepts."""
        send, receive = anyio.create_memory_object_stream[Channel](100)
        listener = await self.transport.listen(self.address, send.send_nowait)
        try:
            with send, receive:
                yield listener, receive.receive
        finally:
            await listener.close()
            await self.transport.close()

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[End, End]]:
        """Both ends of one open channel."""
        async with self.listening() as (listener, accepted):
            near = End(await self.transport.dial(listener.address))
            far = End(await accepted())
            yield near, far
            near.channel.close()
            far.channel.close()
            await near.closed()
            await far.closed()


@asynccontextmanager
async def raw_peer() -> AsyncIterator[tuple[socket.socket, End]]:
    """A plain socket on one side, our channel on the other."""
    network = Network("tcp")
    async with network.listening() as (listener, accepted):
        with socket.create_connection(split_address(listener.address)) as raw:
            raw.settimeout(10)
            yield raw, End(await accepted())
