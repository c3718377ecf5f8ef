"""Targets and drafters find each other, notice each other's end, and find each other again."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from paceline.core.errors import LinkClosed, UserError
from paceline.topology.connection import DrafterConnection
from paceline.topology.handshake import DrafterHandshake, Identity, TargetHandshake
from paceline.topology.links.base import Channel, Transport
from paceline.topology.links.memory import MemoryTransport
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.peer import Backoff, Peer
from paceline.topology.server import DrafterServer
from paceline.topology.wire import (
    Close,
    Draft,
    Drafted,
    Error,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    Welcome,
    decode,
    encode,
)

pytestmark = pytest.mark.anyio

TARGET = Identity("star", "chat-a", key=b"secret")
DRAFTER = Identity("star", "orin-1", key=b"secret", model="tiny", strategy="draft_model", max_sessions=4)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["tcp", "memory"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return TcpTransport() if request.param == "tcp" else MemoryTransport()


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
        self.wake()

    def _on_close(self, reason: str) -> None:
        self.end = reason
        self.wake()


@asynccontextmanager
async def drafter(
    transport: Transport, handler: Recorder, identity: Identity = DRAFTER, address: str = "", **options: float
) -> AsyncIterator[DrafterServer]:
    """A running drafter's side; stopped at the end."""
    own = "127.0.0.1:0" if isinstance(transport, TcpTransport) else "drafter"
    server = DrafterServer(transport, address or own, identity, handler, **options)  # type: ignore[arg-type]
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
    peer = FakePeer(await transport.dial(address), TargetHandshake(replace(TARGET, name=name)))
    await peer.until(lambda: peer.ready)
    return peer


async def test_messages_cross_both_ways_from_any_thread(transport: Transport) -> None:
    """Engine threads at both ends send; both handlers are told, in order, and bytes are counted."""
    above, below = Recorder(), Recorder()
    async with drafter(transport, below) as server, target(transport, server.address, above) as connection:
        await above.until(lambda: bool(above.ups))
        down_peer, welcome = above.ups[0]
        up_peer, hello = below.ups[0]
        assert isinstance(welcome, Welcome) and (welcome.model, welcome.epoch) == ("tiny", DRAFTER.epoch)
        assert isinstance(hello, Hello) and hello.target == up_peer.name == "chat-a"
        assert down_peer.name == "orin-1"

        def engine() -> None:
            for number in range(100):
                assert connection.send(Draft(number, []))
                assert up_peer.send(Drafted(number, []))

        thread = threading.Thread(target=engine)
        thread.start()
        await below.until(lambda: len(below.of(Draft)) == 100)
        await above.until(lambda: len(above.of(Drafted)) == 100)
        thread.join()
        assert [message.epoch for message in below.of(Draft)] == list(range(100))  # type: ignore[union-attr]
        assert connection.send(Close(1, [5]))
        await below.until(lambda: bool(below.of(Close)))
        assert up_peer.bytes_in > 0 and up_peer.bytes_out > 0 and down_peer.bytes_in >= up_peer.bytes_out > 0


async def test_the_handler_may_send_as_soon_as_it_is_told(transport: Transport) -> None:
    """on_up is not too early to send, through the peer or through the connection."""
    below = Recorder()

    class Eager(Recorder):
        sent = False

        def on_up(self, peer: Peer, greeting: Hello | Welcome) -> None:
            self.sent = connection.send(Draft(1, [])) and peer.send(Draft(2, []))
            super().on_up(peer, greeting)

    above = Eager()
    async with drafter(transport, below) as server, target(transport, server.address, above) as connection:
        await below.until(lambda: len(below.of(Draft)) == 2)
        assert above.sent


async def test_beats_list_the_live_sessions_and_measure_the_round_trip(transport: Transport) -> None:
    """Each Ping tells the sessions of that moment; each Pong gives a round trip."""
    above, below = Recorder(), Recorder()
    live = [1, 2**63]
    async with (
        drafter(transport, below) as server,
        target(transport, server.address, above, live=lambda: list(live), beat=0.02) as connection,
    ):
        await below.until(lambda: bool(below.of(Ping)))
        assert below.of(Ping)[0].sessions == [1, 2**63]  # type: ignore[union-attr]
        live.append(7)
        await below.until(lambda: below.of(Ping)[-1].sessions == [1, 2**63, 7])  # type: ignore[union-attr]
        await above.until(lambda: len(above.of(Pong)) > 2)
        assert connection.rtt is not None and 0 < connection.rtt < 1
        assert above.downs == [] and below.downs == []


async def test_a_lost_link_is_back_within_two_seconds(transport: Transport) -> None:
    """The connection breaks while the drafter lives: sends say False until the link is up again."""
    above = Recorder()
    async with drafter(transport, Recorder()) as server, target(transport, server.address, above) as connection:
        await above.until(lambda: len(above.ups) == 1)
        for peer in server.peers:
            peer.close()
        await above.until(lambda: len(above.downs) == 1)
        assert connection.peer is None and not connection.send(Draft(1, []))
        await above.until(lambda: len(above.ups) == 2, seconds=2)
        assert connection.send(Draft(1, []))


async def test_a_restarted_drafter_is_found_again(transport: Transport) -> None:
    """Down with its goodbye, then up again with the new epoch in under two seconds."""
    above = Recorder()
    async with drafter(transport, Recorder()) as first:
        address = first.address
    async with target(transport, address, above) as connection:
        assert not connection.send(Draft(1, []))
        for number in (1, 2):
            async with drafter(transport, Recorder(), replace(DRAFTER, epoch=number), address):
                await above.until(lambda number=number: len(above.ups) == number, seconds=2)  # type: ignore[misc]
            await above.until(lambda number=number: len(above.downs) == number)  # type: ignore[misc]
            assert not connection.send(Draft(1, []))
    assert [welcome.epoch for _, welcome in above.ups] == [1, 2]  # type: ignore[union-attr]
    assert "goodbye" in above.downs[0][1] and "orin-1" in above.downs[0][1]
    assert above.story == ["up orin-1 1", "down orin-1 1", "up orin-1 2", "down orin-1 2"]


async def test_a_newer_target_of_the_same_name_replaces_the_older(transport: Transport) -> None:
    """The older goes down before the newer comes up; its process is told why and does not fight back at once."""
    below, old, new = Recorder(), Recorder(), Recorder()
    async with drafter(transport, below) as server, target(transport, server.address, old, refused_retry=60):
        await old.until(lambda: bool(old.ups))
        async with target(transport, server.address, new) as newer:
            await new.until(lambda: bool(new.ups))
            await old.until(lambda: bool(old.downs))
            assert below.story == ["up chat-a 1", "down chat-a 1", "up chat-a 2"]
            assert "newer" in old.downs[0][1]
            assert [peer for peer in server.peers] == [below.ups[1][0]]
            assert newer.send(Draft(1, []))
            await below.until(lambda: bool(below.of(Draft)))


async def test_other_names_do_not_disturb_each_other(transport: Transport) -> None:
    """Two targets of different names are both up."""
    below = Recorder()
    async with (
        drafter(transport, below) as server,
        target(transport, server.address, Recorder()),
        target(transport, server.address, Recorder(), replace(TARGET, name="chat-b")),
    ):
        await below.until(lambda: len(below.ups) == 2)
        assert {peer.name for peer in server.peers} == {"chat-a", "chat-b"} and below.downs == []


async def test_three_missed_pongs_end_the_link(transport: Transport) -> None:
    """A fake drafter that has stopped answering is declared down after three beats and dialled again."""
    above = Recorder()
    fakes: list[FakePeer] = []
    address = "127.0.0.1:0" if isinstance(transport, TcpTransport) else "fake"
    listener = await transport.listen(
        address, lambda channel: fakes.append(FakePeer(channel, DrafterHandshake(DRAFTER)))
    )
    async with target(transport, listener.address, above, beat=0.05):
        await above.until(lambda: len(above.ups) == 2)
        assert "silent for 0." in above.downs[0][1]
        assert [type(message) for message in fakes[0].frames] == [Ping, Ping, Ping]
        assert fakes[0].end is not None
    await listener.close()


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

    rude: list[Rude] = []
    address = "127.0.0.1:0" if isinstance(transport, TcpTransport) else "rude"
    listener = await transport.listen(address, lambda channel: rude.append(Rude(channel, DrafterHandshake(DRAFTER))))
    async with target(transport, listener.address, above, refused_retry=0.05):
        await above.until(lambda: len(above.ups) == 2)
        assert above.messages == []
    await listener.close()


async def test_a_refusal_is_logged_once_and_tried_again(transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong key: one line at each end however often it is tried, and no handler hears of it."""
    above, below = Recorder(), Recorder()
    caplog.set_level(logging.INFO)
    async with drafter(transport, below) as server:
        tries = 0
        dial = transport.dial

        async def counted(address: str) -> Channel:
            nonlocal tries
            tries += 1
            above.wake()
            return await dial(address)

        transport.dial = counted  # type: ignore[method-assign]
        async with target(transport, server.address, above, replace(TARGET, key=b"wrong"), refused_retry=0.02):
            await above.until(lambda: tries >= 4)
    assert above.ups == below.ups == []
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.__dict__["event"] for record in lines] == ["refused", "link_down"]
    assert "unauthenticated" in lines[0].getMessage() and "unauthenticated" in lines[1].getMessage()
    assert "secret" not in caplog.text and "wrong" not in caplog.text


async def test_an_absent_drafter_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often the dial fails for one reason, the log has one line."""
    tries = Waiting()
    count = 0

    class Absent(MemoryTransport):
        async def dial(self, address: str) -> Channel:
            nonlocal count
            count += 1
            tries.wake()
            raise LinkClosed("nobody there")

    async with target(Absent(), "x", Recorder(), backoff=Backoff(0.001, 0.01)):  # type: ignore[arg-type]
        await tries.until(lambda: count > 5)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


async def test_a_dial_that_hangs_is_given_up() -> None:
    """A host that swallows packets costs one time limit, then the next try begins."""
    tries = Waiting()
    count = 0

    class Swallowing(MemoryTransport):
        async def dial(self, address: str) -> Channel:
            nonlocal count
            count += 1
            tries.wake()
            await anyio.sleep_forever()
            raise AssertionError

    async with target(Swallowing(), "x", Recorder(), handshake_limit=0.02):
        await tries.until(lambda: count == 3)


async def test_an_unfinished_handshake_is_closed(transport: Transport) -> None:
    """A stranger that says nothing is gone after the limit."""
    async with drafter(transport, Recorder(), handshake_limit=0.2) as server:
        channel = await transport.dial(server.address)
        stranger = FakePeer(channel, DrafterHandshake(DRAFTER))  # waits for a Hello that never comes
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

    address = "127.0.0.1:0" if isinstance(transport, TcpTransport) else "mute"
    listener = await transport.listen(address, accept)
    async with target(transport, listener.address, Recorder(), handshake_limit=0.05):
        await accepted.until(lambda: len(channels) == 2)
    await listener.close()


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


async def test_a_stopping_target_says_goodbye(transport: Transport) -> None:
    """Its drafter frees it at once, not after five seconds."""
    below = Recorder()
    async with drafter(transport, below) as server:
        async with target(transport, server.address, Recorder()):
            await below.until(lambda: bool(below.ups))
        await below.until(lambda: bool(below.downs), seconds=1)
        assert below.downs[0][1] == "the target says goodbye: target 'chat-a' stops"


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


async def test_pauses_double_with_jitter_up_to_the_cap() -> None:
    """50 ms at first, never over a second, and the first again after success."""
    backoff = Backoff()
    pauses = [backoff.pause() for _ in range(8)]
    for pause, step in zip(pauses, [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1], strict=True):
        assert step / 2 <= pause <= step
    backoff.reset()
    assert backoff.pause() <= 0.05
