"""How good a link is: a real handshake as a probe, then Pings that are timed.

The drafter treats a probe as a peer that may measure and nothing else, so a target's own link is not disturbed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import anyio

from paceline.core.clock import wall_us
from paceline.core.errors import HandshakeRefused, LinkClosed, WireError
from paceline.topology.handshake import PROBE, Identity, TargetHandshake, printable, refusal_frame
from paceline.topology.links.base import Channel, Transport
from paceline.topology.wire import Error, Goodbye, Message, Ping, Pong, Welcome, decode, encode

DIAL_SECONDS = 1.5
ANSWER_SECONDS = 2.0
CLOSE_SECONDS = 1.0
PINGS, PINGS_SECONDS = 200, 0.5  # one after another: at most so many, for so long
BURSTS, BURST_PAUSE = 20, 0.05
LIKE_A_DRAFT = [1 << 40] * 9  # session ids that make a Ping as large as a Draft of one session


@dataclass
class Measured:
    """What was found, times in seconds.

    rtts: of Pings one after another. bursts: of the last of three frames written at once, where the first has no
    answer; that is when Nagle's algorithm and delayed acknowledgements wait for one another.
    clock_offset: the drafter's wall clock minus this machine's, ± half of the shortest rtt; None if it was not said.
    """

    welcome: Welcome
    rtts: list[float] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)
    clock_offset: float | None = None


class Meter:
    """A probe's link, once the drafter has welcomed it. Made by `open_meter`."""

    def __init__(self, channel: Channel, handshake: TargetHandshake) -> None:
        self._channel = channel
        self._handshake = handshake
        self._end: Exception | None = None
        self._sent: dict[int, tuple[float, int]] = {}  # number of a Ping → when, monotonic and wall clock
        self._rtts: dict[int, float] = {}
        self._numbers = 0
        self._best: tuple[float, float] | None = None  # the shortest rtt, and the clock offset by it
        self._news = anyio.Event()
        self._closed = anyio.Event()

    async def greet(self) -> Welcome:
        """The handshake. Raises HandshakeRefused or LinkClosed."""
        self._channel.receive(self._on_frame, self._on_close)
        self._channel.send(self._handshake.start(), control=True)
        await self._until(lambda: self._handshake.welcome is not None, "the handshake was not answered")
        welcome = self._handshake.welcome
        assert welcome is not None
        return welcome

    async def measure(self, turn: anyio.Lock) -> Measured:
        """Raises LinkClosed. Pings one after another run under `turn`, so that links do not measure each other."""
        assert self._handshake.welcome is not None
        found = Measured(self._handshake.welcome)
        while turn.locked():
            await self.ping()  # the drafter drops who is silent
            await anyio.sleep(BURST_PAUSE)
        async with turn:
            deadline = time.perf_counter() + PINGS_SECONDS
            while len(found.rtts) < PINGS and time.perf_counter() < deadline:
                found.rtts.append(await self.ping())
        for _ in range(BURSTS):
            await anyio.sleep(BURST_PAUSE)
            found.bursts.append(await self.ping([Pong(0), self._next_ping()]))
        found.clock_offset = None if self._best is None else self._best[1]
        return found

    async def ping(self, before: Sequence[Message] = ()) -> float:
        """The round trip of one Ping, right behind other frames, in seconds."""
        for message in before:
            self._channel.send(encode(message))
        ping = self._next_ping()
        self._channel.send(encode(ping))
        await self._until(lambda: ping.time_us in self._rtts, "a Ping was not answered")
        return self._rtts.pop(ping.time_us)

    def _next_ping(self) -> Ping:
        self._numbers += 1
        self._sent[self._numbers] = (time.perf_counter(), wall_us())
        return Ping(self._numbers, LIKE_A_DRAFT)

    async def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        with anyio.move_on_after(ANSWER_SECONDS):
            while not condition() and self._end is None:
                await self._news.wait()
        if self._end is not None:
            raise self._end
        if not condition():
            raise LinkClosed(f"{otherwise} within {ANSWER_SECONDS:g} s")

    def _on_frame(self, frame: bytes) -> None:
        now, wall = time.perf_counter(), wall_us()
        try:
            if self._handshake.welcome is None:
                self._shake(frame)
            else:
                self._take(decode(frame), now, wall)
        except WireError as error:
            self._finish(LinkClosed(f"the drafter sent a malformed frame: {error}"))
        self._wake()

    def _shake(self, frame: bytes) -> None:
        try:
            answer = self._handshake.receive(frame)
        except HandshakeRefused as refusal:
            self._channel.send(refusal_frame(refusal), control=True)
            self._finish(refusal)
            return
        if answer is not None:
            self._channel.send(answer, control=True)
        else:
            self._channel.secure(self._handshake.frame_key)

    def _take(self, message: Message, now: float, wall: int) -> None:
        if isinstance(message, (Error, Goodbye)):
            self._finish(LinkClosed(f"the drafter ended it: {printable(message.message or message.code)}"))
        elif isinstance(message, Pong) and message.time_us in self._sent:
            sent, sent_wall = self._sent.pop(message.time_us)
            rtt = self._rtts[message.time_us] = now - sent
            if message.clock_us and (self._best is None or rtt < self._best[0]):
                self._best = (rtt, (message.clock_us - (sent_wall + wall) / 2) / 1e6)

    def _finish(self, end: Exception) -> None:
        self._end = self._end or end
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def close(self) -> None:
        """Leaves in good order; the channel is over when this returns, as far as the other end lets it."""
        if self._handshake.welcome is not None and self._end is None:
            self._channel.send(encode(Goodbye("leaving", "the probe is done")), control=True)
        self._channel.close()
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            await self._closed.wait()

    def _on_close(self, reason: str) -> None:
        self._closed.set()
        self._finish(LinkClosed(reason))


@asynccontextmanager
async def open_meter(transport: Transport, address: str, identity: Identity, drafter: str) -> AsyncIterator[Meter]:
    """A link to that drafter as a probe. Raises LinkClosed when nobody answers, HandshakeRefused with its sentence."""
    try:
        with anyio.fail_after(DIAL_SECONDS):
            channel = await transport.dial(address, drafter)
    except TimeoutError:
        raise LinkClosed(f"{address} did not answer within {DIAL_SECONDS:g} s") from None
    meter = Meter(channel, TargetHandshake(replace(identity, capabilities=(PROBE,)), drafter, channel.binding))
    try:
        await meter.greet()
        yield meter
    finally:
        await meter.close()
