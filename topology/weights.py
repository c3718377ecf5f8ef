"""What a drafter drew its proposals from, packed: the bytes of Drafted.weights, for `verification: rejection`.

One byte w, the width of an id (1..4); one byte for each proposed token of the message, in order: how many candidates
it was drawn from (0 where it was not drawn); the candidates' ids, w bytes each, ascending for each token; their
weights, u16 each. All little-endian, without gaps. Fixed widths, so that numpy reads a message in one go.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import WireError
from paceline.core.rejection import Weights

MAX_CANDIDATES = 64  # of one token


class _Columns(NamedTuple):
    """counts: of each token; ids and weights: int64, of all candidates."""

    counts: NDArray[np.int64]
    ids: NDArray[np.int64]
    weights: NDArray[np.int64]


def pack_weights(rows: Sequence[Weights | None]) -> bytes:
    """One row for each proposed token of a message, in order."""
    drawn = [row for row in rows if row is not None]
    ids = np.array([token for row in drawn for token in row.ids], "<u4")
    width = max(1, (int(ids.max(initial=0)).bit_length() + 7) // 8)
    weights = np.array([weight for row in drawn for weight in row.weights], "<u2")
    counts = bytes([0 if row is None else len(row.ids) for row in rows])
    return bytes([width]) + counts + ids.view(np.uint8).reshape(-1, 4)[:, :width].tobytes() + weights.tobytes()


def unpack_weights(data: bytes, tokens: int) -> list[Weights | None]:
    """The inverse, of what `check_weights` has passed; `tokens`: proposed ones in the message."""
    counts, ids, weights = _columns(data, tokens)
    all_ids, all_weights, rows, start = ids.tolist(), weights.tolist(), [], 0
    for count in counts.tolist():
        end = start + count
        rows.append(Weights(all_ids[start:end], all_weights[start:end]) if count else None)
        start = end
    return rows


def weights_of_items(data: bytes | None, counts: Sequence[int]) -> list[list[Weights]]:
    """Of each item with so many tokens; nothing for an item with a token that was not drawn."""
    if data is None:
        return [[] for _ in counts]
    rows = iter(unpack_weights(data, sum(counts)))
    items = [list(itertools.islice(rows, count)) for count in counts]
    return [[row for row in item if row is not None] if all(item) else [] for item in items]


def check_weights(data: bytes, tokens: Sequence[int]) -> None:
    """WireError unless each token has its candidates, is one of them, and they are in order with weights above 0."""
    counts, ids, weights = _columns(data, len(tokens))
    if counts.max(initial=0) > MAX_CANDIDATES:
        raise WireError(f"a token was drawn from {counts.max()} candidates; at most {MAX_CANDIDATES} are allowed")
    row = np.repeat(np.arange(len(counts)), counts)
    if not (weights.all() and (np.diff(ids)[row[1:] == row[:-1]] > 0).all()):
        raise WireError("the candidates of a token are not in order, or one has no weight")
    found = np.bincount(row[ids == np.array(tokens, np.int64)[row]], minlength=len(counts))
    if not np.array_equal(found, counts > 0):
        raise WireError("a token is not among the candidates that it was drawn from")


def _columns(data: bytes, tokens: int) -> _Columns:
    width = data[0] if data else 0
    counts = np.frombuffer(data[1 : 1 + tokens], np.uint8).astype(np.int64)
    total = int(counts.sum())
    if not 1 <= width <= 4 or len(data) != 1 + tokens + total * (width + 2):
        raise WireError(f"{len(data)} bytes of weights do not belong to {tokens} tokens")
    end = 1 + tokens + total * width
    ids = np.zeros((total, 4), np.uint8)
    ids[:, :width] = np.frombuffer(data[1 + tokens : end], np.uint8).reshape(total, width)
    return _Columns(counts, ids.view("<u4")[:, 0].astype(np.int64), np.frombuffer(data[end:], "<u2").astype(np.int64))
