"""Messages: every byte sequence is one or a WireError; old and new peers understand each other."""

from __future__ import annotations

import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import WireError
from paceline.core.sampling import Sampling
from paceline.topology.wire import (
    MAX_BRANCHES,
    MAX_DRAFT_LENGTH,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    Challenge,
    Close,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Error,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    Prove,
    Welcome,
    check_hash,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
position = st.integers(0, 2**31 - 1)
tokens = st.lists(u32, max_size=40).map(pack_tokens)
few_tokens = st.lists(u32, max_size=MAX_DRAFT_LENGTH).map(pack_tokens)
text = st.text(max_size=40)
sampling = st.builds(
    Sampling,
    seed=u64,
    temperature=st.just(0.0) | st.floats(1e-9, 1e9),
    top_p=st.floats(0.001, 1),
    top_k=st.integers(0, 10**6),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(1e-9, 1e9),
    logit_bias=st.dictionaries(u32, st.floats(-100, 100), max_size=5),
)
draft_item = st.builds(
    DraftItem,
    session=u64,
    base=st.integers(0, 2**31 - 1 - 40),
    tokens=tokens,
    check=u32,
    k=st.integers(0, MAX_DRAFT_LENGTH),
    sampling=st.none() | sampling,
    prompt_length=position,
    limit=position,
    branches=st.integers(0, MAX_BRANCHES),
    taken=st.integers(0, MAX_DRAFT_LENGTH),
)
branches = st.lists(st.tuples(st.integers(0, MAX_DRAFT_LENGTH), u32, few_tokens), max_size=MAX_BRANCHES)
empty_item = st.builds(DraftedItem, session=u64, status=st.just(0), held=position, position=position)
sent_ahead = st.lists(st.tuples(empty_item, branches), max_size=5).map(
    lambda pairs: Drafted(1, [one for one, _ in pairs], branches=[several for _, several in pairs])
)
drafted_item = st.builds(
    DraftedItem,
    session=u64,
    status=st.integers(0, 9),
    held=position,
    position=position,
    tokens=few_tokens,
    retry_after_ms=position,
)
messages = st.one_of(
    st.builds(Hello, position, position, text, text, st.binary(), text, position, st.lists(text), st.binary(), text),
    st.builds(Challenge, st.binary()),
    st.builds(Prove, st.binary()),
    st.builds(Welcome, u64, text, text, position, position, position, st.lists(text), text, u32, u32, text, text),
    st.builds(Draft, epoch=u64, items=st.lists(draft_item, max_size=5)),
    st.builds(Drafted, epoch=u64, items=st.lists(drafted_item, max_size=5), queue_us=position, draft_us=position),
    sent_ahead,
    st.builds(Close, epoch=u64, sessions=st.lists(u64)),
    st.builds(Ping, time_us=u64, sessions=st.none() | st.lists(u64)),
    st.builds(Pong, time_us=u64, free_sessions=st.integers(-1, 2**31), clock_us=u64),
    st.builds(Goodbye, code=text, message=text),
    st.builds(Error, code=text, message=text),
)


@given(messages)
def test_what_is_encoded_is_decoded(message: Message) -> None:
    """Every valid message survives the wire."""
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    """Nothing else is ever raised."""
    with contextlib.suppress(WireError):
        decode(data)


@given(messages, st.data())
def test_a_damaged_frame_is_a_message_or_a_wire_error(message: Message, data: st.DataObject) -> None:
    """Flipped, cut and lengthened frames raise nothing but WireError, and what passes is within the limits."""
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut]), bytes(frame) + bytes(frame[cut:])):
        try:
            result = decode(damaged)
        except WireError:
            continue
        if isinstance(result, Draft):
            assert all(0 <= item.k <= MAX_DRAFT_LENGTH and len(item.tokens) % 4 == 0 for item in result.items)


@pytest.mark.parametrize("depth", [100, 5000, 200_000])
def test_deep_nesting_is_a_wire_error(depth: int) -> None:
    """A frame of nested arrays neither overflows the stack nor raises anything else."""
    with pytest.raises(WireError):
        decode(b"\x91" * depth)
    with pytest.raises(WireError):
        decode(b"\x93\x05\x00" + b"\x91" * depth)


@given(messages)
def test_unknown_trailing_fields_are_ignored(message: Message) -> None:
    """A newer peer's extra fields do not disturb."""
    fields = msgspec.msgpack.decode(encode(message))
    assert decode(msgspec.msgpack.encode([*fields, "from the future", {"x": 1}])) == message


def test_missing_trailing_fields_take_their_defaults() -> None:
    """An older peer's shorter message is complete, in nested items too."""
    frame = msgspec.msgpack.encode([5, 7, [[1, 0, b"", 0, 4]]])
    assert decode(frame) == Draft(epoch=7, items=[DraftItem(1, 0, b"", 0, 4)])
    assert decode(msgspec.msgpack.encode([8, 5])) == Ping(5)
    assert decode(msgspec.msgpack.encode([9, 5])) == Pong(5, free_sessions=-1, clock_us=0)
    assert decode(msgspec.msgpack.encode([9, 5, 3])) == Pong(5, free_sessions=3, clock_us=0)
    assert decode(msgspec.msgpack.encode([4, 1, "m", "ngram", 2, 3, 4])) == Welcome(1, "m", "ngram", 2, 3, 4)


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    """The size alone decides."""
    with pytest.raises(WireError, match="over the limit"):
        decode(bytes(MAX_FRAME_BYTES + 1))


def draft(**fields: object) -> Draft:
    values = {"session": 1, "base": 0, "tokens": b"", "check": 0, "k": 0, **fields}
    return Draft(epoch=1, items=[DraftItem(**values)])  # type: ignore[arg-type]


def ahead(items: list[DraftedItem], branches: list[list[tuple[int, int, bytes]]]) -> Drafted:
    return Drafted(1, items, branches=branches)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Draft(epoch=1, items=[DraftItem(1, 0, b"", 0, 0)] * (MAX_ITEMS + 1)), "length <= 4096"),
        (draft(tokens=b"abc"), "multiple of 4"),
        (draft(tokens=bytes(4 * (1 << 19) + 4)), "length <= 2097152"),
        (draft(session=-1), ">= 0"),
        (draft(base=-1), ">= 0"),
        (draft(limit=1 << 31), "<= 2147483647"),
        (draft(check=1 << 32), "<= 4294967295"),
        (draft(check=-1), ">= 0"),
        (draft(k=MAX_DRAFT_LENGTH + 1), "<= 16"),
        (draft(k=-1), ">= 0"),
        (draft(base=(1 << 31) - 1, tokens=bytes(4)), "tokens long"),
        (draft(sampling=Sampling(temperature=math.nan)), "sampling"),
        (draft(sampling=Sampling(temperature=1e-300)), "sampling"),
        (draft(sampling=Sampling(top_k=1 << 63)), "sampling"),
        (draft(sampling=Sampling(presence_penalty=1e300)), "sampling"),
        (draft(sampling=Sampling(repetition_penalty=1e300)), "sampling"),
        (draft(sampling=Sampling(temperature=-1)), "sampling"),
        (draft(sampling=Sampling(top_p=0)), "sampling"),
        (draft(sampling=Sampling(repetition_penalty=0)), "sampling"),
        (draft(sampling=Sampling(logit_bias={1: math.inf})), "sampling"),
        (draft(sampling=Sampling(logit_bias=dict.fromkeys(range(5000), 1.0))), "sampling"),
        (Draft(1, 5 * draft(sampling=Sampling(logit_bias=dict.fromkeys(range(4000), 1.0))).items), "20000 logit"),
        (Drafted(epoch=1, items=[DraftedItem(1, 0, 0, 0, bytes(4 * MAX_DRAFT_LENGTH + 4))]), "length <= 64"),
        (Drafted(epoch=1, items=[DraftedItem(1, 0, -1, 0)]), ">= 0"),
        (ahead([], [[]]), "branches of 1 sessions in a Drafted of 0"),
        (ahead([DraftedItem(1, 0, 0, 0, bytes(4))], [[]]), "branches come alone"),
        (ahead([DraftedItem(1, 0, 0, 0)], [[(1, 2, b"abc")]]), "of 4 bytes each"),
        (ahead([DraftedItem(1, 0, 0, 0)], [[(17, 2, b"")]]), "<= 16"),
        (ahead([DraftedItem(1, 0, 0, 0)], [[(1, 1 << 32, b"")]]), "<= 4294967295"),
        (ahead([DraftedItem(1, 0, 0, 0)], [[(1, 2, bytes(68))]]), "length <= 64"),
        (ahead([DraftedItem(1, 0, 0, 0)], [[(1, 2, b"")] * 17]), "length <= 16"),
        (ahead([DraftedItem(1, 0, 0, 0)] * 300, [[(1, 2, b"")] * 16] * 300), "4800 branches"),
        (draft(branches=17), "<= 16"),
        (draft(taken=17), "<= 16"),
        (Close(epoch=1, sessions=[3, -3]), ">= 0"),
        (Ping(time_us=1, sessions=list(range(70_000))), "length <= 65536"),
    ],
)
def test_values_outside_their_limits_are_refused(message: Message, reason: str) -> None:
    """Each limit is checked at decoding, so nobody behind it has to."""
    with pytest.raises(WireError, match=reason):
        decode(encode(message))


@given(st.lists(u32, max_size=50), st.integers(0, 50))
def test_the_check_can_be_continued(ids: list[int], cut: int) -> None:
    """Hashing in two parts equals hashing at once; packing is 4 bytes, little-endian, an id."""
    assert check_hash(ids[cut:], check_hash(ids[:cut])) == check_hash(ids)
    assert list(unpack_tokens(pack_tokens(ids))) == ids
    assert pack_tokens([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_a_coupled_round_is_small() -> None:
    """A normal round costs under 100 bytes a session each way."""
    up = Draft(2**62, [DraftItem(2**40, 1500, pack_tokens([150_000] * 5), 2**32 - 1, 4)])
    down = Drafted(2**62, [DraftedItem(2**40, 0, 1505, 1505, pack_tokens([150_000] * 4))], 1000, 8000)
    assert len(encode(up)) < 100
    assert len(encode(down)) < 100
