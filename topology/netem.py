"""A network that misbehaves on demand: a proxy in this process, between whoever dials it and one real address.

It knows our framing (links/tcp.py), so that it can lose, double, swap and spoil whole frames, which plain TCP
never does but a broker or a restart can. For streams that are not ours (TLS, a broker's) it delays, throttles,
partitions and resets bytes, and never loses one: that would be another protocol's fault. What happens below TCP
is in netem_tun.py, which needs root; this needs nothing. Everything can be switched while traffic flows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from dataclasses import dataclass
from random import Random

from paceline.topology.links.tcp_channel import PREFIX_BYTES, split_address

CHUNK_BYTES = 64 << 10
MAX_HELD_BYTES = 8 << 20  # in flight one way; what is more waits in the sender's own buffers
POLL_SECONDS = 0.005
OVERTAKEN_SECONDS = 0.02  # a reordered frame is held back for so long, at the most
HANDSHAKE_FRAMES = 2  # each way


@dataclass(frozen=True)
class Faults:
    """What one direction does to what passes. Times in seconds, chances 0..1, rate in bytes a second.

    partition: nothing arrives and nobody is told; connections stay open, new ones are not answered.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    corruption: float = 0.0
    rate: float | None = None
    partition: bool = False

    def travel(self, random: Random) -> float:
        """Seconds on the way."""
        return max(0.0, self.delay + random.uniform(-self.jitter, self.jitter))

    def fate(self, random: Random, seen: Counter[str]) -> list[float]:
        """After how many seconds each copy of a packet or frame arrives: none when it is lost, two when doubled."""
        if random.random() < self.loss:
            seen["lost"] += 1
            return []
        seconds = self.travel(random)
        if random.random() < self.reordering:
            seen["reordered"] += 1
            seconds += random.uniform(0.2, 1.0) * OVERTAKEN_SECONDS
        if random.random() < self.duplication:
            seen["doubled"] += 1
            return [seconds, seconds + random.uniform(0.0, OVERTAKEN_SECONDS)]
        return [seconds]


CLEAR = Faults()
PARTITION = Faults(partition=True)


class LinkEmulator:
    """`async with LinkEmulator("127.0.0.1:7070") as link`: dial `link.address` instead.

    framed: cut the stream into our frames; else bytes pass as they come. The handshake's frames are delayed and
    partitioned only: a connection that cannot begin is another fault than one that loses messages. seen counts what
    was done to how many frames, so that a test can tell that its fault took place.
    """

    def __init__(self, upstream: str, *, framed: bool = True, listen: str = "127.0.0.1:0", seed: int = 0) -> None:
        self.upstream = upstream
        self.address = listen
        self.framed = framed
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.to_upstream = CLEAR
        self.to_client = CLEAR
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> LinkEmulator:
        host, port = split_address(self.address)
        self._server = await asyncio.start_server(self._accept, host, port)
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def apply(self, faults: Faults, *, to_upstream: bool = True, to_client: bool = True) -> None:
        """From now on, for connections old and new; the other direction stays as it is."""
        self.to_upstream = faults if to_upstream else self.to_upstream
        self.to_client = faults if to_client else self.to_client

    def clear(self) -> None:
        """A good network again."""
        self.apply(CLEAR)

    def reset(self) -> None:
        """Both ends of every connection see it break now."""
        for writer in self._writers:
            writer.transport.abort()

    # One connection.

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        self._writers.add(writer)
        try:
            await self._join(reader, writer)
        except (OSError, asyncio.CancelledError):  # the address does not answer, a reset, or the block's end
            writer.transport.abort()
        finally:
            self._calls.discard(call)
            self._writers.discard(writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries both directions until either ends, then ends both."""
        while self.to_upstream.partition or self.to_client.partition:
            await asyncio.sleep(POLL_SECONDS)
        up_reader, up_writer = await asyncio.open_connection(*split_address(self.upstream))
        self._writers.add(up_writer)
        flows = [
            asyncio.create_task(_Flow(self, True, reader, up_writer).run()),
            asyncio.create_task(_Flow(self, False, up_reader, writer).run()),
        ]
        try:
            await asyncio.wait(flows, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for flow in flows:
                flow.cancel()
            await asyncio.gather(*flows, return_exceptions=True)
            self._writers.discard(up_writer)
            for one in (writer, up_writer):
                one.close()
                with contextlib.suppress(OSError):
                    await one.wait_closed()


class _Flow:
    """One direction of one connection: reads, decides each frame's fate, and delivers it when it is due."""

    def __init__(
        self, link: LinkEmulator, to_upstream: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._link = link
        self._to_upstream = to_upstream
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._frames = 0
        self._travelling = 0  # bytes that were read and are not yet due
        self._due: deque[bytes] = deque()
        self._last_due = 0.0
        self._free_at = 0.0  # when the throttled line has carried what is before

    @property
    def _faults(self) -> Faults:
        return self._link.to_upstream if self._to_upstream else self._link.to_client

    async def run(self) -> None:
        """Returns once the sender has ended and what was on its way has arrived; neither does so in a partition."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while data := await self._take():
                self._frames += 1
                framed = self._link.framed and self._frames > HANDSHAKE_FRAMES
                self._carry(data) if framed else self._schedule(data, self._faults.travel(self._link.random))
                while self._travelling + self._writer.transport.get_write_buffer_size() > MAX_HELD_BYTES:
                    await asyncio.sleep(POLL_SECONDS)
        while self._travelling or self._due or self._faults.partition:
            await asyncio.sleep(POLL_SECONDS)

    async def _take(self) -> bytes:
        """The next frame with its prefix, or bytes; b"" at the end."""
        if not self._link.framed:
            return await self._reader.read(CHUNK_BYTES)
        prefix = await self._reader.readexactly(PREFIX_BYTES)
        return prefix + await self._reader.readexactly(int.from_bytes(prefix, "little"))

    def _carry(self, data: bytes) -> None:
        """A frame with everything that can happen to it."""
        random, seen = self._link.random, self._link.seen
        seen["frames"] += 1
        if random.random() < self._faults.corruption and len(data) > PREFIX_BYTES:
            seen["corrupted"] += 1
            spoiled = bytearray(data)
            spoiled[random.randrange(PREFIX_BYTES, len(data))] ^= random.randrange(1, 256)
            data = bytes(spoiled)
        for index, seconds in enumerate(self._faults.fate(random, seen)):
            self._schedule(data, seconds, in_order=index == 0 and not self._faults.reordering)

    def _schedule(self, data: bytes, seconds: float, in_order: bool = True) -> None:
        due = self._loop.time() + seconds
        if self._faults.rate:
            self._free_at = max(self._free_at, self._loop.time()) + len(data) / self._faults.rate
            due = self._free_at + seconds
        if in_order:
            due = self._last_due = max(due, self._last_due + 1e-6)  # timers of one instant run in any order
        self._travelling += len(data)
        self._loop.call_at(due, self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        self._travelling -= len(data)
        if self._faults.partition and self._link.framed:
            self._link.seen["swallowed"] += 1
            return
        self._due.append(data)
        self._deliver()

    def _deliver(self) -> None:
        """Bytes of a stream outlast a partition, as TCP has them."""
        if self._faults.partition:
            self._loop.call_later(POLL_SECONDS, self._deliver)
            return
        while self._due and not self._writer.is_closing():
            self._writer.write(self._due.popleft())
        self._due.clear()
