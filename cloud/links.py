"""A target's links to its drafters: what happens on them becomes events of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import anyio
from anyio.abc import TaskGroup

from paceline.cloud.engine import Engine
from paceline.cloud.events import Arrived, LinkDown, LinkUp, Room
from paceline.topology.connection import DrafterConnection
from paceline.topology.limits import PEER_LIMITS, Unread
from paceline.topology.peer import Peer
from paceline.topology.wire import Drafted, Hello, Message, Pong, Welcome

LIMITS = replace(PEER_LIMITS, unread_messages=256)  # answers come as asked for, a few a round


class TargetLinks:
    """Turns what happens on the links into events of the engine.

    A drafter that answers faster than the engine can read, or of more sessions than there are, loses its link:
    a flood must cost the flooder and nobody else.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unread = Unread(self._handled, LIMITS)

    def on_up(self, peer: Peer, greeting: Hello | Welcome) -> None:
        assert isinstance(greeting, Welcome)
        self._unread.up(peer)
        self._engine.inbox.put(LinkUp(peer.name, greeting, peer.send))

    def on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Pong):
            self._engine.inbox.put(Room(peer.name, message.free_sessions))
        if not isinstance(message, Drafted) or not peer.up:
            return
        if len(message.items) > self._engine.config.max_sessions:
            self._unread.refuse(peer, f"{peer.name} answers for more sessions than there are")
        elif self._unread.takes(peer):
            self._engine.inbox.put(Arrived(peer.name, message))

    def on_down(self, peer: Peer, reason: str) -> None:
        self._unread.down(peer)
        self._engine.inbox.put(LinkDown(peer.name))

    def _handled(self, drafter: str) -> int:
        """Answers of the drafter that the engine has looked at; it may not know a new drafter yet."""
        state = self._engine.drafting.drafters.get(drafter)
        return state.handled if state is not None else 0


class Connections:
    """One running connection for each drafter of a target; `keep` has them begin and end."""

    def __init__(self, tasks: TaskGroup, connect: Callable[[str, str], DrafterConnection]) -> None:
        """connect: makes the connection to a drafter, of its name and address."""
        self._tasks = tasks
        self._connect = connect
        self._running: dict[tuple[str, str], tuple[DrafterConnection, anyio.CancelScope]] = {}

    def __iter__(self) -> Iterator[DrafterConnection]:
        return iter([connection for connection, _ in self._running.values()])

    def trouble(self) -> dict[str, str]:
        """Why there is no link, for each drafter that has none."""
        return {c.drafter: c.trouble for c in self if c.drafter is not None and c.trouble is not None}

    def keep(self, addresses: Mapping[str, str]) -> None:
        """Connects to exactly these drafters, name → address; a connection that is up to date is left alone."""
        for known in self._running.keys() - addresses.items():
            connection, scope = self._running.pop(known)
            what = "address" if known[0] in addresses else "drafter"
            connection.parting = f"does not use this {what} any more"
            scope.cancel()
        for name, address in addresses.items():
            if (name, address) not in self._running:
                scope = anyio.CancelScope()
                connection = self._connect(name, address)
                self._running[name, address] = connection, scope
                self._tasks.start_soon(_run, connection, scope)


async def _run(connection: DrafterConnection, scope: anyio.CancelScope) -> None:
    with scope:
        await connection.run()
