"""What reaches the drafter's service, and what it takes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.topology.wire import Hello, Message


@dataclass(frozen=True)
class Limits:
    """What one drafter takes on.

    max_batch: sessions in one draft step. max_messages: Draft messages drafted for at once, 0 for any number.
    max_ahead: sequences in one step of drafting ahead.
    max_queue: sessions of one target that may wait. chunk: most tokens of catch-up between two draft steps;
    chunk_share: which share of the shortest round of any target such a chunk may take (it shrinks to that), so that
    a Draft that arrives just after it began costs its target little.
    idle_seconds: how long a session must be idle before another may take its place. weights: each target's share,
    1 where nothing is said.
    """

    max_sessions: int = 64
    max_batch: int = 8
    max_messages: int = 0
    max_ahead: int = 8
    max_queue: int = 256
    chunk: int = 256
    chunk_share: float = 0.1
    idle_seconds: float = 10.0
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Tally:
    """How many messages of one link were looked at. The service's thread writes, any may read."""

    messages: int = 0


class PeerUp(NamedTuple):
    """A target's link is up, its Hello accepted. tally: where its messages are counted, if anybody wants to know."""

    name: str
    hello: Hello
    tally: Tally | None = None


class PeerDown(NamedTuple):
    """A target's link is gone."""

    name: str


class Received(NamedTuple):
    """A message of an authenticated target. at: when it came, on the service's clock; None: when it is looked at."""

    name: str
    message: Message
    at: float | None = None


class Reconfigure(NamedTuple):
    """The topology was read again: the weights count from the next turn on."""

    limits: Limits


class Stop(NamedTuple):
    """Ends the service's `run`, after what is being drafted; what waits to be looked at is dropped."""


Event = PeerUp | PeerDown | Received | Reconfigure | Stop
