"""Frames between threads of one process: the same promises as TCP, no sockets.

One `MemoryTransport` is one little network; its addresses are plain names. Both ends may live on
different event loops.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from threading import Lock

from paceline.core.errors import LinkClosed, UserError, WireError
from paceline.topology.links.base import Channel, Listener
from paceline.topology.wire import MAX_FRAME_BYTES

MAX_QUEUED_BYTES = 8 << 20


class MemoryChannel:
    """One end of a pair; what is sent here is told at the other end, on that end's loop."""

    def __init__(self, peer_address: str, loop: asyncio.AbstractEventLoop) -> None:
        self.peer_address = peer_address
        self.bytes_in = 0
        self.bytes_out = 0
        self.max_frame = MAX_FRAME_BYTES
        self.binding = b""
        self.certified: str | None = None
        self._loop = loop
        self._lock = Lock()  # guards what follows
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._end: str | None = None  # the reason, once no more frames will come in
        self._scheduled = False
        self._closed = False  # by this side
        self._peer: MemoryChannel | None = None
        self._on_frame: Callable[[bytes], None] | None = None
        self._on_close: Callable[[str], None] | None = None

    def send(self, frame: bytes, control: bool = False) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        peer = self._peer
        if peer is None or self._closed or self._end is not None:
            return
        if peer._put(frame):
            self.bytes_out += len(frame)
        else:
            self._finish("the peer does not read: its queue is full")
            peer._finish("this side did not read: its queue was full")

    def receive(self, on_frame: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        with self._lock:
            self._on_frame, self._on_close = on_frame, on_close
        self._wake()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.clear()
        self._finish("closed here")
        if self._peer is not None:
            self._peer._finish("closed by the peer")

    def secure(self, key: bytes) -> None:
        """A pair of threads has nobody in between."""

    def _put(self, frame: bytes) -> bool:
        with self._lock:
            if self._inbox_bytes + len(frame) > MAX_QUEUED_BYTES:
                return False
            if self._end is None:
                self._inbox.append(bytes(frame))
                self._inbox_bytes += len(frame)
        self._wake()
        return True

    def _finish(self, reason: str) -> None:
        with self._lock:
            if self._end is None:
                self._end = reason
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._scheduled or self._on_frame is None:
                return
            self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # that loop has ended, and its process part with it
            return

    def _deliver(self) -> None:
        with self._lock:
            self._scheduled = False
            frames, self._inbox = self._inbox, deque()
            self._inbox_bytes = 0
        on_frame, on_close = self._on_frame, self._on_close
        for frame in frames:
            if self._closed or on_frame is None:
                break
            self.bytes_in += len(frame)
            try:
                on_frame(frame)
            except Exception:
                self.close()  # as a socket's transport does; the loop reports the exception
                raise
        if self._end is not None and not self._inbox and on_close is not None:
            self._on_close = None
            on_close(self._end)


class MemoryListener:
    """An address of a MemoryTransport that accepts."""

    def __init__(self, transport: MemoryTransport, address: str, on_channel: Callable[[Channel], None]) -> None:
        self.address = address
        self._transport = transport
        self._on_channel = on_channel
        self._loop = asyncio.get_running_loop()
        self._channels: set[MemoryChannel] = set()

    async def close(self) -> None:
        if self._transport.listeners.get(self.address) is self:
            del self._transport.listeners[self.address]
        for channel in list(self._channels):
            channel.close()

    def _accept(self, channel: MemoryChannel) -> None:
        if self._transport.listeners.get(self.address) is not self:
            channel.close()
            return
        self._channels = {open_one for open_one in self._channels if open_one._end is None} | {channel}
        self._on_channel(channel)


class MemoryTransport:
    """A network inside one process."""

    def __init__(self) -> None:
        self.listeners: dict[str, MemoryListener] = {}
        self._numbers = itertools.count(1)

    async def dial(self, address: str, name: str | None = None) -> Channel:
        listener = self.listeners.get(address)
        if listener is None:
            raise LinkClosed(f"nothing listens at {address}")
        dialer = f"dialer-{next(self._numbers)}"
        near = MemoryChannel(address, asyncio.get_running_loop())
        far = MemoryChannel(dialer, listener._loop)
        near._peer, far._peer = far, near
        try:
            listener._loop.call_soon_threadsafe(listener._accept, far)
        except RuntimeError:
            raise LinkClosed(f"nothing listens at {address} any more") from None
        return near

    async def listen(self, address: str, on_channel: Callable[[Channel], None]) -> Listener:
        if address in self.listeners:
            raise UserError(f"{address} is in use: choose another address")
        listener = self.listeners[address] = MemoryListener(self, address, on_channel)
        return listener

    async def close(self) -> None:
        """Channels share nothing."""
