"""What reaches a target's engine: the only way in, from any thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from paceline.cloud.requests import Request
from paceline.topology.wire import Drafted, Message, Welcome

if TYPE_CHECKING:
    from paceline.cloud.engine import EngineConfig


class Submit(NamedTuple):
    """A new request."""

    request: Request


class Cancel(NamedTuple):
    """The client is gone, or changed its mind."""

    request_id: str


class LinkUp(NamedTuple):
    """A drafter welcomed this target."""

    drafter: str
    welcome: Welcome
    send: Callable[[Message], bool]


class LinkDown(NamedTuple):
    """A drafter is gone."""

    drafter: str


class Arrived(NamedTuple):
    """A drafter's answer. at: when it came, on the engine's clock; None: it comes now."""

    drafter: str
    message: Drafted
    at: float | None = None


class Room(NamedTuple):
    """How many more sessions a drafter could hold, over all its targets."""

    drafter: str
    free_sessions: int


class Reconfigure(NamedTuple):
    """The topology was read again: draft length, deadline, prompt chunk and drafters change from the next round on."""

    config: EngineConfig


class Drain(NamedTuple):
    """The target leaves: what runs goes on, what waits for room is refused with this sentence."""

    reason: str


class Stop(NamedTuple):
    """End the loop."""


Event = Submit | Cancel | LinkUp | LinkDown | Arrived | Room | Reconfigure | Drain | Stop
