"""A link is measured by a real handshake and real Pings, and whoever works over it does not notice."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import anyio
import pytest

from paceline.core.clock import wall_us
from paceline.core.errors import HandshakeRefused, LinkClosed
from paceline.core.vocabulary import VocabularyIdentity
from paceline.topology import link_meter, server
from paceline.topology.handshake import PROBE, DrafterHandshake, Identity, TargetHandshake
from paceline.topology.link_meter import BURSTS, Measured, Meter, open_meter
from paceline.topology.links.base import Channel, Transport
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.wire import Close, Draft, Error, Goodbye, Message, Ping, Pong, encode

from .helpers import DRAFTER, TARGET, FakePeer, Recorder, drafter, listening, target

pytestmark = pytest.mark.anyio

WORDS = VocabularyIdentity("aa" * 16, 1000, b"one.two.thr.for.")


@asynccontextmanager
async def meter(transport: Transport, address: str, identity: Identity = TARGET) -> AsyncIterator[Meter]:
    async with open_meter(transport, address, identity, DRAFTER.name) as opened:
        yield opened


async def measure(transport: Transport, address: str, identity: Identity = TARGET) -> Measured:
    async with meter(transport, address, identity) as opened:
        return await opened.measure(anyio.Lock())


async def fake_probe(transport: Transport, address: str) -> FakePeer:
    """A probe that has finished the handshake and says nothing more."""
    channel = await transport.dial(address)
    peer = FakePeer(channel, TargetHandshake(replace(TARGET, capabilities=(PROBE,)), binding=channel.binding))
    await peer.until(lambda: peer.ready)
    return peer


async def test_a_link_is_measured(transport: Transport) -> None:
    """Round trips one after another and in bursts, and two clocks of one machine that agree."""
    async with drafter(transport, Recorder()) as running:
        found = await measure(transport, running.address)
    assert found.welcome.drafter == DRAFTER.name
    assert 20 <= len(found.rtts) <= link_meter.PINGS and len(found.bursts) == BURSTS
    assert 0 < min(found.rtts) < 0.1
    assert found.clock_offset is not None and abs(found.clock_offset) < 0.1


async def test_the_target_of_that_name_is_not_disturbed(transport: Transport) -> None:
    """A probe goes by its target's name, yet the target's link stays, and the drafter's service hears of one target."""
    above, below = Recorder(), Recorder()
    async with drafter(transport, below) as running, target(transport, running.address, above):
        await below.until(lambda: bool(below.ups))
        async with meter(transport, running.address) as opened:
            await opened.ping()
            assert [peer.name for peer in running.peers] == [TARGET.name]
            assert not above.downs
        above.ups[0][0].send(Close(1, [5]))  # its own link still works, after the probe's has ended
        await below.until(lambda: Close(1, [5]) in below.messages)
        assert [peer.name for peer in running.peers] == [TARGET.name]
    assert below.story == ["up chat-a 1", "down chat-a 1"]


async def test_a_probe_has_no_vocabulary_but_the_key(transport: Transport) -> None:
    """What the models speak does not matter to it; who it is does."""
    async with drafter(transport, Recorder(), replace(DRAFTER, vocabulary=WORDS)) as running:
        async with meter(transport, running.address) as opened:
            assert await opened.ping() > 0
        with pytest.raises(HandshakeRefused) as caught:
            async with meter(transport, running.address, replace(TARGET, key=b"guess")):
                raise AssertionError("let in without the key")
        assert caught.value.code == "unauthenticated"


@pytest.mark.parametrize("message", [Draft(1, []), Close(1, []), Error("x")])
async def test_a_probe_may_only_measure(transport: Transport, message: Message) -> None:
    """Its Draft is refused, and the service never sees it."""
    below = Recorder()
    async with drafter(transport, below) as running:
        peer = await fake_probe(transport, running.address)
        peer.channel.send(encode(message))
        await peer.until(lambda: peer.end is not None)
    kind = type(message).__name__
    told = [] if kind == "Error" else [Error("unexpected", f"a probe does not send {kind}")]
    assert peer.frames == told
    assert below.ups == below.downs == below.messages == []


async def test_probes_are_few(transport: Transport) -> None:
    """The oldest of too many goes, and a silent one is dropped as a silent target is."""
    async with drafter(transport, Recorder(), silence_limit=0.4) as running:
        peers = [await fake_probe(transport, running.address) for _ in range(server.MAX_PROBES + 1)]
        await peers[0].until(lambda: peers[0].end is not None)
        assert peers[0].frames == [Error("busy")]
        await peers[-1].until(lambda: peers[-1].end is not None)
        assert peers[-1].frames == [Goodbye("silent", "no sign of life")]


async def test_a_clock_that_differs_is_found(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset is the drafter's clock minus ours, as exact as the round trip is short."""
    monkeypatch.setattr(server, "wall_us", lambda: wall_us() + 2_500_000)
    async with drafter(transport, Recorder()) as running:
        found = await measure(transport, running.address)
    assert found.clock_offset is not None
    assert abs(found.clock_offset - 2.5) <= min(found.rtts) / 2 + 0.01


class Scripted(FakePeer):
    """A drafter that answers Pings as a test says."""

    def __init__(self, channel: Channel, answer: Message | None) -> None:
        self._answer = answer
        super().__init__(channel, DrafterHandshake(DRAFTER, channel.binding))

    def _on_frame(self, frame: bytes) -> None:
        was_ready = self.ready
        super()._on_frame(frame)
        last = self.frames[-1] if was_ready else None
        if isinstance(last, Ping) and self._answer is not None:
            self.channel.send(encode(self._answer if not isinstance(self._answer, Pong) else Pong(last.time_us)))


async def test_an_older_drafter_says_no_time(transport: Transport) -> None:
    """Its Pong ends before the clock: everything else is measured."""
    async with listening(transport, lambda channel: peers.append(Scripted(channel, Pong(0)))) as address:
        peers: list[Scripted] = []
        found = await measure(transport, address)
    assert found.clock_offset is None and len(found.bursts) == BURSTS


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (None, "a Ping was not answered within 0.1 s"),
        (Goodbye("leaving", "drafter 'orin-1' stops"), "the drafter ended it: drafter 'orin-1' stops"),
    ],
)
async def test_a_drafter_that_goes_silent_or_leaves_is_said_so(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, answer: Message | None, sentence: str
) -> None:
    """The measurement ends with the reason instead of hanging."""
    monkeypatch.setattr(link_meter, "ANSWER_SECONDS", 0.1)
    async with listening(transport, lambda channel: peers.append(Scripted(channel, answer))) as address:
        peers: list[Scripted] = []
        with pytest.raises(LinkClosed, match=sentence):
            await measure(transport, address)


@contextmanager
def gathering_proxy(address: str) -> Iterator[str]:
    """Forwards bytes as a careless proxy does, with Nagle's algorithm on at both of its sockets."""
    host, port = address.split(":")
    sockets: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            sockets.extend((near, far))
            for pair in ((near, far), (far, near)):
                threads.append(threading.Thread(target=pump, args=pair))
                threads[-1].start()

    listener = socket.create_server(("127.0.0.1", 0))
    threads = [threading.Thread(target=accept)]
    threads[0].start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for each in sockets:
        each.close()


async def test_nagle_on_the_way_shows_in_bursts() -> None:
    """A real proxy without TCP_NODELAY: Pings alone are fast, and a frame behind another waits 40 ms."""
    transport = TcpTransport()
    async with drafter(transport, Recorder()) as running:
        with gathering_proxy(running.address) as address:
            found = await measure(transport, address)
    assert sorted(found.rtts)[len(found.rtts) // 2] < 0.02
    assert sum(0.035 < burst < 0.06 for burst in found.bursts) >= BURSTS // 4, found.bursts
