"""Log probabilities on the wire: what is packed comes back, and a wrong number of them is refused."""

from __future__ import annotations

import pytest

from paceline.core.errors import WireError
from paceline.topology.log_probs import UNIT, log_probs_of_items, pack_log_probs
from paceline.topology.wire import Draft, Drafted, DraftedItem, DraftItem, decode, encode, pack_tokens


def test_what_is_packed_comes_back_by_item() -> None:
    """To half a step; an item with a token of which nothing is known says nothing at all."""
    values = [-0.001, -2.5, None, -0.7, -1e9]
    items = log_probs_of_items(pack_log_probs(values), [2, 2, 0, 1])
    assert items[0] == pytest.approx([-0.001, -2.5], abs=0.5 / UNIT)
    assert items[1] == items[2] == []
    assert items[3][0] < -63
    assert log_probs_of_items(None, [2, 1]) == [[], []]


@pytest.mark.parametrize("size", [0, 3, 4, 8])
def test_a_message_has_one_for_each_token(size: int) -> None:
    """Three tokens, six bytes; anything else is no message."""
    items = [DraftedItem(1, 0, 9, 9, pack_tokens([1, 2])), DraftedItem(2, 0, 9, 9, pack_tokens([3]))]
    good = Drafted(1, items, log_probs=pack_log_probs([-0.1, -0.2, -0.3]))
    assert decode(encode(good)) == good
    with pytest.raises(WireError, match=f"{size} bytes of log probabilities do not belong to 3 tokens"):
        decode(encode(Drafted(1, items, log_probs=bytes(size))))


def test_they_are_asked_for_at_open() -> None:
    """A flag of the item, which older targets do not send."""
    asked = DraftItem(1, 0, b"", 0, 4, log_probs=True)
    message = decode(encode(Draft(1, [asked])))
    assert isinstance(message, Draft) and message.items[0].log_probs
    assert not DraftItem(1, 0, b"", 0, 4).log_probs
