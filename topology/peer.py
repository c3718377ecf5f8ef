"""What both sides of a link share: the peer, who is told about it, and pauses between attempts."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Protocol

from paceline.core.errors import WireError
from paceline.topology.links.base import Channel
from paceline.topology.wire import Draft, Drafted, Hello, Message, Ping, Pong, Welcome, encode

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 1.0
REPEATED = (Draft, Drafted, Ping, Pong)  # a lost one is made up for by the next


class Peer:
    """The authenticated other end of a link. Thread-safe."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.rtt: float | None = None  # seconds, smoothed; None before the first Pong
        self._channel = channel
        self.up = True

    @property
    def address(self) -> str:
        return self._channel.peer_address

    @property
    def bytes_in(self) -> int:
        return self._channel.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._channel.bytes_out

    def send(self, message: Message, encoded: Callable[[], None] | None = None) -> bool:
        """Hands a message to the link; False when the link is down and it was dropped. encoded: called in between."""
        if not self.up:
            return False
        try:
            frame = encode(message)
            if encoded is not None:
                encoded()
            self._channel.send(frame, control=not isinstance(message, REPEATED))
        except WireError as error:  # whoever sends is an engine, which must not end over a frame
            log.error("to %s: %s", self.name, error, extra={"event": "unsendable", "peer": self.name})
            return False
        return True

    def close(self, farewell: Message | None = None) -> None:
        """Ends the link, after a last word."""
        if farewell is not None:
            self.send(farewell)
        self.up = False
        self._channel.close()


class LinkHandler(Protocol):
    """Who is told what happens on a link; all calls come on the loop's thread and must not block."""

    def on_up(self, peer: Peer, greeting: Hello | Welcome) -> None:
        """The link is up: a target is told the drafter's Welcome, a drafter the target's Hello."""

    def on_message(self, peer: Peer, message: Message) -> None:
        """A valid message of this peer, in order."""

    def on_down(self, peer: Peer, reason: str) -> None:
        """The link is gone, once for every on_up."""


class Backoff:
    """Jittered doubling pauses: soon at first, never longer than `longest` seconds."""

    def __init__(self, first: float = FIRST_RETRY_SECONDS, longest: float = LONGEST_RETRY_SECONDS) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def reset(self) -> None:
        """After success: the next pause is the shortest again."""
        self._next = self._first

    def pause(self) -> float:
        """Seconds to wait now: between half and all of the current step."""
        step, self._next = self._next, min(2 * self._next, self._longest)
        return step * random.uniform(0.5, 1.0)
