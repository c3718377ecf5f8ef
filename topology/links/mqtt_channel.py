"""One channel over a broker: its frames go out on one topic and come in on another, marked and counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple, Protocol

from paceline.core.errors import WireError
from paceline.topology.links import mqtt_frames as frames
from paceline.topology.links.mqtt_client import PACKET_OVERHEAD, PUBLISH_OVERHEAD
from paceline.topology.links.mqtt_frames import Assembler, Opened, Opener, Sealer, derive
from paceline.topology.wire import MAX_FRAME_BYTES

MAX_QUEUED_BYTES = 8 << 20
NONCE_BYTES = 16
FULL = b"\1"  # body of a Close: this side did not read


class Route(NamedTuple):
    """Which channel a payload belongs to."""

    topic: str  # that it comes in on
    channel: bytes  # the first four bytes of the dialer's nonce


class Outlet(Protocol):
    """What a channel sends through: the transport, as long as one connection lives."""

    @property
    def largest_packet(self) -> int:
        """What the broker takes whole."""

    def publish(self, topic: str, payload: bytes, *, control: bool = False) -> bool:
        """False when too much waits already."""

    def forget(self, channel: MqttChannel) -> None:
        """The channel has ended; on the loop."""


class MqttChannel:
    """One end of a pipe between two nodes."""

    def __init__(
        self,
        outlet: Outlet,
        route: Route,
        out_topic: str,
        nonce: bytes,
        key: bytes,
        peer: str,
        url: str,
        *,
        listener: bytes,
    ) -> None:
        """key: the deployment's, for what comes before the handshake has made one of its own. url: the broker's.
        listener: the instance that accepts; to a later one an Open means nothing."""
        self.peer = peer
        self.peer_address = f"{peer} through {url}"
        self.peer_instance = b""
        self.route = route
        self.nonce = nonce
        self.bytes_in = 0  # of topic, header and frame
        self.bytes_out = 0
        self.dropped = 0  # payloads that were forged, or came twice
        self.max_frame = MAX_FRAME_BYTES
        self.binding = b""
        self.certified: str | None = None
        self.open = False  # both ends have agreed to it
        self.secured = False
        self._outlet = outlet
        self._loop = asyncio.get_running_loop()
        self._out_topic = out_topic
        self._out_bytes = len(out_topic) + PUBLISH_OVERHEAD + frames.HEADER.size
        self._in_bytes = len(route.topic) + PUBLISH_OVERHEAD + frames.HEADER.size
        around = len(out_topic) + PACKET_OVERHEAD + frames.HEADER.size + frames.PART_HEADER.size
        self._part = outlet.largest_packet - around
        self._on_frame: Callable[[bytes], None] | None = None
        self._on_close: Callable[[str], None] | None = None
        self._early: deque[bytes] = deque()  # frames that came before `receive`
        self._early_bytes = 0
        self._end: str | None = None
        self._deaf = False  # ended by this side: no frame is told any more
        self._assembler = Assembler()
        self._opener: Opener
        self._before: Opener | None = None  # until the peer marks with the handshake's key, too
        self._lock = Lock()  # guards what follows
        self._closing = False
        self._sealer: Sealer
        self._use(
            derive(key, b"channel", out_topic.encode(), nonce, listener),
            derive(key, b"channel", route.topic.encode(), nonce, listener),
        )

    # For any thread.

    def send(self, frame: bytes, control: bool = False) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        with self._lock:
            if self._closing:
                return
            if len(frame) <= self._part:
                sent = self._put(frames.DATA, frame, control)
            else:
                sent = all([self._put(frames.PART, part, control) for part in frames.cut(frame, self._part)])
            if not sent:
                self._closing = True
                self._on_loop(self.finish, "the broker does not read: the queue is full")

    def close(self) -> None:
        self._close("closed here")

    # On the loop.

    def receive(self, on_frame: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        self._on_frame, self._on_close = on_frame, on_close
        while self._early and not self._deaf:
            on_frame(self._early.popleft())
        if self._end is not None:
            self._tell_close()

    def secure(self, key: bytes) -> None:
        with self._lock:
            self.secured = True
            self._before = self._opener
            self._use(
                derive(key, b"frames", self._out_topic.encode()),
                derive(key, b"frames", self.route.topic.encode()),
                frames.SECURED,
            )

    def greet(self, kind: int, body: bytes = b"") -> None:
        """Sends what opens a channel."""
        with self._lock:
            self._put(kind, body, control=True)

    def begin(self, peer_instance: bytes, *, dialer: bytes, listener: bytes) -> None:
        """Both ends know of it now."""
        self.open = True
        self.peer_instance = peer_instance
        self.binding = self.nonce + dialer + listener

    def unseal(self, payload: bytes) -> Opened | None:
        """What a payload holds, if it is the peer's and new."""
        opened = self._opener.open(payload)
        if opened is None and self._before is not None and not self._opener.used:
            # A peer that refuses the handshake's end has no key of it: only its leaving is heard then.
            opened = self._before.open(payload)
            if opened is not None and opened.kind != frames.CLOSE:
                opened = None
        if opened is None:
            self.dropped += 1
        else:
            self.bytes_in += self._in_bytes + len(opened.body)
        return opened

    def take(self, opened: Opened) -> None:
        """A payload of an open channel."""
        if opened.kind == frames.CLOSE:
            did_not_read = opened.body == FULL
            self.finish("the peer does not read: its queue is full" if did_not_read else "closed by the peer")
        elif opened.kind == frames.DATA:
            self._tell_frame(opened.body)
        elif opened.kind == frames.PART:
            try:
                frame = self._assembler.add(opened, self.max_frame)
            except WireError as error:
                self._close(str(error))
                return
            if frame is not None:
                self._tell_frame(frame)

    def finish(self, reason: str) -> None:
        """The end of this side, told once."""
        if self._end is not None:
            return
        self._end = reason
        with self._lock:
            self._closing = True
        self._outlet.forget(self)
        self._tell_close()

    def _close(self, reason: str, body: bytes = b"") -> None:
        with self._lock:
            if self._closing:
                return
            self._put(frames.CLOSE, body, control=True)
            self._closing = self._deaf = True
        self._on_loop(self.finish, reason)

    def _use(self, out_key: bytes, in_key: bytes, flags: int = 0) -> None:
        channel = self.route.channel
        self._sealer, self._opener = Sealer(channel, out_key, flags), Opener(channel, in_key, flags)

    def _put(self, kind: int, body: bytes, control: bool) -> bool:
        self.bytes_out += self._out_bytes + len(body)
        return self._outlet.publish(self._out_topic, self._sealer.seal(kind, body), control=control)

    def _on_loop(self, callback: Callable[[str], None], reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and every channel with it
            self._loop.call_soon_threadsafe(callback, reason)

    def _tell_frame(self, frame: bytes) -> None:
        if self._deaf:
            return
        if self._on_frame is None:
            self._early.append(frame)
            self._early_bytes += len(frame)
            if self._early_bytes > MAX_QUEUED_BYTES:
                self._close("nobody received what the peer sent: the queue is full", FULL)
            return
        try:
            self._on_frame(frame)
        except Exception as error:  # as with a socket: the loop reports it, and this channel ends
            self._loop.call_exception_handler({"message": "a receiver failed", "exception": error})
            self.close()

    def _tell_close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self._end or "closed")
