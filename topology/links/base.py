"""What a link is, whatever carries it: frames in order or not at all, both ways.

A transport gives `Channel`s: one to whoever dials, one to whoever listens. Above a channel everything is
the same for every transport: handshake, heartbeat, messages (connection.py). All callbacks run on the
asyncio loop; `send` may be called from any thread and never blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Channel(Protocol):
    """A two-way pipe of frames between two processes (or threads), not yet trusted."""

    peer_address: str  # for log lines
    bytes_in: int
    bytes_out: int
    max_frame: int  # bytes; where frames arrive in pieces, a longer one ends the channel before it is here
    binding: bytes  # what both ends of this very pipe know and nobody in between can choose; b"" without such a thing
    certified: str | None  # the name on the certificate that the other end showed; None where none is asked for

    def send(self, frame: bytes, control: bool = False) -> None:
        """Queues one frame. Thread-safe, never blocks; silently drops once the channel is closed.

        control: worth a transport's own retries (MQTT's QoS 1); drafts are not, for the next round makes up for them.
        Raises WireError for a frame over the limit, which the other end would refuse.
        """

    def secure(self, key: bytes) -> None:
        """After the handshake: a pipe that others can write into marks and checks each later frame with this key."""

    def receive(self, on_frame: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        """Sets who is told (on the loop's thread) of each frame and, once, of the end with its reason.

        What arrived before is told at once, in order. After `close` no frame is told any more.
        """

    def close(self) -> None:
        """Ends the channel after what was sent has been written; safe to call twice, from any thread."""


class Listener(Protocol):
    """A running server of a transport."""

    address: str  # what a dialer needs to reach it

    async def close(self) -> None:
        """Stops accepting and closes every channel it accepted."""


class Transport(Protocol):
    """Makes channels."""

    async def dial(self, address: str, name: str | None = None) -> Channel:
        """Connects, or raises LinkClosed with a sentence saying why not. name: whose certificate must be there."""

    async def listen(self, address: str, on_channel: Callable[[Channel], None]) -> Listener:
        """Accepts until closed, telling `on_channel` on the loop; `UserError` when the address cannot be had."""

    async def close(self) -> None:
        """Lets go of what all channels share, such as a client of a broker."""
