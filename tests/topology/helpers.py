"""Both ends of a link under test: recorders, fakes that only speak the handshake, running servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from paceline.topology.connection import DrafterConnection
from paceline.topology.handshake import DrafterHandshake, Identity, TargetHandshake
from paceline.topology.links.base import Channel, Transport
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.peer import Peer
from paceline.topology.server import DrafterServer
from paceline.topology.wire import (
    Error,
    Goodbye,
    Hello,
    Message,
    Welcome,
    decode,
)

TARGET = Identity("star", "chat-a", key=b"secret")
DRAFTER = Identity("star", "orin-1", key=b"secret", model="tiny", strategy="draft_model", max_sessions=4)


class Waiting:
    """Lets a test wait until something that is recorded has come true."""

    def __init__(self) -> None:
        self._changed = anyio.Event()

    def wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], bool], seconds: float = 5) -> None:
        with anyio.fail_after(seconds):
            while not condition():
                await self._changed.wait()


class Recorder(Waiting):
    """A handler that writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.ups: list[tuple[Peer, Hello | Welcome]] = []
        self.downs: list[tuple[Peer, str]] = []
        self.messages: list[Message] = []
        self.story: list[str] = []

    def on_up(self, peer: Peer, greeting: Hello | Welcome) -> None:
        self.ups.append((peer, greeting))
        self.story.append(f"up {peer.name} {len(self.ups)}")
        self.wake()

    def on_message(self, peer: Peer, message: Message) -> None:
        self.messages.append(message)
        self.wake()

    def on_down(self, peer: Peer, reason: str) -> None:
        self.downs.append((peer, reason))
        number = 1 + [one for one, _ in self.ups].index(peer)
        self.story.append(f"down {peer.name} {number}")
        self.wake()

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.messages if isinstance(message, kind)]


class FakePeer(Waiting):
    """Speaks the handshake and then only what the test says."""

    def __init__(self, channel: Channel, handshake: TargetHandshake | DrafterHandshake) -> None:
        super().__init__()
        self.channel = channel
        self.handshake = handshake
        self.frames: list[Message] = []
        self.end: str | None = None
        channel.receive(self._on_frame, self._on_close)
        if isinstance(handshake, TargetHandshake):
            channel.send(handshake.start())

    @property
    def ready(self) -> bool:
        handshake = self.handshake
        return handshake.done if isinstance(handshake, DrafterHandshake) else handshake.welcome is not None

    def _on_frame(self, frame: bytes) -> None:
        message = decode(frame)
        if self.ready or isinstance(message, (Error, Goodbye)):
            self.frames.append(message)
        else:
            answer = self.handshake.receive(frame)
            if answer is not None:
                self.channel.send(answer)
            if self.ready:
                self.channel.secure(self.handshake.frame_key)
        self.wake()

    def _on_close(self, reason: str) -> None:
        self.end = reason
        self.wake()


class Dials(Waiting):
    """Counts how often a transport dials, and has it do something else instead if that is given."""

    def __init__(self, transport: Transport, instead: Callable[[str], Awaitable[Channel]] | None = None) -> None:
        super().__init__()
        self.count = 0
        self._dial = instead or transport.dial
        transport.dial = self._counted  # type: ignore[method-assign]

    async def _counted(self, address: str, name: str | None = None) -> Channel:
        self.count += 1
        self.wake()
        return await self._dial(address)


def free_address(transport: Transport) -> str:
    """An address at which nobody listens yet."""
    return "127.0.0.1:0" if isinstance(transport, TcpTransport) else "drafter"


@asynccontextmanager
async def listening(transport: Transport, accept: Callable[[Channel], None]) -> AsyncIterator[str]:
    """The address of a listener that hands each channel to `accept` and is no drafter; closed at the end."""
    listener = await transport.listen(free_address(transport), accept)
    try:
        yield listener.address
    finally:
        await listener.close()


@asynccontextmanager
async def drafter(
    transport: Transport, handler: Recorder, identity: Identity = DRAFTER, address: str = "", **options: float
) -> AsyncIterator[DrafterServer]:
    """A running drafter's side; stopped at the end."""
    own = address or free_address(transport)
    server = DrafterServer(transport, own, identity, handler, **options)  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.run)
        yield server
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def target(
    transport: Transport,
    address: str,
    handler: Recorder,
    identity: Identity = TARGET,
    live: Callable[[], list[int]] = list,
    **options: float,
) -> AsyncIterator[DrafterConnection]:
    """A running target's side; stopped at the end."""
    connection = DrafterConnection(transport, address, identity, handler, live, **options)  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.run)
        yield connection
        tasks.cancel_scope.cancel()


async def fake_target(transport: Transport, address: str, name: str = "fake") -> FakePeer:
    """A target that has finished the handshake and says nothing more."""
    channel = await transport.dial(address)
    peer = FakePeer(channel, TargetHandshake(replace(TARGET, name=name), binding=channel.binding))
    await peer.until(lambda: peer.ready)
    return peer
