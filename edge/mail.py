"""What targets sent and the service has not looked at yet: a queue for each, in pieces, and turns among them.

Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): with each turn a target may have so much more work done,
so whoever sends much, or what is dear, waits behind itself.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from paceline.edge.events import Tally
from paceline.topology.limits import IDS_AN_ITEM, work
from paceline.topology.wire import Close, Draft, Message

PIECE_ITEMS = 128  # of a Draft, looked at in one go; about 0.5 ms


class Piece(NamedTuple):
    """A message, or some items of one. number: of the message, over all targets. work: as limits.work counts it.
    at: when it came, if that is known."""

    message: Message
    number: int
    work: int
    last: bool
    at: float | None


@dataclass
class _Box:
    """One target's. credit: work that it may still have done in this turn."""

    tally: Tally
    pieces: deque[Piece] = field(default_factory=deque)
    credit: int = 0


class Mail:
    """True while anything waits."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}  # of the connected targets
        self._turns: OrderedDict[str, _Box] = OrderedDict()  # of those with something in it, whose turn it is first
        self._numbers = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self._turns)

    def open(self, target: str, tally: Tally) -> None:
        """A new link; what came by an older one is not wanted any more."""
        self.close(target)
        self._boxes[target] = _Box(tally)

    def close(self, target: str) -> None:
        """The link is gone, and what came by it."""
        self._boxes.pop(target, None)
        self._turns.pop(target, None)

    def put(self, target: str, message: Message, at: float | None = None) -> None:
        """Ignored where there is no link."""
        box = self._boxes.get(target)
        if box is not None:
            box.pieces.extend(_pieces(message, next(self._numbers), at))
            self._turns.setdefault(target, box)

    def take(self) -> tuple[str, Piece]:
        """The next piece, which counts as looked at. Something must wait."""
        while True:
            target, box = next(iter(self._turns.items()))
            if box.credit >= box.pieces[0].work:
                break
            box.credit += PIECE_ITEMS
            self._turns.move_to_end(target)
        piece = box.pieces.popleft()
        box.credit -= piece.work
        box.tally.messages += piece.last
        if not box.pieces:
            del self._turns[target]
            box.credit = 0
        return target, piece


def _pieces(message: Message, number: int, at: float | None) -> Iterator[Piece]:
    """A long Draft or Close is as good as several short ones."""
    parts = [message]
    if isinstance(message, Draft) and len(message.items) > PIECE_ITEMS:
        starts = range(0, len(message.items), PIECE_ITEMS)
        parts = [msgspec.structs.replace(message, items=message.items[one : one + PIECE_ITEMS]) for one in starts]
    elif isinstance(message, Close) and len(message.sessions) > PIECE_ITEMS * IDS_AN_ITEM:
        starts = range(0, len(message.sessions), size := PIECE_ITEMS * IDS_AN_ITEM)
        parts = [Close(message.epoch, message.sessions[one : one + size]) for one in starts]
    for part in parts:
        yield Piece(part, number, work(part), part is parts[-1], at)
