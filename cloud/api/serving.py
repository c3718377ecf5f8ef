"""An HTTP server inside a loop that is already running, without signal handlers of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from paceline.core.errors import UserError

BACKLOG = 2048
POLL = 0.01
REQUEST_SECONDS = 20.0  # a connection on which no request has begun for so long is closed


class ApiServer(uvicorn.Server):
    """uvicorn's server; signals belong to the process that runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    A connection without a whole request head within REQUEST_SECONDS is closed; after a response sooner.
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

    uvicorn itself counts only from the end of a response, and until the next byte. Its `cycle` is the request that a
    connection has last begun.
    """
    idle: dict[tuple[Any, Any], float] = {}
    while True:
        now = time.monotonic()
        connections: list[Any] = [one for one in server.server_state.connections if hasattr(one, "cycle")]
        waiting = [(one, one.cycle) for one in connections if one.cycle is None or one.cycle.response_complete]
        idle = {key: idle.get(key, now) for key in waiting}
        for (connection, _), since in idle.items():
            if now - since > limit:
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
    except socket.gaierror as error:
        raise UserError(f"cannot listen at {listen}: {error.strerror}") from None
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
