"""An HTTP server inside a loop that is already running, without signal handlers of its own."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

import uvicorn

from paceline.core.errors import UserError
from paceline.topology.links.tcp_channel import join_address
from paceline.topology.links.tls_listener import TlsListener
from paceline.topology.refusals import RefusalLog

log = logging.getLogger(__name__)

BACKLOG = 2048
POLL = 0.01
REQUEST_SECONDS = 20.0  # a connection on which no request has begun for so long is closed
HANDSHAKE_SECONDS = 5.0
MAX_CONNECTIONS = 512  # or half the file descriptors, if that is less; beyond, those without a request have to go


class ApiServer(uvicorn.Server):
    """uvicorn's server; signals belong to the process that runs it, and nobody takes all file descriptors."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unlimited = descriptors == resource.RLIM_INFINITY
        self._room = MAX_CONNECTIONS if unlimited else min(MAX_CONNECTIONS, descriptors // 2)
        self._numbers = count()
        self._refusals = RefusalLog(log)
        self._listener: TlsListener | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """In place of uvicorn's, which sets no limit to TLS handshakes. sockets: the one that listens."""
        await self.lifespan.startup()
        assert sockets is not None
        self.servers = []
        self._listener = TlsListener(sockets[0], self.config.ssl, self._protocol, HANDSHAKE_SECONDS)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        assert self._listener is not None
        await self._listener.close()
        await super().shutdown(sockets)

    def waiting(self) -> list[Any]:
        """Connections on which no request runs, the oldest first; a `cycle` is a connection's latest request."""
        connections: list[Any] = [one for one in self.server_state.connections if hasattr(one, "cycle")]
        idle = [one for one in connections if one.cycle is None or one.cycle.response_complete]
        return sorted(idle, key=lambda one: int(one.number))

    def _protocol(self) -> asyncio.BaseProtocol:
        """For a connection that has just been accepted."""
        if len(self.server_state.connections) >= self._room:
            self._make_room()
        protocol: Any = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.number = next(self._numbers)
        return protocol  # type: ignore[no-any-return]

    def _make_room(self) -> None:
        """Without a request, the oldest of the host that has most of them goes."""
        waiting = self.waiting()
        if not waiting:
            return
        hosts = Counter(_host(one) for one in waiting)
        crowded, _ = hosts.most_common(1)[0]
        oldest = next(one for one in waiting if _host(one) == crowded)
        oldest.transport.abort()  # the end of TLS is not waited for
        self.server_state.connections.discard(oldest)
        self._refusals.tell(join_address(crowded, 0), "busy", f"{self._room} connections are open")


def _host(connection: Any) -> str:
    return connection.client[0] if connection.client else "?"


@asynccontextmanager
async def serve(
    app: Any,
    listen: str,
    *,
    grace: float = 5.0,
    access_log: bool = False,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Serves `app` for as long as the block runs; yields its URL (with the port chosen, for port 0).

    tls: with a certificate loaded, for HTTPS; another one may be loaded while it serves.
    A connection without a whole request head within REQUEST_SECONDS is closed; after a response sooner. So is one
    that has not finished TLS within HANDSHAKE_SECONDS, and the oldest that wait where there are too many.
    On leaving, no new connection is taken and calls in progress get `grace` seconds to end; what is left is
    cancelled. Raises UserError when `listen` can not be bound.
    """
    bound = bind(listen)
    config = uvicorn.Config(
        app,
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=access_log,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(grace)),
    )
    config.load()
    config.ssl = tls
    server = ApiServer(config)
    task = asyncio.create_task(server.serve(sockets=[bound]), name=f"api {listen}")
    try:
        while not server.started and not task.done():
            await asyncio.sleep(POLL)
        if task.done():
            task.result()
        idle = asyncio.create_task(_close_idle(server, REQUEST_SECONDS), name=f"idle connections {listen}")
        try:
            yield _url(bound, "https" if tls else "http")
        finally:
            idle.cancel()
    finally:
        server.should_exit = True
        await task
        bound.close()


async def _close_idle(server: ApiServer, limit: float) -> None:
    """Closes connections that send nothing, or a request's head too slowly; until cancelled.

    uvicorn itself counts only from the end of a response, and until the next byte.
    """
    idle: dict[tuple[Any, Any], float] = {}
    while True:
        now = time.monotonic()
        idle = {key: idle.get(key, now) for key in ((one, one.cycle) for one in server.waiting())}
        for (connection, _), since in idle.items():
            if now - since > 1.5 * limit:  # it does not answer the end of TLS
                connection.transport.abort()
            elif now - since > limit:
                connection.transport.close()
        await asyncio.sleep(limit / 10)


def bind(listen: str) -> socket.socket:
    """A listening socket at `host:port` (`[…]:port` for IPv6). Raises UserError with one sentence."""
    host, _, port_text = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise UserError(f"{listen!r} is no address to listen at: write host:port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port_text), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"cannot listen at {listen}: {getattr(error, 'strerror', error)}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        if os.name != "nt":  # there it would allow two servers at one port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port_text} on {host} is in use: stop what uses it or choose another") from None
        raise UserError(f"cannot listen at {listen}: {error.strerror}") from None
    return bound


def _url(bound: socket.socket, scheme: str) -> str:
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
