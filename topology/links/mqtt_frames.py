"""What an MQTT payload of a channel looks like: a small header with a MAC and a counter, then the frame.

A broker has no connection to bind to, and whoever may publish there can write into every topic. So each payload
is marked for its channel and direction, counted, and thrown away when it is not from the peer or came before.
Frames that the broker would not take whole travel in parts.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

from paceline.core.errors import WireError

OPEN, ACCEPT, DATA, PART, CLOSE = range(1, 6)  # kinds of payload
SECURED = 0x80  # on the kind: marked with the key that the handshake made, no longer with the deployment's

HEADER = struct.Struct("<B4sH8s")  # kind, channel, low bits of the counter, MAC
PART_HEADER = struct.Struct("<HH")  # index and count of the parts of a frame
_MARKED = struct.Struct("<B4sQ")  # what the MAC covers beside the payload: the counter in full
COUNTER_SPAN = 1 << 16
WINDOW = 1024  # so much later than its successors a payload may come: QoS 0 and 1 overtake one another
MAC_BYTES = 8
MAX_ASSEMBLIES = 4  # frames whose parts are still coming in


def derive(key: bytes, *parts: bytes) -> bytes:
    """A key of 32 bytes for one use; the parts say which, each with its length before it."""
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(key, b"paceline mqtt\0" + framed, "sha256")


def _mac(key: bytes, marked: bytes, body: bytes) -> bytes:
    mac = hashlib.blake2b(marked, digest_size=MAC_BYTES, key=key)
    mac.update(body)
    return mac.digest()


class Sealer:
    """Marks and counts what goes one way."""

    def __init__(self, channel: bytes, key: bytes, flags: int = 0) -> None:
        self._channel = channel
        self._key = key
        self._flags = flags
        self._counter = 0

    def seal(self, kind: int, body: bytes = b"") -> bytes:
        """A payload for the broker."""
        kind |= self._flags
        counter = self._counter
        self._counter += 1
        mac = _mac(self._key, _MARKED.pack(kind, self._channel, counter), body)
        return HEADER.pack(kind, self._channel, counter % COUNTER_SPAN, mac) + body


class Opened(NamedTuple):
    """A payload that is the peer's and new."""

    kind: int
    counter: int
    body: bytes


class Opener:
    """Checks what comes the other way: the peer's own, each payload once."""

    def __init__(self, channel: bytes, key: bytes, flags: int = 0) -> None:
        self.used = False  # something genuine has come
        self._channel = channel
        self._key = key
        self._flags = flags
        self._next = 0  # one past the highest counter seen
        self._seen = 0  # bit i: counter _next - 1 - i has come

    def open(self, payload: bytes) -> Opened | None:
        """None for what is forged, of another channel, marked with another key, or here already."""
        if len(payload) < HEADER.size:
            return None
        kind, channel, low, mac = HEADER.unpack_from(payload)
        if kind & SECURED != self._flags or channel != self._channel:
            return None
        counter = self._in_full(low)
        age = self._next - 1 - counter
        if age >= WINDOW or (age >= 0 and self._seen >> age & 1):
            return None
        body = payload[HEADER.size :]
        if not hmac.compare_digest(mac, _mac(self._key, _MARKED.pack(kind, channel, counter), body)):
            return None
        self._note(age, counter)
        return Opened(kind & ~SECURED, counter, body)

    def _in_full(self, low: int) -> int:
        """The counter nearest to the expected one that has these low bits."""
        ahead = (low - self._next) % COUNTER_SPAN
        behind = COUNTER_SPAN - ahead
        return self._next - behind if ahead >= COUNTER_SPAN // 2 and self._next >= behind else self._next + ahead

    def _note(self, age: int, counter: int) -> None:
        self.used = True
        if age >= 0:
            self._seen |= 1 << age
        else:
            self._seen = (self._seen << -age | 1) & ((1 << WINDOW) - 1) if -age < WINDOW else 1
            self._next = counter + 1


def cut(frame: bytes, size: int) -> list[bytes]:
    """The bodies of a frame's parts, each of `size` bytes of it at most."""
    count = -(-len(frame) // size)
    return [PART_HEADER.pack(i, count) + frame[i * size : (i + 1) * size] for i in range(count)]


class _Assembly:
    """A frame some of whose parts are here."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}
        self.size = 0


class Assembler:
    """Puts frames together again. What it holds is bounded; a lost part loses that frame only."""

    def __init__(self) -> None:
        # By the counter of the frame's first part, and how many parts there are by each one's word; oldest first.
        self._assemblies: dict[tuple[int, int], _Assembly] = {}

    def add(self, part: Opened, limit: int) -> bytes | None:
        """The whole frame with its last missing part, else None. WireError when it is longer than `limit` bytes."""
        index, count = PART_HEADER.unpack_from(part.body) if len(part.body) > PART_HEADER.size else (0, 0)
        if index >= count:
            return None
        first = (part.counter - index, count)
        assembly = self._assemblies.setdefault(first, _Assembly())
        assembly.pieces[index] = part.body[PART_HEADER.size :]
        assembly.size += len(assembly.pieces[index])
        if assembly.size > limit:
            raise WireError(f"the peer sent a frame over the limit of {limit} bytes")
        if len(assembly.pieces) == count:
            del self._assemblies[first]
            return b"".join(assembly.pieces[i] for i in range(count))
        elif len(self._assemblies) > MAX_ASSEMBLIES:
            del self._assemblies[next(iter(self._assemblies))]
        return None
