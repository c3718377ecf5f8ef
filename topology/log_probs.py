"""How likely a drafter found its proposals, packed: the bytes of Drafted.log_probs, for `verify_budget`.

A u16 for each proposed token of the message, in order, little-endian: −ln q in 1/1024, q the drafter's own probability
of the token after sampling adjustments; 65535 where it was not looked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from paceline.core.errors import WireError

UNIT = 1024
NOT_SAID = 0xFFFF


def pack_log_probs(values: Sequence[float | None]) -> bytes:
    """One for each proposed token of a message, in order."""
    steps = [NOT_SAID if value is None else min(round(-UNIT * value), NOT_SAID - 1) for value in values]
    return np.array(steps, "<u2").tobytes()


def log_probs_of_items(data: bytes | None, counts: Sequence[int]) -> list[list[float]]:
    """Of each item with so many tokens; nothing for an item with a token of which nothing was said."""
    if data is None:
        return [[] for _ in counts]
    steps = iter(np.frombuffer(data, "<u2").tolist())
    items = [list(itertools.islice(steps, count)) for count in counts]
    return [[] if NOT_SAID in item else [-step / UNIT for step in item] for item in items]


def check_log_probs(data: bytes, tokens: int) -> None:
    """WireError unless there is one for each token."""
    if len(data) != 2 * tokens:
        raise WireError(f"{len(data)} bytes of log probabilities do not belong to {tokens} tokens")
