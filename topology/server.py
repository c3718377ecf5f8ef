"""The drafter's side of its links: accepts targets, checks who they are, answers their beats, drops the silent.

Everything runs on one asyncio loop. A peer that misbehaves loses its own channel and nothing else happens.
The target's side is connection.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import anyio
from anyio.abc import TaskStatus

from paceline.core.clock import Clock, RealClock, wall_us
from paceline.core.errors import HandshakeRefused, WireError
from paceline.topology.handshake import DrafterHandshake, Identity, printable, refusal_frame
from paceline.topology.limits import PEER_LIMITS, Meter, PeerLimits
from paceline.topology.links.base import Channel, Transport
from paceline.topology.peer import LinkHandler, Peer
from paceline.topology.refusals import RefusalLog
from paceline.topology.wire import MAX_FRAME_BYTES, Close, Draft, Error, Goodbye, Message, Ping, Pong, decode

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
SILENCE_SECONDS = 4.5  # looked at every tenth of it: a dead target is gone within 5 s
MAX_STRANGERS = 64  # channels that have not finished the handshake
MAX_PROBES = 16  # links that only measure


class DrafterServer:
    """A drafter's links to its targets, one per target name."""

    def __init__(
        self,
        transport: Transport,
        address: str,
        identity: Identity,
        handler: LinkHandler,
        *,
        clock: Clock | None = None,
        handshake_limit: float = HANDSHAKE_SECONDS,
        silence_limit: float = SILENCE_SECONDS,
        max_strangers: int = MAX_STRANGERS,
        limits: PeerLimits = PEER_LIMITS,
        free_sessions: Callable[[], int] = lambda: -1,
    ) -> None:
        """All times in seconds. `silence_limit`: a target unheard of for so long is dropped.

        free_sessions: how many more the drafter could hold, told with every Pong; -1 where nobody knows.
        """
        self.limits = limits
        self.free_sessions = free_sessions
        self.address = address  # the real one once listening
        self.identity = identity
        self._transport = transport
        self._handler = handler
        self._clock = clock or RealClock()
        self._handshake_limit = handshake_limit
        self._silence_limit = silence_limit
        self._max_strangers = max_strangers
        self._strangers: list[_Link] = []  # oldest first
        self._links: dict[str, _Link] = {}  # by target name
        self._probes: list[_Link] = []  # oldest first; a target's own link is undisturbed by them
        self._refusals = RefusalLog(log)

    @property
    def peers(self) -> list[Peer]:
        """The targets whose links are up."""
        return [link.peer for link in self._links.values() if link.peer is not None]

    async def run(self, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; reports its address once it listens. UserError when it cannot."""
        listener = await self._transport.listen(self.address, self._accept)
        self.address = listener.address
        log.info("listening at %s", self.address, extra={"event": "listening", "address": self.address})
        task_status.started(self.address)
        try:
            while True:
                await anyio.sleep(min(self._handshake_limit, self._silence_limit) / 10)
                self._drop_silent()
        finally:
            for link in list(self._strangers):
                link.end("this drafter stops", Goodbye("leaving"))
            for link in [*self._links.values(), *self._probes]:
                link.end("this drafter stops", Goodbye("leaving", f"drafter {self.identity.name!r} stops"))
            with anyio.CancelScope(shield=True):
                await listener.close()

    def _accept(self, channel: Channel) -> None:
        if len(self._strangers) >= self._max_strangers:
            self._make_room()
        self._strangers.append(_Link(self, channel))
        channel.receive(self._strangers[-1].on_frame, self._strangers[-1].end)

    def _make_room(self) -> None:
        """A crowd of strangers shuts itself out: the oldest of the host that has most of them goes."""
        crowded, _ = Counter(link.host for link in self._strangers).most_common(1)[0]
        oldest = next(link for link in self._strangers if link.host == crowded)
        self.log_refusal(oldest, "busy", f"more than {self._max_strangers} unfinished handshakes")
        oldest.end("too many unfinished handshakes", Error("busy"))

    def _drop_silent(self) -> None:
        now = self._clock.now()
        for link in list(self._strangers):
            if now - link.since > self._handshake_limit:
                self.log_refusal(link, "timeout", "the handshake was not finished in time")
                link.end("the handshake was not finished in time", Error("timeout"))
        for link in [*self._links.values(), *self._probes]:
            if now - link.last_heard > self._silence_limit:
                link.end(f"silent for {now - link.last_heard:.1f} s", Goodbye("silent", "no sign of life"))

    # For links.

    def now(self) -> float:
        return self._clock.now()

    def link_up(self, link: _Link, peer: Peer) -> None:
        """A link has finished its handshake; an older one of the same target ends first."""
        if link.probe:
            self._probe_up(link)
            return
        older = self._links.get(peer.name)
        if older is not None:
            older.end("replaced by a newer connection", Goodbye("replaced", f"a newer {peer.name!r} has connected"))
        self._strangers.remove(link)
        self._links[peer.name] = link
        fields = {"event": "link_up", "target": peer.name, "address": peer.address}
        log.info("target %s is up at %s", peer.name, peer.address, extra=fields)

    def _probe_up(self, link: _Link) -> None:
        self._strangers.remove(link)
        if len(self._probes) >= MAX_PROBES:
            self._probes[0].end("too many probes", Error("busy"))
        self._probes.append(link)
        address = link.channel.peer_address
        log.info("the link is measured from %s", address, extra={"event": "probe", "address": address})

    def link_down(self, link: _Link, reason: str) -> None:
        """A channel has ended."""
        for unnamed in (self._strangers, self._probes):
            if link in unnamed:
                unnamed.remove(link)
                return
        peer = link.peer
        if peer is None:
            return
        if self._links.get(peer.name) is link:
            del self._links[peer.name]
        fields = {"event": "link_down", "target": peer.name, "address": peer.address, "reason": reason}
        log.info("target %s is down: %s", peer.name, reason, extra=fields)

    def log_refusal(self, link: _Link, code: str, reason: str) -> None:
        """Once per host and code: a stranger cannot fill the log."""
        self._refusals.tell(link.channel.peer_address, code, reason)

    @property
    def handler(self) -> LinkHandler:
        return self._handler


class _Link:
    """One accepted channel: handshake first, then messages, until `end`."""

    def __init__(self, server: DrafterServer, channel: Channel) -> None:
        self.channel = channel
        self.peer: Peer | None = None
        self.since = self.last_heard = server.now()
        self._server = server
        self._handshake = DrafterHandshake(server.identity, channel.binding)
        self._ended = False
        self._meter = Meter(server.limits, self.since)
        channel.max_frame = server.limits.stranger_frame

    @property
    def host(self) -> str:
        return self.channel.peer_address.rpartition(":")[0]

    @property
    def probe(self) -> bool:
        """It only measures: the handler never hears of it."""
        return self._handshake.probe

    def end(self, reason: str, farewell: Message | None = None) -> None:
        """Closes the channel after a last word; the handler is told if the link had been up."""
        if self._ended:
            return
        self._ended = True
        peer = self.peer or Peer("", self.channel)
        peer.close(farewell)
        self._server.link_down(self, reason)
        if self.peer is not None and not self.probe:
            self._server.handler.on_down(self.peer, reason)

    def on_frame(self, frame: bytes) -> None:
        if self._ended:
            return
        self.last_heard = self._server.now()
        if self.peer is None:
            self._on_handshake(frame)
            return
        if not self._meter.takes(len(frame), self.last_heard):
            self._refuse(HandshakeRefused("flood", f"target {self.peer.name!r} sends too much"))
            return
        try:
            message = decode(frame)
        except WireError as error:
            self._refuse(HandshakeRefused("malformed", str(error)))
            return
        self._on_message(self.peer, message)

    def _on_handshake(self, frame: bytes) -> None:
        try:
            if len(frame) > self._server.limits.stranger_frame:
                raise HandshakeRefused("malformed", f"a frame of {len(frame)} bytes before the handshake is over")
            answer = self._handshake.receive(frame)
            self._check_certificate()
        except HandshakeRefused as refusal:
            self._server.log_refusal(self, refusal.code, str(refusal))
            self.channel.send(refusal_frame(refusal), control=True)
            self.end(str(refusal))
            return
        hello = self._handshake.hello
        if self._handshake.done and hello is not None:
            peer = Peer(hello.target, self.channel)
            self._server.link_up(self, peer)
            self.peer = peer
            self.channel.max_frame = MAX_FRAME_BYTES
            self.channel.send(answer, control=True)
            self.channel.secure(self._handshake.frame_key)
            if not self.probe:
                self._server.handler.on_up(peer, hello)
        else:
            self.channel.send(answer, control=True)

    def _check_certificate(self) -> None:
        """A target that shows a certificate is who it says; one node's stolen files make nobody another node."""
        shown, hello = self.channel.certified, self._handshake.hello
        if shown is not None and hello is not None and hello.target != shown:
            claim = f"target {hello.target!r} shows the certificate of {printable(shown)!r}"
            raise HandshakeRefused("unauthenticated", claim)

    def _on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Ping):
            peer.send(Pong(message.time_us, self._server.free_sessions(), wall_us()))
            if not self.probe:
                self._server.handler.on_message(peer, message)
        elif self.probe and isinstance(message, Pong):
            pass  # a frame without an answer, which shows how the next one fares behind it
        elif isinstance(message, (Draft, Close, Pong)) and not self.probe:
            self._server.handler.on_message(peer, message)
        elif isinstance(message, Goodbye):
            self.end(f"the target says goodbye: {printable(message.message or message.code)}")
        elif isinstance(message, Error):
            self.end(f"the target refused: {printable(message.code)} {printable(message.message)}".rstrip())
        else:
            who = "probe" if self.probe else "target"
            self._refuse(HandshakeRefused("unexpected", f"a {who} does not send {type(message).__name__}"))

    def _refuse(self, refusal: HandshakeRefused) -> None:
        self._server.log_refusal(self, refusal.code, str(refusal))
        self.end(str(refusal), Error(refusal.code, str(refusal)))
