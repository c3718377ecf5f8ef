"""One suite for every transport: frames in order or not at all, both ways."""

from __future__ import annotations

import asyncio
import socket
import threading

import anyio
import pytest

from paceline.core.errors import LinkClosed, UserError, WireError
from paceline.topology.links.memory import MemoryTransport
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.links.tcp_channel import MAX_QUEUED_BYTES, join_address
from paceline.topology.wire import MAX_FRAME_BYTES

from .brokers import BROKERS
from .helpers import KINDS, End, Network

pytestmark = pytest.mark.anyio


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest) -> Network:
    broker = request.getfixturevalue(f"{request.param}_broker") if request.param in BROKERS else None
    return Network(request.param, broker)


async def test_frames_arrive_in_order_both_ways(network: Network) -> None:
    """A thousand frames of many sizes, the empty one among them, arrive as sent."""
    async with network.pair() as (near, far):
        frames = [bytes([index % 256]) * (index % 700) for index in range(1000)]
        for frame in frames:
            near.channel.send(frame)
            far.channel.send(frame[::-1])
        await far.until(lambda end: len(end.frames) == 1000)
        await near.until(lambda end: len(end.frames) == 1000)
        assert far.frames == frames
        assert near.frames == [frame[::-1] for frame in frames]


async def test_the_largest_frame_passes_between_small_ones(network: Network) -> None:
    """A frame of exactly the limit arrives whole and in its place."""
    async with network.pair() as (near, far):
        big = bytes(range(256)) * (MAX_FRAME_BYTES // 256)
        for frame in (b"before", big, b"after"):
            near.channel.send(frame)
        await far.until(lambda end: len(end.frames) == 3)
        assert far.frames == [b"before", big, b"after"]
        far.channel.send(b"answer")
        await near.until(lambda end: end.frames == [b"answer"])


async def test_a_frame_over_the_limit_is_refused_at_the_sender(network: Network) -> None:
    """The sender gets the error; the channel lives on."""
    async with network.pair() as (near, far):
        with pytest.raises(WireError, match="over the limit"):
            near.channel.send(bytes(MAX_FRAME_BYTES + 1))
        near.channel.send(b"fine")
        await far.until(lambda end: end.frames == [b"fine"])


async def test_frames_sent_before_receive_are_kept(network: Network) -> None:
    """What arrives before anyone listens is told first."""
    async with network.listening() as (listener, accepted):
        near = await network.transport.dial(listener.address)
        near.send(b"one")
        near.send(b"two")
        far = await accepted()
        await anyio.wait_all_tasks_blocked()
        near.send(b"three")
        end = End(far)
        await end.until(lambda end: len(end.frames) == 3)
        assert end.frames == [b"one", b"two", b"three"]
        near.close()
        assert await end.closed() == "closed by the peer"


async def test_closing_writes_first_and_tells_both_ends_once(network: Network) -> None:
    """What was sent before close arrives; each end is told its reason exactly once."""
    async with network.pair() as (near, far):
        near.channel.send(b"last words" * 100_000)
        near.channel.close()
        near.channel.close()
        assert await far.closed() == "closed by the peer"
        assert await near.closed() == "closed here"
        assert far.frames == [b"last words" * 100_000]
        far.channel.close()
        await anyio.wait_all_tasks_blocked()
        assert len(near.reasons) == len(far.reasons) == 1


async def test_send_after_close_is_harmless(network: Network) -> None:
    """Sending on a closed channel does nothing, at either end."""
    async with network.pair() as (near, far):
        near.channel.close()
        near.channel.send(b"too late")
        await far.closed()
        far.channel.send(b"too late")
        assert far.frames == near.frames == []


async def test_receive_after_the_end_tells_the_end(network: Network) -> None:
    """Whoever comes too late still gets the frames and the reason."""
    async with network.listening() as (listener, accepted):
        near = End(await network.transport.dial(listener.address))
        far = await accepted()
        near.channel.send(b"left behind")
        near.channel.close()
        await near.closed()
        late = End(far)
        assert await late.closed() == "closed by the peer"
        assert late.frames == [b"left behind"]


async def test_foreign_threads_send_whole_frames_in_their_order(network: Network) -> None:
    """Four threads send at once while the loop sends too; no frame is torn, each thread's order holds."""
    async with network.pair() as (near, far):

        def work(name: int) -> None:
            for index in range(500):
                near.channel.send(bytes([name]) + index.to_bytes(2, "little") + bytes(index * 7))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for index in range(500):
            near.channel.send(bytes([9]) + index.to_bytes(2, "little") + bytes(index * 7))
            if index % 50 == 0:
                await anyio.sleep(0)
        await far.until(lambda end: len(end.frames) == 2500)
        for thread in threads:
            thread.join()
        for name in (0, 1, 2, 3, 9):
            mine = [frame for frame in far.frames if frame[0] == name]
            assert [int.from_bytes(frame[1:3], "little") for frame in mine] == list(range(500))
            assert all(len(frame) == 3 + 7 * int.from_bytes(frame[1:3], "little") for frame in mine)


async def test_a_foreign_thread_can_close(network: Network) -> None:
    """close from another thread ends both sides."""
    async with network.pair() as (near, far):
        thread = threading.Thread(target=near.channel.close)
        thread.start()
        await far.closed()
        await near.closed()
        thread.join()


async def test_a_receiver_that_fails_ends_its_own_channel(network: Network) -> None:
    """A mistake in a handler is reported by the loop and costs that channel, not the process."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context.get("exception")))

    def fail(frame: bytes) -> None:
        raise ZeroDivisionError("in a handler")

    async with network.listening() as (listener, accepted):
        near = End(await network.transport.dial(listener.address))
        reasons: list[str] = []
        (await accepted()).receive(fail, reasons.append)
        near.channel.send(b"one")
        near.channel.send(b"two")
        await near.closed()
        await anyio.wait_all_tasks_blocked()
        assert [type(error) for error in reported] == [ZeroDivisionError]
        assert len(reasons) == 1


async def test_bytes_are_counted(network: Network) -> None:
    """Both ends count what crossed, each direction for itself."""
    async with network.pair() as (near, far):
        greetings = near.channel.bytes_out, near.channel.bytes_in
        near.channel.send(bytes(100))
        near.channel.send(bytes(23))
        far.channel.send(bytes(7))
        await far.until(lambda end: len(end.frames) == 2)
        await near.until(lambda end: len(end.frames) == 1)
        assert near.channel.bytes_out == far.channel.bytes_in
        assert near.channel.bytes_out - greetings[0] == 123 + 2 * network.overhead(inward=True)
        assert far.channel.bytes_out == near.channel.bytes_in
        assert near.channel.bytes_in - greetings[1] == 7 + network.overhead(inward=False)


async def test_a_peer_that_does_not_read_is_closed(network: Network) -> None:
    """A queue that only grows ends the channel with the reason instead of filling the memory."""
    async with network.listening() as (listener, accepted):
        near = End(await network.transport.dial(listener.address))
        far = await accepted()
        for _ in range(64):  # the loop never runs in between, so nobody reads
            near.channel.send(bytes(MAX_FRAME_BYTES // 2))
        assert "does not read" in await near.closed()
        if network.kind not in BROKERS:  # a broker does read, and the other end finds out
            assert near.channel.bytes_out <= 4 * MAX_QUEUED_BYTES
        far.close()
        await End(far).closed()


async def test_closing_the_listener_closes_its_channels(network: Network) -> None:
    """A stopped server leaves no channel behind and refuses new ones."""
    async with network.listening() as (listener, accepted):
        near = End(await network.transport.dial(listener.address))
        await accepted()
        await listener.close()
        assert await near.closed() == "closed by the peer"
        with pytest.raises(LinkClosed):
            await network.transport.dial(listener.address)


async def test_an_address_in_use_is_one_sentence(network: Network) -> None:
    """The second listener at an address gets a UserError that names it."""
    async with network.listening() as (listener, _):
        with pytest.raises(UserError, match="in use") as caught:
            await network.transport.listen(listener.address, lambda channel: None)
        assert listener.address in str(caught.value) and "\n" not in str(caught.value)


async def test_a_refused_dial_names_the_address() -> None:
    """Nobody listens: LinkClosed with the address and the reason."""
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        address = join_address("127.0.0.1", placeholder.getsockname()[1])
        with pytest.raises(LinkClosed, match=f"{address}.*refused"):
            await TcpTransport().dial(address)
    with pytest.raises(LinkClosed, match="nothing listens at nowhere"):
        await MemoryTransport().dial("nowhere")
