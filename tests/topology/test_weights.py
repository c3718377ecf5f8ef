"""Weights on the wire: packed without a gap, and anything else refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import WireError
from paceline.core.rejection import Weights
from paceline.topology.weights import MAX_CANDIDATES, check_weights, pack_weights, unpack_weights, weights_of_items
from paceline.topology.wire import Drafted, DraftedItem, decode, encode, pack_tokens

entries = st.dictionaries(
    st.integers(0, 2**32 - 1) | st.integers(0, 300), st.integers(1, 65535), min_size=1, max_size=MAX_CANDIDATES
)
rows = entries.map(lambda row: Weights(sorted(row), [row[token] for token in sorted(row)]))
messages = st.lists(st.none() | rows, max_size=20)


@given(messages, st.data())
def test_what_is_packed_is_unpacked(message: list[Weights | None], data: st.DataObject) -> None:
    """Any rows, with tokens that were not drawn among them, pass the check and come back as they were."""
    tokens = [data.draw(st.sampled_from(row.ids)) if row else 7 for row in message]
    packed = pack_weights(message)
    check_weights(packed, tokens)
    assert unpack_weights(packed, len(tokens)) == message


def test_an_item_with_a_token_that_was_not_drawn_has_no_weights() -> None:
    """Its tokens are a coupled draft; the other items of the message keep theirs, in order."""
    one, two, three = Weights([1], [1]), Weights([2, 3], [4, 5]), Weights([6], [7])
    packed = pack_weights([one, two, None, three])
    assert weights_of_items(packed, [1, 2, 0, 1]) == [[one], [], [], [three]]
    assert weights_of_items(None, [2, 0]) == [[], []]


def test_the_layout_is_the_documented_one() -> None:
    """Width, counts, ids, weights; little-endian, ids as wide as the largest needs."""
    row = Weights([5, 258], [1, 515])
    assert pack_weights([row, None]) == bytes([2, 2, 0, 5, 0, 2, 1, 1, 0, 3, 2])
    assert pack_weights([None]) == bytes([1, 0])
    assert len(pack_weights([Weights([150_000], [9])])) == 1 + 1 + 3 + 2


GOOD = Weights([3, 9, 700], [5, 6, 7])


@pytest.mark.parametrize(
    ("packed", "tokens", "reason"),
    [
        (b"", [], "do not belong"),
        (b"\0\0", [1], "do not belong"),
        (b"\5\0", [1], "do not belong"),
        (b"\1", [1], "do not belong"),
        (pack_weights([GOOD]), [9, 9], "do not belong"),
        (pack_weights([GOOD])[:-1], [9], "do not belong"),
        (pack_weights([GOOD]) + b"\0", [9], "do not belong"),
        (pack_weights([GOOD]), [4], "not among"),
        (pack_weights([GOOD, GOOD]), [9, 4], "not among"),
        (pack_weights([Weights([9, 3], [1, 1])]), [9], "not in order"),
        (pack_weights([Weights([3, 3], [1, 1])]), [3], "not in order"),
        (pack_weights([Weights([3], [0])]), [3], "no weight"),
        (pack_weights([Weights(list(range(65)), [1] * 65)]), [3], "at most 64"),
    ],
)
def test_weights_that_fit_no_tokens_are_refused(packed: bytes, tokens: list[int], reason: str) -> None:
    """At decoding: nobody behind it has to look again."""
    message = Drafted(1, [DraftedItem(1, 0, 4, 4, pack_tokens(tokens))], weights=packed)
    with pytest.raises(WireError, match=reason):
        decode(encode(message))


@given(st.binary(max_size=60), st.lists(st.integers(0, 9), max_size=4))
def test_any_bytes_are_weights_or_a_wire_error(data: bytes, tokens: list[int]) -> None:
    """What passes belongs to the tokens; nothing but WireError is raised."""
    try:
        check_weights(data, tokens)
    except WireError:
        return
    for token, row in zip(tokens, unpack_weights(data, len(tokens)), strict=True):
        if row is not None:
            assert token in row.ids
            assert all(low < high for low, high in itertools.pairwise(row.ids))
            assert all(1 <= weight <= 65535 for weight in row.weights)


def test_a_round_costs_a_few_hundred_bytes() -> None:
    """Four tokens of a vocabulary of 100 000: drawn from 16 candidates each, and from as many as there may be."""
    few = [Weights(list(range(99_000, 99_016)), [65535] * 16)] * 4
    many = [Weights(list(range(99_000, 99_064)), [65535] * 64)] * 4
    item = DraftedItem(2**40, 0, 1505, 1505, pack_tokens([99_001] * 4))
    assert len(encode(Drafted(2**62, [item], 1000, 8000, weights=pack_weights(few)))) < 400
    assert len(encode(Drafted(2**62, [item], 1000, 8000, weights=pack_weights(many)))) < 1400
