"""The target's side of a link: it dials its drafter, proves itself, beats once a second, and dials again.

Everything runs on one asyncio loop; `send` may be called from any thread and never waits. What is above a
channel is the same for every transport. The drafter's side is server.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import anyio

from paceline.core.clock import Clock, RealClock, wall_us
from paceline.core.errors import HandshakeRefused, LinkClosed, WireError
from paceline.topology.handshake import Identity, TargetHandshake, printable, refusal_frame
from paceline.topology.limits import PEER_LIMITS, Meter
from paceline.topology.link_trouble import LinkTrouble
from paceline.topology.links.base import Channel, Transport
from paceline.topology.peer import FIRST_RETRY_SECONDS, Backoff, LinkHandler, Peer
from paceline.topology.wire import Drafted, Error, Goodbye, Message, Ping, Pong, decode

log = logging.getLogger(__name__)

DIAL_SECONDS = 1.5  # short: after a partition the system's own next attempt may be seconds away
HANDSHAKE_SECONDS = 5.0
BEAT_SECONDS = 1.0
MISSED_BEATS = 3
REFUSED_RETRY_SECONDS = 5.0
LASTING_SECONDS = 1.0
# Tried again as after a lost link; a frame that was spoiled on its way need not be the next time.
PASSING_REFUSALS = frozenset({"busy", "leaving", "timeout", "malformed", "unexpected"})
# What most likely is behind a refusal whose reason the drafter keeps to itself.
HINTS = {"unauthenticated": ": is deployment.key the same on both machines? (the drafter's log says more)"}


class DrafterConnection:
    """A target's link to one drafter: up whenever the drafter is there, dialled in the background."""

    def __init__(
        self,
        transport: Transport,
        address: str,
        identity: Identity,
        handler: LinkHandler,
        live_sessions: Callable[[], list[int]],
        *,
        drafter: str | None = None,
        clock: Clock | None = None,
        beat: float = BEAT_SECONDS,
        missed_beats: int = MISSED_BEATS,
        dial_limit: float = DIAL_SECONDS,
        handshake_limit: float = HANDSHAKE_SECONDS,
        backoff: Backoff | None = None,
        refused_retry: float = REFUSED_RETRY_SECONDS,
    ) -> None:
        """`drafter`: the name that must answer there; all times in seconds."""
        self.peer: Peer | None = None  # while the link is up
        self._transport = transport
        self._address = address
        self._identity = identity
        self._handler = handler
        self._live_sessions = live_sessions
        self.drafter = drafter
        self.parting = "stops"  # what the drafter is told that this target does, when `run` is cancelled
        self._clock = clock or RealClock()
        self._beat = beat
        self._silence_limit = beat * missed_beats
        self._dial_limit = dial_limit
        self._handshake_limit = handshake_limit
        self._backoff = backoff or Backoff()
        self._refused_retry = refused_retry
        self._dialled = 0.0  # seconds that the last dial took: as good as a pause
        self._trouble = LinkTrouble(log, drafter, address)

    @property
    def rtt(self) -> float | None:
        """Smoothed round trip in seconds, while known."""
        peer = self.peer
        return peer.rtt if peer is not None else None

    @property
    def trouble(self) -> str | None:
        """Why there is no link now, as last found; None while it is up or was never tried."""
        return None if self.peer is not None else self._trouble.reason

    def send(self, message: Message) -> bool:
        """Sends from any thread; False when the link is down."""
        peer = self.peer
        return peer is not None and peer.send(message)

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        while True:
            try:
                await self._link_once()
            except HandshakeRefused as refusal:
                self._trouble.found(f"{refusal.code}: {refusal}{HINTS.get(refusal.code, '')}", self._clock.now())
                passing = refusal.code in PASSING_REFUSALS
                pause = self._backoff.pause() if passing else self._refused_retry * random.uniform(0.8, 1.0)
            except LinkClosed as loss:
                self._trouble.found(str(loss), self._clock.now())
                pause = max(FIRST_RETRY_SECONDS, self._backoff.pause() - self._dialled)
            await anyio.sleep(pause)

    async def _link_once(self) -> None:
        """One life of the link, from dialling to its end, which is always an exception."""
        started = self._clock.now()
        try:
            with anyio.fail_after(self._dial_limit):
                channel = await self._transport.dial(self._address, self.drafter)
        except TimeoutError:
            raise LinkClosed(f"{self._address} did not answer within {self._dial_limit:g} s") from None
        except (OSError, ValueError, RuntimeError) as error:  # no transport's own; such as: no thread is left
            raise LinkClosed(f"cannot dial {self._address}: {error}") from error
        finally:
            self._dialled = self._clock.now() - started
        link = _TargetLink(
            channel,
            TargetHandshake(self._identity, self.drafter, channel.binding),
            self._clock,
            self._handler,
            self._up,
        )
        try:
            await self._handshake(link)
            up_at = self._clock.now()
            try:
                await self._heartbeat(link)
            finally:
                if self._clock.now() - up_at >= LASTING_SECONDS:
                    self._backoff.reset()  # one that ends at once, again and again, is dialled less and less often
        except anyio.get_cancelled_exc_class():
            link.farewell = Goodbye("leaving", f"target {self._identity.name!r} {self.parting}")
            link.end = link.end or LinkClosed("this target stops")
            raise
        except LinkClosed as loss:
            link.end = link.end or loss
            raise
        finally:
            self.peer = None
            link.finish()

    async def _handshake(self, link: _TargetLink) -> None:
        link.start()
        with anyio.move_on_after(self._handshake_limit):
            await link.changed.wait()
        if link.end is not None:
            raise link.end
        if link.peer is None:
            raise LinkClosed(f"{self._address} did not finish the handshake within {self._handshake_limit:g} s")

    def _up(self, peer: Peer) -> None:
        self.peer = peer
        log.info(
            "link to drafter %s is up",
            peer.name,
            extra={"event": "link_up", "drafter": peer.name, "address": self._address},
        )

    async def _heartbeat(self, link: _TargetLink) -> None:
        """Pings until the link ends."""
        while link.end is None:
            silence = self._clock.now() - link.last_heard
            if silence >= self._silence_limit:
                raise LinkClosed(f"{self._address} was silent for {silence:.1f} s")
            link.ping(self._live_sessions())
            with anyio.move_on_after(self._beat) as beat:
                await link.ended.wait()
            if beat.cancelled_caught:  # it lived for a beat: only now does a new loss count as the first
                self._backoff.reset()
                self._trouble.over()
        raise link.end


class _TargetLink:
    """One channel's life: frames in, handshake first, then messages."""

    def __init__(
        self,
        channel: Channel,
        handshake: TargetHandshake,
        clock: Clock,
        handler: LinkHandler,
        up: Callable[[Peer], None],
    ) -> None:
        self.peer: Peer | None = None
        self.end: HandshakeRefused | LinkClosed | None = None
        self.farewell: Message | None = None  # told to the peer at the end
        self.changed = anyio.Event()  # up, or at its end
        self.ended = anyio.Event()
        self.last_heard = clock.now()
        self._channel = channel
        self._handshake = handshake
        self._clock = clock
        self._handler = handler
        self._up = up
        self._meter = Meter(PEER_LIMITS, self.last_heard)
        self._pings: dict[int, float] = {}  # sent and not answered: time_us → seconds

    def start(self) -> None:
        self._channel.receive(self._on_frame, lambda reason: self._finish_with(LinkClosed(reason)))
        self._channel.send(self._handshake.start(), control=True)

    def ping(self, sessions: list[int]) -> None:
        assert self.peer is not None
        now = self._clock.now()
        while len(self._pings) >= 16:
            del self._pings[next(iter(self._pings))]
        self._pings[int(now * 1e6)] = now
        self.peer.send(Ping(int(now * 1e6), sessions))

    def finish(self) -> None:
        """Ends the channel; tells the handler if the link had been up."""
        peer = self.peer
        if peer is None:
            self._channel.close()
            return
        peer.close(self.farewell)
        self.peer = None
        self._handler.on_down(peer, str(self.end))

    def _finish_with(self, end: HandshakeRefused | LinkClosed, farewell: Message | None = None) -> None:
        if self.end is None:
            self.end, self.farewell = end, farewell
            if self.peer is not None:
                self.peer.up = farewell is not None
        self.changed.set()
        self.ended.set()

    def _on_frame(self, frame: bytes) -> None:
        if self.end is not None:
            return
        self.last_heard = self._clock.now()
        if self.peer is None:
            self._on_handshake(frame)
            return
        if not self._meter.takes(len(frame), self.last_heard):
            self._finish_with(HandshakeRefused("flood", "the drafter sends too much"), Error("flood"))
            return
        try:
            self._on_message(self.peer, decode(frame))
        except WireError as error:
            self._finish_with(LinkClosed(f"the drafter sent a malformed frame: {error}"), Error("malformed"))

    def _on_handshake(self, frame: bytes) -> None:
        try:
            answer = self._handshake.receive(frame)
        except HandshakeRefused as refusal:
            self._channel.send(refusal_frame(refusal), control=True)
            self._finish_with(refusal)
            return
        if answer is not None:
            self._channel.send(answer, control=True)
        elif self._handshake.welcome is not None:
            self._channel.secure(self._handshake.frame_key)
            self.peer = Peer(self._handshake.welcome.drafter, self._channel)
            self._up(self.peer)
            self.changed.set()
            self._handler.on_up(self.peer, self._handshake.welcome)

    def _on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Drafted):
            self._handler.on_message(peer, message)
        elif isinstance(message, Pong):
            sent = self._pings.pop(message.time_us, None)
            if sent is not None:
                sample = self._clock.now() - sent
                peer.rtt = sample if peer.rtt is None else peer.rtt + (sample - peer.rtt) / 8
                self._handler.on_message(peer, message)
        elif isinstance(message, Ping):
            peer.send(Pong(message.time_us, clock_us=wall_us()))
            self._handler.on_message(peer, message)
        elif isinstance(message, Error):
            self._finish_with(HandshakeRefused(printable(message.code), printable(message.message)))
        elif isinstance(message, Goodbye):
            words = f"the drafter says goodbye: {printable(message.message or message.code)}"
            replaced = message.code == "replaced"
            self._finish_with(HandshakeRefused("replaced", words) if replaced else LinkClosed(words))
        else:
            kind = type(message).__name__
            self._finish_with(LinkClosed(f"the drafter sent {kind}, which only targets send"), Error("unexpected"))
