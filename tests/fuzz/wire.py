"""The decoder: any bytes are a message or a WireError, and what is a message survives another trip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from paceline.core.errors import WireError
from paceline.topology.wire import MAX_DRAFT_LENGTH, MAX_ITEMS, Draft, Drafted, decode, encode, pack_tokens

from . import messages
from .supply import Supply

Field = Callable[[Supply], Any]


def one(data: bytes) -> None:
    """Half of the inputs are frames as they stand, half become fields that nearly fit."""
    supply = Supply(data)
    if supply.below(2):
        check(supply.bytes(len(data)))
        return
    form = supply.below(len(FIELDS) + 2)
    values = messages.anything(supply, FIELDS[form]) if form < len(FIELDS) else _drafted(supply)
    try:
        frame = msgspec.msgpack.encode(values)
    except (msgspec.EncodeError, OverflowError):  # beyond 64 bits
        return
    check(frame)


def check(frame: bytes) -> None:
    try:
        message = decode(frame)
    except WireError:
        return
    again = encode(message)
    assert decode(again) == message
    assert len(again) <= 4 * len(frame) + 256, "a short frame became a long one"
    if isinstance(message, Draft):
        assert len(message.items) <= MAX_ITEMS
        assert all(0 <= item.k <= MAX_DRAFT_LENGTH and len(item.tokens) % 4 == 0 for item in message.items)
    elif isinstance(message, Drafted):
        assert all(len(item.tokens) in range(0, 4 * MAX_DRAFT_LENGTH + 1, 4) for item in message.items)


def _text(supply: Supply) -> str:
    return supply.bytes(supply.below(20)).decode("utf-8", errors="replace")


def _bytes(supply: Supply) -> bytes:
    return supply.bytes(supply.below(80))


def _words(supply: Supply) -> list[str]:
    return [_text(supply) for _ in range(supply.below(4))]


def _number(supply: Supply) -> int:
    return supply.number()


def _ids(supply: Supply) -> list[int]:
    return [supply.number() for _ in range(supply.below(6))]


def _draft_items(supply: Supply) -> list[Any]:
    return [messages.draft_item(supply, supply.number(), range(9), 64, 9) for _ in range(supply.below(4))]


def _drafted_items(supply: Supply) -> list[Any]:
    item: list[Field] = [_number, _number, _number, _number, _bytes, _number]
    return [messages.anything(supply, item) for _ in range(supply.below(4))]


def _drafted(supply: Supply) -> list[Any]:
    """Items whose tokens are known, and weights that nearly belong to them."""
    drafts = [messages.tokens(supply, 64, 6) for _ in range(supply.below(3))]
    items = [[_number(supply), 0, 9, 9, pack_tokens(draft)] for draft in drafts]
    weights = messages.weights(supply, [token for draft in drafts for token in draft])
    return [6, _number(supply), items, 0, 0, None, None, weights]


def _tag(number: int) -> Field:
    return lambda supply: number


FIELDS: list[list[Field]] = [
    [_tag(1), _number, _number, _text, _text, _bytes, _text, _number, _words, _bytes, _text],
    [_tag(2), _bytes],
    [_tag(3), _bytes],
    [_tag(4), _number, _text, _text, *[_number] * 3, _words, _text, _number, _number, _text, _text, _bytes],
    [_tag(5), _number, _draft_items, _bytes, _text],
    [_tag(6), _number, _drafted_items, _number, _number, *[_bytes] * 3],
    [_tag(7), _number, _ids],
    [_tag(8), _number, _ids],
    [_tag(9), _number, _number, _number],
    [_tag(10), _text, _text],
    [_tag(11), _text, _text],
    [_number, _number, _number],
]
