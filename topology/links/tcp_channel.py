"""Frames over TCP, each behind a 4-byte little-endian length.

Latency is what counts here: a target waits for every reply. So reading is a BufferedProtocol that cuts
frames out of one buffer, and `send` from an engine's thread writes to the socket itself, without blocking,
whenever nothing is queued before it; only what the socket does not take goes to the loop. With TLS the loop
does all writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, cast

from paceline.core.errors import UserError, WireError
from paceline.topology.links.words import words
from paceline.topology.wire import MAX_FRAME_BYTES

PREFIX_BYTES = 4
READ_BUFFER_BYTES = 64 << 10
MAX_QUEUED_BYTES = 8 << 20
LINGER_SECONDS = 2.0  # how long a closing channel may still write to a peer that does not read


class TcpChannel(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, on_open: Callable[[TcpChannel], None] | None = None, binding: bytes | None = None) -> None:
        """`on_open` is told once it is up. `binding`: of the certificate shown here; None where the peer's counts."""
        self.peer_address = "?"
        self.bytes_in = 0
        self.bytes_out = 0
        self.max_frame = MAX_FRAME_BYTES
        self.binding = b""
        self.certified: str | None = None
        self._own_binding = binding
        self._loop = asyncio.get_running_loop()
        self._on_open = on_open
        self._on_frame: Callable[[bytes], None] | None = None
        self._on_close: Callable[[str], None] | None = None
        self._early: deque[bytes] = deque()  # frames that came before `receive`
        self._early_bytes = 0
        self._reason: str | None = None  # the first known cause of the end
        self._lost = False
        self._deaf = False  # ended by this side: no frame is told any more
        # Reading: bytes [_head, _tail) of _buffer are not yet cut into frames.
        self._buffer = bytearray(READ_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._head = 0
        self._tail = 0
        # Writing: all of it under the lock.
        self._lock = Lock()
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None  # a duplicate for direct writes; None with TLS
        self._outbox: list[bytes] = []  # waits for the loop
        self._outbox_bytes = 0
        self._transport_bytes = 0  # what the transport had not written when last looked at
        self._flush_scheduled = False
        self._closing = False

    # The channel, for any thread.

    def send(self, frame: bytes, control: bool = False) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        data = len(frame).to_bytes(PREFIX_BYTES, "little") + frame
        with self._lock:
            if self._closing:
                return
            self.bytes_out += len(data)
            if self._socket is not None and not self._outbox and not self._transport_bytes:
                data = self._write_now(self._socket, data)
                if not data:
                    return
            self._outbox.append(data)
            self._outbox_bytes += len(data)
            if self._outbox_bytes + self._transport_bytes > MAX_QUEUED_BYTES:
                self._closing = True
                self._on_loop(self._abort, "the peer does not read: its queue is full")
            elif not self._flush_scheduled:
                self._flush_scheduled = True
                self._on_loop(self._flush)

    def receive(self, on_frame: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        self._on_frame, self._on_close = on_frame, on_close
        while self._early and not self._deaf:
            on_frame(self._early.popleft())
        if self._lost:
            self._tell_close()

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = self._deaf = True
            self._on_loop(self._close, "closed here")

    def secure(self, key: bytes) -> None:
        """A connection has two ends; nobody else can write into it."""

    # Writing.

    def _write_now(self, sock: socket.socket, data: bytes) -> bytes:
        """Writes what the socket takes without blocking; returns the rest."""
        try:
            return data[sock.send(data) :]
        except (BlockingIOError, InterruptedError):
            return data
        except OSError as error:
            self._closing = True
            self._reason = self._reason or words(error)  # at once: this write took the error that reading would see
            self._on_loop(self._abort, self._reason)
            return b""

    def _on_loop(self, callback: Callable[..., None], *arguments: str) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop has ended, and every connection with it
            self._closing = True

    def _flush(self) -> None:
        """On the loop: hands what waits to the transport, which writes in order as the socket allows."""
        with self._lock:
            self._flush_scheduled = False
            if self._transport is None or self._lost:
                return
            if self._outbox:
                self._transport.write(b"".join(self._outbox))
                self._outbox.clear()
                self._outbox_bytes = 0
            with contextlib.suppress(AttributeError):  # Python 3.10's TLS, just before it tells that all is lost
                self._transport_bytes = self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """Called inside `_flush` when the transport keeps some of it; nothing to do."""

    def resume_writing(self) -> None:
        """The transport has written everything: direct writes may begin again."""
        if self._transport is not None and not self._lock.locked():
            self._flush()
        else:  # within `_flush` itself, or while another thread is in `send`
            self._loop.call_soon(self._flush)

    def _close(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._flush()
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(LINGER_SECONDS, self._abort, reason)

    def _abort(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._closing = self._deaf = True
        if self._transport is not None and not self._lost:
            self._transport.abort()

    # Reading, on the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        sock = transport.get_extra_info("socket")
        peername = transport.get_extra_info("peername")
        if peername is not None:  # None: it has gone already
            self.peer_address = join_address(*peername[:2])
            _tune(sock)
        transport.set_write_buffer_limits(high=0)  # so that resume_writing means: all written
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self._bind(tls)
        with self._lock:
            self._transport = transport
            if tls is None:
                self._socket = socket.socket(fileno=os.dup(sock.fileno()))
                self._socket.setblocking(False)
        if self._on_open is not None:
            self._on_open(self)

    def _bind(self, tls: ssl.SSLObject) -> None:
        """The server's certificate is what both ends see; a relay between them would have to show another."""
        shown = tls.getpeercert(binary_form=True) or b""
        self.binding = hashlib.sha256(shown).digest() if self._own_binding is None else self._own_binding
        if shown:
            self.certified = _common_name(tls.getpeercert() or {})

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._tail :]

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        self._tail += nbytes
        while not self._deaf and self._tail - self._head >= PREFIX_BYTES:
            start = self._head + PREFIX_BYTES
            length = int.from_bytes(self._view[self._head : start], "little")
            if length > self.max_frame:
                self._abort(f"the peer announced a frame of {length} bytes, over the limit of {self.max_frame}")
                return
            if self._tail - start < length:
                break
            self._head = start + length
            self._tell_frame(bytes(self._view[start : self._head]))
        self._make_room()

    def _make_room(self) -> None:
        """Half a frame moves to the front; the buffer doubles only as bytes really arrive."""
        held = self._tail - self._head
        if held == 0:
            self._head = self._tail = 0
            if len(self._buffer) > READ_BUFFER_BYTES:
                self._buffer = bytearray(READ_BUFFER_BYTES)
                self._view = memoryview(self._buffer)
        elif len(self._buffer) - self._tail < READ_BUFFER_BYTES // 4:
            size = len(self._buffer) if held <= len(self._buffer) // 2 else 2 * len(self._buffer)
            fresh = bytearray(size)
            fresh[:held] = self._view[self._head : self._tail]
            self._buffer, self._view = fresh, memoryview(fresh)
            self._head, self._tail = 0, held

    def _tell_frame(self, frame: bytes) -> None:
        if self._on_frame is not None:
            self._on_frame(frame)
            return
        self._early.append(frame)
        self._early_bytes += len(frame)
        if self._early_bytes > MAX_QUEUED_BYTES:
            self._abort("nobody received what the peer sent: the queue is full")

    def eof_received(self) -> bool:
        half = "" if self._tail == self._head else " in the middle of a frame"
        self._reason = self._reason or f"closed by the peer{half}{self._hint()}"
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        with self._lock:
            self._closing = self._lost = True
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            self._outbox.clear()
        if self._transport is not None:
            self._transport.close()  # nothing is left to close; Python 3.10's TLS warns without it
        # No cycle may keep this alive: a drafter collects garbage rarely, and strangers come in thousands.
        self._transport = self._on_frame = self._on_open = None
        self._buffer = bytearray()
        self._view = memoryview(self._buffer)
        if self._reason is None:
            self._reason = (words(exc) if exc is not None else "closed by the peer") + self._hint()
        self._tell_close()

    def _hint(self) -> str:
        """In TLS 1.3 who dials is done first, and is not told why its certificate is refused."""
        dialled = self._own_binding is None
        mute = bool(self.certified) and self.bytes_in == 0
        return "; its log may say what it holds against this end's certificate" if dialled and mute else ""

    def _tell_close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self._reason or "closed")


def split_address(address: str) -> tuple[str, int]:
    """("192.168.1.20", 7070) of "192.168.1.20:7070"; IPv6 as "[::1]:7070"."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise UserError(f"{address!r} is no address: write host:port, or [host]:port for IPv6")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _common_name(certificate: Mapping[str, Any]) -> str:
    """The one name of its subject; nobody's where there are several."""
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""


def _tune(sock: socket.socket) -> None:
    """No Nagle delay; a dead host is noticed by the kernel too (heartbeats are faster)."""
    with contextlib.suppress(OSError):  # the peer may have gone meanwhile; reading will tell
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
