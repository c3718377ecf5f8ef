"""What one peer may send: rates, and how far ahead of its reader."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.sampling import Sampling
from paceline.topology.handshake import DrafterHandshake
from paceline.topology.limits import Meter, PeerLimits, Unread, work
from paceline.topology.links.base import Transport
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.links.tcp_channel import split_address
from paceline.topology.peer import Peer
from paceline.topology.wire import Close, Draft, DraftItem, Error, Ping, encode

from .helpers import DRAFTER, FakePeer, Recorder, drafter, fake_target, target

pytestmark = pytest.mark.anyio

LIMITS = PeerLimits(frames_per_second=10, bytes_per_second=1000, burst_seconds=2, unread_messages=3, unread_bytes=500)


def test_a_burst_is_allowed_and_a_lasting_excess_is_not() -> None:
    """Twenty frames at once, then ten a second, for as long as one likes."""
    meter = Meter(LIMITS, now=0.0)
    assert [meter.takes(1, 0.0) for _ in range(21)] == [True] * 20 + [False]
    meter = Meter(LIMITS, now=0.0)
    assert all(meter.takes(99, tick / 10) for tick in range(1000))
    assert not all(meter.takes(99, 100 + tick / 11) for tick in range(1000))


def test_bytes_count_as_frames_do() -> None:
    """A few large frames are as much as many small ones, and a quiet peer saves up no more than a burst."""
    meter = Meter(LIMITS, now=0.0)
    assert meter.takes(2000, 0.0) and not meter.takes(1, 0.0)
    meter = Meter(LIMITS, now=0.0)
    assert meter.takes(2000, 3600.0) and not meter.takes(1, 3600.0)


class Pipe:
    """A channel of which only the counts and the end matter."""

    peer_address = "192.0.2.7:4711"
    binding = b""
    certified = None
    bytes_out = 0
    max_frame = 1 << 22

    def __init__(self) -> None:
        self.bytes_in = 0
        self.sent: list[bytes] = []
        self.closed = False

    def send(self, frame: bytes, control: bool = False) -> None:
        self.sent.append(frame)

    def secure(self, key: bytes) -> None: ...

    def receive(self, on_frame: Any, on_close: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_what_waits_for_a_reader_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Messages that are read make room; a fourth that waits, or too many bytes, end the link; told once."""
    handled = {"chat-a": 40}
    unread = Unread(lambda name: handled.get(name, 0), LIMITS)

    def link() -> tuple[Peer, Pipe]:
        pipe = Pipe()
        peer = Peer("chat-a", pipe)
        unread.up(peer)
        return peer, pipe

    peer, pipe = link()
    for _ in range(100):
        pipe.bytes_in += 100
        assert unread.takes(peer)
        handled["chat-a"] += 1
    assert [unread.takes(peer) for _ in range(4)] == [True, True, True, False]
    assert pipe.closed and pipe.sent == [encode(Error("flood", "chat-a sends more than can be read"))]
    peer, pipe = link()
    pipe.bytes_in += 300
    assert unread.takes(peer)
    pipe.bytes_in += 300
    assert not unread.takes(peer)
    assert [record.__dict__["code"] for record in caplog.records] == ["flood"]


def test_a_long_message_counts_as_many() -> None:
    """By what it holds, and room comes as it is read."""
    assert work(Ping(1)) == work(Draft(1, [])) == 1
    assert work(Ping(1, list(range(4000)))) == work(Close(1, list(range(4000)))) == 1001
    opening = DraftItem(1, 0, b"", 0, 0, Sampling(logit_bias={3: 1.0, 4: 2.0}))
    assert work(Draft(1, [opening, opening, DraftItem(2, 0, b"", 0, 0)])) == 8
    handled = {"chat-a": 0}
    unread = Unread(lambda name: handled[name], replace(LIMITS, unread_items=100))
    pipe = Pipe()
    peer = Peer("chat-a", pipe)
    unread.up(peer)
    for _ in range(10):
        assert unread.takes(peer, 60) and unread.takes(peer, 40)
        handled["chat-a"] += 2
    assert unread.takes(peer, 60) and not unread.takes(peer, 41) and pipe.closed


async def test_a_target_that_floods_loses_its_link(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    """It reads why; others go on undisturbed; the log has one line however often it comes back."""
    below, alive = Recorder(), Recorder()
    caplog.set_level(logging.WARNING)
    limits = PeerLimits(frames_per_second=1, burst_seconds=50)
    async with (
        drafter(transport, below, limits=limits) as server,
        target(transport, server.address, alive) as connection,
    ):
        await alive.until(lambda: bool(alive.ups))
        for _ in range(2):
            flooder = await fake_target(transport, server.address, "flooder")
            for _ in range(200):
                flooder.channel.send(encode(Ping(1, [])))
            await flooder.until(lambda flooder=flooder: flooder.end is not None)  # type: ignore[misc]
            assert flooder.frames[-1] == Error("flood", "target 'flooder' sends too much")
        assert connection.send(Draft(1, []))
        await below.until(lambda: bool(below.of(Draft)))
        assert len(below.of(Ping)) <= 2 * 50 + 20 and alive.downs == []
    assert [record.__dict__["code"] for record in caplog.records] == ["flood"]


async def test_a_target_sends_megabytes_where_a_stranger_may_not(transport: Transport) -> None:
    """The limit on strangers' frames ends with the handshake."""
    below = Recorder()
    async with drafter(transport, below) as server:
        friend = await fake_target(transport, server.address)
        large = Draft(1, [], features=bytes(1 << 20))
        friend.channel.send(encode(large))
        await below.until(lambda: bool(below.of(Draft)))
        assert below.of(Draft) == [large]
        stranger = FakePeer(await transport.dial(server.address), DrafterHandshake(DRAFTER))
        stranger.channel.send(encode(large))
        await stranger.until(lambda: stranger.end is not None)
        assert len(server.peers) == 1


async def test_a_strangers_long_frame_is_not_even_read() -> None:
    """Over TCP the announced length is enough: nothing of it is kept."""
    async with drafter(TcpTransport(), Recorder()) as server:
        reader, writer = await asyncio.open_connection(*split_address(server.address))
        writer.write((65537).to_bytes(4, "little"))
        assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_connection(*split_address(server.address))
        writer.write((60_000).to_bytes(4, "little") + bytes(60_000))  # short enough to be looked at, but no Hello
        assert b"malformed" in await reader.read()
        writer.close()
