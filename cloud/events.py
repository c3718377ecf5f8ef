"""What reaches a target's engine: the only way in, from any thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.cloud.requests import Request
from paceline.topology.wire import Drafted, Message, Welcome


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
    """A drafter's answer."""

    drafter: str
    message: Drafted


class Stop(NamedTuple):
    """End the loop."""


Event = Submit | Cancel | LinkUp | LinkDown | Arrived | Stop
