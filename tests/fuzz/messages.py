"""Messages as a hostile but authenticated peer could send them, and as it could not: whatever Supply says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.core.errors import WireError
from paceline.core.rejection import Weights
from paceline.core.sampling import Sampling
from paceline.topology.weights import pack_weights
from paceline.topology.wire import Message, check_hash, decode, encode, pack_tokens

from .supply import Supply

PLAIN_VALUES: tuple[Any, ...] = (None, True, False, 0, -1, 1 << 63, "", "x", b"", b"1234", [], [[]], {}, {1: 2}, 0.5)


def received(message: Message) -> Message | None:
    """What the other end makes of it; None when its decoder refuses it."""
    try:
        return decode(encode(message))
    except (WireError, OverflowError, msgspec.MsgspecError):  # what no encoder can write cannot arrive
        return None


def sampling(supply: Supply) -> Sampling | None:
    form = supply.below(4)
    if form == 0:
        return None
    if form == 1:
        return Sampling(seed=supply.below(256), temperature=0.0)
    return Sampling(
        seed=supply.number(),
        temperature=supply.fraction(),
        top_p=supply.fraction(),
        top_k=supply.number(),
        min_p=supply.fraction(),
        presence_penalty=supply.fraction(),
        frequency_penalty=supply.fraction(),
        repetition_penalty=supply.fraction(),
        logit_bias={supply.number(): supply.fraction() for _ in range(supply.below(4))},
    )


def tokens(supply: Supply, vocabulary: int, most: int) -> list[int]:
    """Ids that mostly exist."""
    ids = [supply.below(256) for _ in range(supply.below(most + 1))]
    return [token % vocabulary if token < 250 else supply.number() & 0xFFFFFFFF for token in ids]


def near(supply: Supply, value: int) -> int:
    """Mostly `value` itself or beside it."""
    form = supply.below(8)
    return supply.number() if form == 7 else max(0, value + (0, 0, 0, 1, -1, -3, 2)[form])


def draft_item(supply: Supply, session: int, held: Sequence[int], vocabulary: int, most: int) -> list[Any]:
    """The fields of a DraftItem about a session of which the drafter holds `held`."""
    base = near(supply, supply.choose((0, len(held))))
    honest = base <= len(held) and supply.below(8) < 7
    return [
        session,
        base,
        pack_tokens(tokens(supply, vocabulary, most)),
        check_hash(held[:base]) if honest else supply.number(),
        supply.choose((0, 1, 4, 16, 17)),
        sampling(supply) if base == 0 or supply.below(8) == 0 else None,
        near(supply, 2),
        supply.choose((0, 1, 20, 60, 1 << 30)),
        supply.below(3) == 0,
        supply.choose((0, 0, 1, 5, 16)),
        supply.choose((0, 0, 1, 4)),
    ]


def weights(supply: Supply, ids: Sequence[int]) -> bytes | None:
    """What proposals may have been drawn from: in order and with the token among them, mostly."""
    form = supply.below(4)
    if form == 0:
        return None
    if form == 1:
        return supply.bytes(supply.below(40))
    rows = [_row(supply, token) if supply.below(8) else None for token in ids]
    packed = bytearray(pack_weights(rows))
    if form == 2 and len(packed) > 1:
        packed[supply.below(min(256, len(packed)))] = supply.below(256)
    return bytes(packed)


def _row(supply: Supply, token: int) -> Weights:
    others = [supply.number() & 0xFFFFFFFF for _ in range(supply.below(4))]
    ids = sorted({token, *others})
    return Weights(ids, [1 + supply.number() % 65535 for _ in ids])


def anything(supply: Supply, fields: Sequence[Callable[[Supply], Any]]) -> list[Any]:
    """An array that looks like a message's, now and then with a field of another kind, too few or too many."""
    values = [supply.choose(PLAIN_VALUES) if supply.below(16) == 0 else field(supply) for field in fields]
    form = supply.below(16)
    return values[: supply.below(len(values) + 1)] if form == 0 else [*values, "more"] if form == 1 else values
