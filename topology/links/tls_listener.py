"""A listening socket that makes a channel only of who finishes TLS.

asyncio's own server says nothing of a handshake that fails. Here each is awaited: it gets a few seconds, a crowd
shuts itself out, and what fails is told once for each host. Nor does it take a whole backlog of connections at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from paceline.topology.links.tcp_channel import join_address
from paceline.topology.links.words import OTHER_AUTHORITY, words
from paceline.topology.refusals import RefusalLog

log = logging.getLogger(__name__)

MAX_UNFINISHED = 64
PAUSE_SECONDS = 1.0  # after the system has no file descriptor left


class TlsListener:
    """Accepts until closed."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext | None,
        protocol: Callable[[], asyncio.BaseProtocol],
        handshake_limit: float,
    ) -> None:
        """sock: bound, listening, not blocking. protocol: makes what is told of the connection once TLS is up.
        context: None where there is no TLS. handshake_limit: seconds that it may take."""
        self._socket = sock
        self.context = context  # of the next handshake
        self._protocol = protocol
        self._limit = handshake_limit
        self._unfinished: dict[asyncio.Task[None], str] = {}  # → host; oldest first
        self._fresh: set[socket.socket] = set()  # accepted, and their task has not begun
        self._refusals = RefusalLog(log)
        self._task = asyncio.create_task(self._accept(), name="TLS listener")

    async def close(self) -> None:
        """Stops accepting; handshakes under way are dropped."""
        tasks = [self._task, *self._unfinished]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in (self._socket, *self._fresh):
            sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, where = await loop.sock_accept(self._socket)
            except OSError as error:
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if len(self._unfinished) >= MAX_UNFINISHED:
                self._make_room()
            self._fresh.add(connection)
            task = loop.create_task(self._shake_hands(connection, join_address(*where[:2])))
            self._unfinished[task] = where[0]
            task.add_done_callback(lambda task: self._unfinished.pop(task, None))
            await asyncio.sleep(0)  # a burst of connections leaves the loop to others

    def _make_room(self) -> None:
        """The oldest of the host that has most of them goes."""
        crowded, _ = Counter(self._unfinished.values()).most_common(1)[0]
        oldest = next(task for task, host in self._unfinished.items() if host == crowded)
        del self._unfinished[oldest]
        oldest.cancel()
        self._refusals.tell(join_address(crowded, 0), "busy", f"more than {MAX_UNFINISHED} unfinished TLS handshakes")

    async def _shake_hands(self, connection: socket.socket, address: str) -> None:
        self._fresh.discard(connection)
        try:
            limit = self._limit if self.context is not None else None
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, connection, ssl=self.context, ssl_handshake_timeout=limit
            )
        except OSError as error:  # TLS errors, resets and the time limit are all of this kind
            reset = isinstance(error, ConnectionResetError)  # how most targets leave whom they do not believe
            self._refusals.tell(address, "tls", words(error) + (f"; perhaps {OTHER_AUTHORITY}" if reset else ""))
