"""Silent, rude, mute and unauthorised peers cost their own link and nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace

import anyio
import pytest

from paceline.core.errors import LinkClosed, UserError
from paceline.topology.connection import DrafterConnection
from paceline.topology.handshake import DrafterHandshake
from paceline.topology.links.base import Channel, Transport
from paceline.topology.links.memory import MemoryTransport
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.peer import Backoff
from paceline.topology.server import DrafterServer
from paceline.topology.wire import (
    Draft,
    Drafted,
    Error,
    Goodbye,
    Hello,
    Ping,
    encode,
)

from .helpers import DRAFTER, TARGET, Dials, FakePeer, Recorder, Waiting, drafter, fake_target, listening, target

pytestmark = pytest.mark.anyio


async def test_three_missed_pongs_end_the_link(transport: Transport) -> None:
    """A fake drafter that has stopped answering is declared down after three beats and dialled again."""
    above = Recorder()
    fakes: list[FakePeer] = []

    def accept(channel: Channel) -> None:
        fakes.append(FakePeer(channel, DrafterHandshake(DRAFTER, channel.binding)))

    async with listening(transport, accept) as address, target(transport, address, above, beat=0.05):
        await above.until(lambda: len(above.ups) == 2)
        assert "silent for 0." in above.downs[0][1]
        assert [type(message) for message in fakes[0].frames] == [Ping, Ping, Ping]
        assert fakes[0].end is not None


async def test_a_silent_target_is_dropped_by_its_drafter(transport: Transport) -> None:
    """A partitioned target is down at the drafter within its limit; one that beats is not."""
    below, alive = Recorder(), Recorder()
    async with (
        drafter(transport, below, silence_limit=0.3) as server,
        target(transport, server.address, alive, beat=0.05),
    ):
        silent = await fake_target(transport, server.address, "silent")
        await silent.until(lambda: silent.end is not None)
        assert [(peer.name, reason[:10]) for peer, reason in below.downs] == [("silent", "silent for")]
        assert [peer.name for peer in server.peers] == ["chat-a"] and alive.downs == []
        assert silent.frames == [Goodbye("silent", "no sign of life")]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"garbage", "malformed"),
        (encode(Draft(1, [])) + b"x", "malformed"),
        (encode(Drafted(1, [])), "unexpected"),
        (encode(Hello(1, 0, "star", "fake", bytes(32), "", 0)), "unexpected"),
    ],
)
async def test_a_misbehaving_target_loses_its_own_link_only(
    transport: Transport, frame: bytes, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets an Error and its channel closes, logged once with its address; the others go on."""
    below, alive = Recorder(), Recorder()
    async with drafter(transport, below) as server, target(transport, server.address, alive) as connection:
        await alive.until(lambda: bool(alive.ups))
        for _ in range(2):
            bad = await fake_target(transport, server.address)
            bad.channel.send(frame)
            bad.channel.send(encode(Draft(9, [])))
            await bad.until(lambda bad=bad: bad.end is not None)  # type: ignore[misc]
            assert isinstance(bad.frames[-1], Error) and bad.frames[-1].code == code
        assert connection.send(Draft(1, []))
        await below.until(lambda: bool(below.of(Draft)))
        assert below.of(Draft) == [Draft(1, [])] and alive.downs == []
        assert [peer.name for peer, _ in below.downs] == ["fake", "fake"]
    refusals = [record for record in caplog.records if getattr(record, "event", "") == "refused"]
    assert len(refusals) == 1 and refusals[0].__dict__["code"] == code
    assert refusals[0].__dict__["address"] in refusals[0].getMessage()


@pytest.mark.parametrize("message", [b"garbage", encode(Draft(1, [])), encode(Error("internal", "it broke"))])
async def test_a_misbehaving_drafter_is_left_and_dialled_again(transport: Transport, message: bytes) -> None:
    """A malformed or wrong message, or an Error, ends the link; the target comes back."""
    above = Recorder()

    class Rude(FakePeer):
        def _on_frame(self, frame: bytes) -> None:
            super()._on_frame(frame)
            if self.ready:
                self.channel.send(message)

    def accept(channel: Channel) -> None:
        Rude(channel, DrafterHandshake(DRAFTER, channel.binding))

    async with listening(transport, accept) as address, target(transport, address, above, refused_retry=0.05):
        await above.until(lambda: len(above.ups) == 2)
        assert above.messages == []


async def test_a_refusal_is_logged_once_and_tried_again(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong key: one line at each end however often it is tried, and no handler hears of it."""
    above, below = Recorder(), Recorder()
    caplog.set_level(logging.INFO)
    async with drafter(transport, below) as server:
        dials = Dials(transport)
        async with target(transport, server.address, above, replace(TARGET, key=b"wrong"), refused_retry=0.02):
            await dials.until(lambda: dials.count >= 4)
    assert above.ups == below.ups == []
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.__dict__["event"] for record in lines] == ["refused", "link_down"]
    assert "unauthenticated" in lines[0].getMessage() and "unauthenticated" in lines[1].getMessage()
    assert "secret" not in caplog.text and "wrong" not in caplog.text


async def test_an_absent_drafter_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often the dial fails for one reason, the log has one line."""

    async def refused(address: str) -> Channel:
        raise LinkClosed("nobody there")

    transport = MemoryTransport()
    dials = Dials(transport, refused)
    async with target(transport, "x", Recorder(), backoff=Backoff(0.001, 0.01)):  # type: ignore[arg-type]
        await dials.until(lambda: dials.count > 5)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize("error", [OSError("no files"), UnicodeError("no name"), RuntimeError("no threads")])
async def test_whatever_a_dial_raises_it_is_tried_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """What runs out on the target's machine costs no more than the link."""

    async def failing(address: str) -> Channel:
        raise error

    transport = MemoryTransport()
    dials = Dials(transport, failing)
    async with target(transport, "x", Recorder(), backoff=Backoff(0.001, 0.01)):  # type: ignore[arg-type]
        await dials.until(lambda: dials.count > 5)
    assert caplog.text.count(f"cannot dial x: {error}") == 1


async def test_a_dial_that_hangs_is_given_up() -> None:
    """A host that swallows packets costs one time limit, then the next try begins."""

    async def swallowed(address: str) -> Channel:
        await anyio.sleep_forever()
        raise AssertionError

    transport = MemoryTransport()
    dials = Dials(transport, swallowed)
    async with target(transport, "x", Recorder(), dial_limit=0.02):
        await dials.until(lambda: dials.count == 3)


async def test_an_unfinished_handshake_is_closed(transport: Transport) -> None:
    """A stranger that says nothing is gone after the limit."""
    async with drafter(transport, Recorder(), handshake_limit=0.2) as server:
        channel = await transport.dial(server.address)
        stranger = FakePeer(channel, DrafterHandshake(DRAFTER, channel.binding))  # waits for a Hello that never comes
        await stranger.until(lambda: stranger.end is not None)
        assert stranger.frames == [Error("timeout")]


async def test_a_mute_drafter_is_left_after_the_limit(transport: Transport) -> None:
    """A server that accepts and never answers is not waited for."""
    channels: list[Channel] = []
    accepted = Waiting()

    def accept(channel: Channel) -> None:
        channels.append(channel)
        channel.receive(lambda frame: None, lambda reason: None)
        accepted.wake()

    async with listening(transport, accept) as address, target(transport, address, Recorder(), handshake_limit=0.05):
        await accepted.until(lambda: len(channels) == 2)


async def test_a_crowd_of_strangers_shuts_itself_out(transport: Transport) -> None:
    """Past the cap the oldest stranger goes; a real target still gets in."""
    above = Recorder()
    async with drafter(transport, Recorder(), max_strangers=3) as server:
        strangers = [FakePeer(await transport.dial(server.address), DrafterHandshake(DRAFTER)) for _ in range(8)]
        async with target(transport, server.address, above):
            await above.until(lambda: bool(above.ups))
        await strangers[0].until(lambda: strangers[0].end is not None)
        assert strangers[0].frames == [Error("busy")] and strangers[-1].end is None
    assert strangers[-1].frames in ([], [Goodbye("leaving")])  # no name for whom nobody knows


async def test_a_target_that_reports_an_error_is_let_go(transport: Transport) -> None:
    """Its Error ends the link at the drafter, with its words fit for a log."""
    below = Recorder()
    async with drafter(transport, below) as server:
        fake = await fake_target(transport, server.address)
        fake.channel.send(encode(Error("internal", "it\nbroke")))
        await below.until(lambda: bool(below.downs))
        assert below.downs[0][1] == "the target refused: internal it?broke" and server.peers == []


async def test_a_refusal_says_both_names_to_the_target(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    """An authenticated target of another deployment reads in its own log what is wrong."""
    told = Waiting()
    handler = logging.Handler()
    handler.emit = lambda record: told.wake()  # type: ignore[method-assign]
    logging.getLogger("paceline.topology.connection").addHandler(handler)
    async with (
        drafter(transport, Recorder()) as server,
        target(transport, server.address, Recorder(), replace(TARGET, deployment="lab")),
    ):
        await told.until(lambda: "deployment:" in caplog.text)
    logging.getLogger("paceline.topology.connection").removeHandler(handler)
    line = next(record for record in caplog.records if record.name.endswith("connection"))
    assert "'orin-1' belongs to deployment 'star' and target 'chat-a' to 'lab'" in line.getMessage()


async def test_an_address_in_use_stops_the_server(transport: Transport) -> None:
    """The second drafter at an address ends with one sentence."""
    async with drafter(transport, Recorder()) as server:
        with pytest.raises(UserError, match="in use"):
            await DrafterServer(transport, server.address, DRAFTER, Recorder()).run()


async def test_a_wrong_address_ends_the_connection() -> None:
    """What can never be dialled is the user's error, not a reason to try again."""
    with pytest.raises(UserError, match="write host:port"):
        await DrafterConnection(TcpTransport(), "nonsense", TARGET, Recorder(), list).run()
