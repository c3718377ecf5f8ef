"""One suite for every transport: frames in order or not at all, both ways."""

from __future__ import annotations

import importlib.util
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import trustme

from paceline.core.errors import LinkClosed, UserError, WireError
from paceline.topology.links.base import Channel, Listener, Transport
from paceline.topology.links.memory import MemoryTransport
from paceline.topology.links.tcp import MAX_QUEUED_BYTES, TcpTransport, join_address, split_address
from paceline.topology.wire import MAX_FRAME_BYTES

LOOPS = [pytest.param(("asyncio", {}), id="asyncio")]
if importlib.util.find_spec("uvloop"):
    LOOPS.append(pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"))

pytestmark = pytest.mark.anyio


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


class End:
    """Records what one end of a channel is told."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.frames: list[bytes] = []
        self.reasons: list[str] = []
        self._changed = anyio.Event()
        channel.receive(self._on_frame, self._on_close)

    def _on_frame(self, frame: bytes) -> None:
        self.frames.append(frame)
        self._wake()

    def _on_close(self, reason: str) -> None:
        self.reasons.append(reason)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[End], bool]) -> None:
        with anyio.fail_after(10):
            while not condition(self):
                await self._changed.wait()

    async def closed(self) -> str:
        await self.until(lambda end: bool(end.reasons))
        return self.reasons[0]


def tls_transport(trusted: bool = True) -> TcpTransport:
    """TCP inside TLS with a throw-away certificate that the dialer trusts, or not."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    (authority if trusted else trustme.CA()).configure_trust(client)
    return TcpTransport(server_tls=server, client_tls=client)


TRANSPORTS: dict[str, Callable[[], Transport]] = {"tcp": TcpTransport, "tls": tls_transport, "memory": MemoryTransport}


class Network:
    """A transport and an address at which it can listen."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.transport = TRANSPORTS[kind]()
        self.address = "drafter" if kind == "memory" else "127.0.0.1:0"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[Listener, Callable[[], Awaitable[Channel]]]]:
        """A listener, and how to get the next channel it accepts."""
        send, receive = anyio.create_memory_object_stream[Channel](100)
        listener = await self.transport.listen(self.address, send.send_nowait)
        try:
            with send, receive:
                yield listener, receive.receive
        finally:
            await listener.close()

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[End, End]]:
        """Both ends of one open channel."""
        async with self.listening() as (listener, accepted):
            near = End(await self.transport.dial(listener.address))
            far = End(await accepted())
            yield near, far
            near.channel.close()
            far.channel.close()
            await near.closed()
            await far.closed()


@pytest.fixture(params=TRANSPORTS)
def network(request: pytest.FixtureRequest) -> Network:
    return Network(request.param)


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


async def test_bytes_are_counted(network: Network) -> None:
    """Both ends count what crossed, each direction for itself."""
    async with network.pair() as (near, far):
        near.channel.send(bytes(100))
        near.channel.send(bytes(23))
        far.channel.send(bytes(7))
        await far.until(lambda end: len(end.frames) == 2)
        await near.until(lambda end: len(end.frames) == 1)
        prefixes = 0 if network.kind == "memory" else 4
        assert near.channel.bytes_out == far.channel.bytes_in == 123 + 2 * prefixes
        assert far.channel.bytes_out == near.channel.bytes_in == 7 + prefixes


async def test_a_peer_that_does_not_read_is_closed(network: Network) -> None:
    """A queue that only grows ends the channel with the reason instead of filling the memory."""
    async with network.listening() as (listener, accepted):
        near = End(await network.transport.dial(listener.address))
        far = await accepted()
        for _ in range(64):  # the loop never runs in between, so nobody reads
            near.channel.send(bytes(MAX_FRAME_BYTES // 2))
        assert "does not read" in await near.closed()
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


async def test_an_unknown_certificate_is_refused() -> None:
    """The dialer says that TLS failed and why; no channel comes to be."""
    listener = await tls_transport().listen("127.0.0.1:0", lambda channel: pytest.fail("accepted"))
    with pytest.raises(LinkClosed, match="TLS failed.*verify failed"):
        await tls_transport(trusted=False).dial(listener.address)
    await listener.close()


async def test_plain_bytes_on_a_tls_port_end_without_a_channel() -> None:
    """Someone who does not speak TLS is closed before a channel exists."""
    listener = await tls_transport().listen("127.0.0.1:0", lambda channel: pytest.fail("accepted"))
    end = End(await TcpTransport().dial(listener.address))
    end.channel.send(b"not a client hello")
    await end.closed()
    await listener.close()


# What only TCP has: a byte stream that others can write.


@asynccontextmanager
async def raw_peer() -> AsyncIterator[tuple[socket.socket, End]]:
    """A plain socket on one side, our channel on the other."""
    network = Network("tcp")
    async with network.listening() as (listener, accepted):
        with socket.create_connection(split_address(listener.address)) as raw:
            raw.settimeout(10)
            yield raw, End(await accepted())


async def test_a_length_over_the_limit_closes_without_buffering() -> None:
    """The prefix alone ends the channel; nothing of that size is allocated."""
    async with raw_peer() as (raw, end):
        raw.sendall((5).to_bytes(4, "little") + b"hello" + (MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        assert f"over the limit of {MAX_FRAME_BYTES}" in await end.closed()
        assert end.frames == [b"hello"]
        assert len(end.channel._buffer) < 1 << 17  # type: ignore[attr-defined]


async def test_a_permitted_length_allocates_only_as_bytes_arrive() -> None:
    """A peer that announces the largest frame and sends nothing costs nothing."""
    async with raw_peer() as (raw, end):
        raw.sendall(MAX_FRAME_BYTES.to_bytes(4, "little") + bytes(10))
        await anyio.wait_all_tasks_blocked()
        assert len(end.channel._buffer) < 1 << 17  # type: ignore[attr-defined]


async def test_frames_may_come_in_single_bytes() -> None:
    """However the stream is cut, frames come out whole."""
    async with raw_peer() as (raw, end):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in (3).to_bytes(4, "little") + b"abc" + (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"z":
            raw.sendall(bytes([byte]))
            await anyio.sleep(0)
        await end.until(lambda end: len(end.frames) == 3)
        assert end.frames == [b"abc", b"", b"z"]


async def test_a_half_frame_at_the_end_is_named() -> None:
    """A connection that ends within a frame says so, and the half is not delivered."""
    async with raw_peer() as (raw, end):
        raw.sendall((100).to_bytes(4, "little") + b"only this")
        raw.shutdown(socket.SHUT_WR)
        assert await end.closed() == "closed by the peer in the middle of a frame"
        assert end.frames == []


async def test_a_reset_connection_has_a_reason() -> None:
    """A peer that dies hard ends the channel with the system's words."""
    async with raw_peer() as (raw, end):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
        assert "reset" in await end.closed()


async def test_a_slow_reader_gets_everything_in_order() -> None:
    """Direct writes, the queue and direct writes again keep their order when the socket fills up."""
    async with raw_peer() as (raw, end):
        payloads = [bytes([index]) * 100_000 for index in range(70)]
        for payload in payloads:
            end.channel.send(payload)

        def read() -> bytes:
            wanted, got = sum(4 + len(payload) for payload in payloads), b""
            while len(got) < wanted:
                got += raw.recv(1 << 20)
            return got

        got = await anyio.to_thread.run_sync(read)
        assert got == b"".join(len(payload).to_bytes(4, "little") + payload for payload in payloads)
        await anyio.wait_all_tasks_blocked()
        end.channel.send(b"direct again")
        assert raw.recv(100) == (12).to_bytes(4, "little") + b"direct again"


@pytest.mark.parametrize("address", ["localhost", ":70", "host:", "host:seven", "host:70000"])
async def test_a_wrong_address_is_explained(address: str) -> None:
    """What is no host:port gets one sentence."""
    with pytest.raises(UserError, match="write host:port"):
        await TcpTransport().dial(address)


async def test_addresses_may_be_version_6() -> None:
    """[::1]:port is taken apart and put together again."""
    assert split_address("[::1]:7070") == ("::1", 7070)
    assert join_address("::1", 7070) == "[::1]:7070"
