"""Channels over TCP: dialling and listening, inside TLS where the topology wants it. One connection: tcp_channel.py."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection
from typing import NamedTuple

from paceline.core.errors import LinkClosed, UserError
from paceline.topology.links.base import Channel, Listener
from paceline.topology.links.tcp_channel import TcpChannel, join_address, split_address
from paceline.topology.links.tls_listener import TlsListener
from paceline.topology.links.words import words

BACKLOG = 100


class ServerTls(NamedTuple):
    """How a listener encrypts. binding: SHA-256 of the certificate it shows; handshake_limit: in seconds."""

    context: ssl.SSLContext
    binding: bytes
    handshake_limit: float = 5.0


class TcpListener:
    """A listening socket and the channels it accepted."""

    def __init__(self, on_channel: Callable[[Channel], None]) -> None:
        self.address = ""
        self._on_channel = on_channel
        self._channels: set[TcpChannel] = set()
        self._server: asyncio.Server | TlsListener | None = None
        self._binding: bytes | None = None  # with TLS: of the certificate that is shown now

    async def start(self, host: str, port: int, tls: ServerTls | None) -> None:
        """Begins to accept. Raises OSError."""
        loop = asyncio.get_running_loop()
        if tls is None:
            self._server = await loop.create_server(self._channel, host, port)
            port = self._server.sockets[0].getsockname()[1]
        else:
            sock = await _listening_socket(host, port)
            port = sock.getsockname()[1]
            self._binding = tls.binding
            self._server = TlsListener(sock, tls.context, self._channel, tls.handshake_limit)
        self.address = join_address(host, port)

    def renew(self, tls: ServerTls) -> None:
        """Another certificate for who connects from now on."""
        if isinstance(self._server, TlsListener):
            self._server.context, self._binding = tls.context, tls.binding

    def _channel(self) -> TcpChannel:
        return TcpChannel(self._opened, self._binding)

    def _opened(self, channel: TcpChannel) -> None:
        self._channels = {one for one in self._channels if not one._lost} | {channel}
        self._on_channel(channel)

    async def close(self) -> None:
        if isinstance(self._server, TlsListener):
            await self._server.close()
        elif self._server is not None:
            self._server.close()
        for channel in list(self._channels):
            channel.close()


async def _listening_socket(host: str, port: int) -> socket.socket:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sock = socket.create_server(found[0][4][:2], family=found[0][0], backlog=BACKLOG)
    sock.setblocking(False)
    return sock


class TcpTransport:
    """Connections over TCP, inside TLS when a context is given for that side."""

    def __init__(
        self,
        *,
        server_tls: ServerTls | None = None,
        client_tls: ssl.SSLContext | None = None,
        in_clear: Collection[str] = (),
    ) -> None:
        """in_clear: names that are dialled without TLS all the same, for they listen on this machine only."""
        self._server_tls = server_tls
        self._client_tls = client_tls
        self._in_clear = in_clear
        self._listeners: list[TcpListener] = []

    @property
    def encrypted(self) -> bool:
        """Whether it shows certificates at all."""
        return self._server_tls is not None or self._client_tls is not None

    def renew(self, fresh: TcpTransport) -> None:
        """Takes over the certificates of a transport that was made anew; open connections keep theirs."""
        self._server_tls, self._client_tls, self._in_clear = fresh._server_tls, fresh._client_tls, fresh._in_clear
        for listener in self._listeners:
            if fresh._server_tls is not None:
                listener.renew(fresh._server_tls)

    async def dial(self, address: str, name: str | None = None) -> Channel:
        host, port = split_address(address)
        tls = None if name in self._in_clear else self._client_tls
        try:
            _, channel = await asyncio.get_running_loop().create_connection(
                TcpChannel, host, port, ssl=tls, server_hostname=name if tls else None
            )
        except (OSError, UnicodeError) as error:  # the latter is what a name gives that no host can have
            raise LinkClosed(f"cannot reach {address}{' inside TLS' if tls else ''}: {words(error)}") from None
        if tls is not None and name is not None and channel.certified != name:  # alternative names are not enough
            channel.close()
            raise LinkClosed(f"cannot reach {address}: it shows the certificate of {channel.certified!r}, not {name!r}")
        return channel

    async def listen(self, address: str, on_channel: Callable[[Channel], None]) -> Listener:
        host, port = split_address(address)
        listener = TcpListener(on_channel)
        try:
            await listener.start(host, port, self._server_tls)
        except (OSError, UnicodeError) as error:
            raise UserError(f"cannot listen at {address}: {words(error)}") from None
        self._listeners.append(listener)
        return listener

    async def close(self) -> None:
        """Connections share nothing."""
