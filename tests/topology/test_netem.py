"""The network emulator does what it is told, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from paceline.topology.netem import CLEAR, PARTITION, Faults, LinkEmulator

pytestmark = pytest.mark.anyio

FRAMES = [bytes([index]) * (index + 1) for index in range(60)]


class Echo:
    """A server that sends frames back, a client that reached it through an emulator, and what came back."""

    def __init__(self, link: LinkEmulator, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.link = link
        self._reader = reader
        self._writer = writer

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self._writer.write(len(frame).to_bytes(4, "little") + frame)

    async def receive(self, count: int | None = None, patience: float = 5.0) -> list[bytes]:
        """So many frames, or all that come until nothing has come for a while."""
        found: list[bytes] = []
        try:
            while count is None or len(found) < count:
                prefix = await asyncio.wait_for(self._reader.readexactly(4), patience)
                found.append(await self._reader.readexactly(int.from_bytes(prefix, "little")))
        except asyncio.TimeoutError:
            if count is not None:
                raise
        return found

    async def closed(self) -> bool:
        return await asyncio.wait_for(self._reader.read(1), 5.0) == b""


@asynccontextmanager
async def echo(*, framed: bool = True, greeted: bool = True) -> AsyncIterator[Echo]:
    """greeted: as many frames as a handshake has went before."""

    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(back, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with LinkEmulator(address, framed=framed) as link:
            host, port = link.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            pair = Echo(link, reader, writer)
            if greeted:
                pair.send(b"one", b"two")
                assert await pair.receive(2) == [b"one", b"two"]
            yield pair
            writer.close()
    finally:
        server.close()


@pytest.mark.parametrize("framed", [True, False])
async def test_a_good_network_changes_nothing(framed: bool) -> None:
    """Every frame, in order."""
    async with echo(framed=framed) as pair:
        pair.send(*FRAMES)
        assert await pair.receive(len(FRAMES)) == FRAMES


async def test_lost_frames_are_missing_and_the_rest_is_in_order() -> None:
    """Half of them each way."""
    async with echo() as pair:
        pair.link.apply(Faults(loss=0.5))
        pair.send(*FRAMES)
        found = await pair.receive(patience=0.2)
        assert 0 < len(found) < len(FRAMES) and found == sorted(found, key=FRAMES.index)
        assert pair.link.seen["lost"] + len(found) == len(FRAMES)


async def test_doubled_frames_come_twice() -> None:
    """On the way there, all of them."""
    async with echo() as pair:
        pair.link.apply(Faults(duplication=1.0), to_client=False)
        pair.send(*FRAMES)
        assert sorted(await pair.receive(2 * len(FRAMES))) == sorted(2 * FRAMES)


async def test_reordered_frames_are_all_there() -> None:
    """None is lost, and some overtake others."""
    async with echo() as pair:
        pair.link.apply(Faults(reordering=0.5))
        pair.send(*FRAMES)
        found = await pair.receive(len(FRAMES))
        assert found != FRAMES and sorted(found) == sorted(FRAMES)


async def test_corrupted_frames_keep_their_length() -> None:
    """One byte of each differs; the stream stays in step."""
    async with echo() as pair:
        pair.link.apply(Faults(corruption=1.0), to_client=False)
        pair.send(*FRAMES)
        found = await pair.receive(len(FRAMES))
        assert [sum(a != b for a, b in zip(x, y, strict=True)) for x, y in zip(FRAMES, found, strict=True)] == [1] * 60


@pytest.mark.parametrize("framed", [True, False])
async def test_delay_and_rate_take_their_time(framed: bool) -> None:
    """30 ms each way with a jitter of 10, in order; then 1 000 bytes at 10 000 a second."""
    async with echo(framed=framed) as pair:
        clock = asyncio.get_running_loop().time
        pair.link.apply(Faults(delay=0.03, jitter=0.01))
        started = clock()
        pair.send(*FRAMES)
        assert await pair.receive(len(FRAMES)) == FRAMES
        assert clock() - started >= 0.04
        pair.link.apply(Faults(rate=10_000.0), to_client=False)
        started = clock()
        pair.send(bytes(996))
        await pair.receive(1)
        assert clock() - started >= 0.1


async def test_a_partition_swallows_frames_and_keeps_the_connection() -> None:
    """What was sent meanwhile is gone; what comes after arrives."""
    async with echo() as pair:
        pair.link.apply(PARTITION, to_client=False)
        pair.send(b"lost")
        assert await pair.receive(patience=0.1) == []
        pair.link.apply(CLEAR)
        pair.send(b"found")
        assert await pair.receive(1) == [b"found"]


async def test_a_partition_holds_the_bytes_of_a_foreign_stream() -> None:
    """As TCP would, which sends them again until they arrive."""
    async with echo(framed=False) as pair:
        pair.link.apply(PARTITION, to_client=False)
        pair.send(b"late", b"later")
        assert await pair.receive(patience=0.1) == []
        pair.link.clear()
        assert await pair.receive(2) == [b"late", b"later"]


async def test_nobody_gets_through_to_a_partitioned_address() -> None:
    """A dial is answered once the partition is over."""
    async with echo() as pair:
        pair.link.apply(PARTITION)
        host, port = pair.link.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        late = Echo(pair.link, reader, writer)
        late.send(b"hello")
        assert await late.receive(patience=0.1) == []
        pair.link.clear()
        assert await late.receive(1) == [b"hello"]
        writer.close()


async def test_the_handshake_is_spared() -> None:
    """The first two frames each way are delayed at the most."""
    async with echo(greeted=False) as pair:
        pair.link.apply(Faults(loss=1.0))
        pair.send(*FRAMES)
        assert await pair.receive(patience=0.1) == FRAMES[:2]


async def test_a_reset_ends_the_connection() -> None:
    """The client sees it at once."""
    async with echo() as pair:
        pair.link.reset()
        with suppress(ConnectionResetError):
            assert await pair.closed()
