"""What one peer may send, however well it is known: so much a second, and so much ahead of whoever reads it.

A peer above its limits loses its link; nobody else notices. Honest peers stay far below: they wait for answers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.topology.peer import Peer
from paceline.topology.refusals import RefusalLog
from paceline.topology.wire import Close, Draft, Error, Message, Ping

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerLimits:
    """burst_seconds: a peer that was quiet may send at once what its rates allow in so many seconds.

    unread: what may wait for the thread that reads, its items as `work` counts them. stranger_frame: longest frame
    (bytes) before the handshake is over; a Hello holds 4 bytes for every 256 ids of a vocabulary, and little else.
    """

    frames_per_second: float = 20_000.0
    bytes_per_second: float = float(64 << 20)
    burst_seconds: float = 2.0
    unread_messages: int = 1024
    unread_bytes: int = 64 << 20
    unread_items: int = 1 << 17
    stranger_frame: int = 64 << 10


PEER_LIMITS = PeerLimits()
IDS_AN_ITEM = 4  # of a list of sessions: so many take the memory of an item, and less of its time


def work(message: Message) -> int:
    """How many items a message is as good as, in what it costs to keep and to look at: at least 1."""
    if isinstance(message, Draft):
        biases = sum([len(item.sampling.logit_bias) for item in message.items if item.sampling is not None])
        return 1 + len(message.items) + biases
    if isinstance(message, (Close, Ping)):
        return 1 + len(message.sessions or ()) // IDS_AN_ITEM
    return 1


class Meter:
    """Two token buckets: a peer's frames and its bytes."""

    def __init__(self, limits: PeerLimits, now: float) -> None:
        self._limits = limits
        self._frames = limits.frames_per_second * limits.burst_seconds
        self._bytes = limits.bytes_per_second * limits.burst_seconds
        self._at = now

    def takes(self, size: int, now: float) -> bool:
        """Counts a frame of `size` bytes; False once there were too many."""
        limits, seconds = self._limits, now - self._at
        self._at = now
        frames, size_rate = limits.frames_per_second, limits.bytes_per_second
        self._frames = min(limits.burst_seconds * frames, self._frames + seconds * frames) - 1
        self._bytes = min(limits.burst_seconds * size_rate, self._bytes + seconds * size_rate) - size
        return self._frames >= 0 and self._bytes >= 0


@dataclass
class _Waiting:
    """handled: messages of the peer that were read at the last look. marks: what had come from it, in bytes, with each
    message that is not read yet, and its items. read_bytes: the same with the last one that is. items: of all marks."""

    handled: int
    marks: deque[tuple[int, int]] = field(default_factory=deque)
    read_bytes: int = 0
    items: int = 0


class Unread:
    """Messages of each peer that wait in a queue for the thread that reads it. On the loop's thread.

    handled: how many messages of a peer (by name) that thread has read, ever.
    """

    def __init__(self, handled: Callable[[str], int], limits: PeerLimits = PEER_LIMITS) -> None:
        self._handled = handled
        self._limits = limits
        self._waiting: dict[str, _Waiting] = {}
        self._refusals = RefusalLog(log)

    def up(self, peer: Peer) -> None:
        """A new link."""
        self._waiting[peer.name] = _Waiting(self._handled(peer.name))

    def down(self, peer: Peer) -> None:
        """The link is gone."""
        self._waiting.pop(peer.name, None)

    def takes(self, peer: Peer, items: int = 1) -> bool:
        """Whether one more message, of so many items, may be put into the queue; if not, the peer's link is closed."""
        waiting = self._waiting[peer.name]
        handled = self._handled(peer.name)
        for _ in range(min(handled - waiting.handled, len(waiting.marks))):
            waiting.read_bytes, read = waiting.marks.popleft()
            waiting.items -= read
        waiting.handled = handled
        waiting.marks.append((peer.bytes_in, items))
        waiting.items += items
        limits, unread_bytes = self._limits, peer.bytes_in - waiting.read_bytes
        few = len(waiting.marks) <= limits.unread_messages and waiting.items <= limits.unread_items
        if few and unread_bytes <= limits.unread_bytes:
            return True
        self.refuse(peer, f"{peer.name} sends more than can be read")
        return False

    def refuse(self, peer: Peer, reason: str) -> None:
        """Closes the link of a peer that floods."""
        self._refusals.tell(peer.address, "flood", reason)
        peer.close(Error("flood", reason))
