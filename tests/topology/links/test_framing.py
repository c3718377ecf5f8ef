"""However bytes and parts arrive, frames come out whole and in order, or the channel ends with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import anyio
from hypothesis import given
from hypothesis import strategies as st

from paceline.topology.links.mqtt_frames import PART, PART_HEADER, Assembler, Opened, cut
from paceline.topology.links.tcp_channel import READ_BUFFER_BYTES, TcpChannel
from paceline.topology.wire import MAX_FRAME_BYTES

frames = st.lists(st.binary(max_size=40) | st.integers(0, 3).map(lambda size: bytes(size * 50_000)), max_size=8)


def read(stream: bytes, cuts: Sequence[int]) -> tuple[list[bytes], TcpChannel]:
    """What a channel makes of a stream that is read in such pieces, and the channel."""
    got: list[bytes] = []

    async def feed() -> TcpChannel:
        channel = TcpChannel()
        channel.receive(got.append, lambda reason: None)
        edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
        for start, end in pairwise(edges):
            while start < end:
                room = channel.get_buffer(-1)
                size = min(len(room), end - start)
                room[:size] = stream[start : start + size]
                channel.buffer_updated(size)
                start += size
        return channel

    return got, anyio.run(feed)


def framed(payloads: Sequence[bytes]) -> bytes:
    return b"".join(len(payload).to_bytes(4, "little") + payload for payload in payloads)


@given(frames, st.lists(st.integers(0, 10**6), max_size=12))
def test_a_stream_may_be_cut_anywhere(payloads: list[bytes], cuts: list[int]) -> None:
    """Every frame comes out as it was sent, and nothing is held afterwards."""
    got, channel = read(framed(payloads), cuts)
    assert got == payloads
    assert len(channel._buffer) <= 4 * READ_BUFFER_BYTES


@given(frames, st.integers(MAX_FRAME_BYTES + 1, 2**32 - 1), st.binary(max_size=60), st.lists(st.integers(0, 10**6)))
def test_what_follows_a_length_over_the_limit_is_not_read(
    payloads: list[bytes], length: int, rest: bytes, cuts: list[int]
) -> None:
    """Frames before it arrive, none after it, and the channel ends."""
    got, channel = read(framed(payloads) + length.to_bytes(4, "little") + rest, cuts)
    assert got == payloads
    assert channel._deaf and "over the limit" in (channel._reason or "")


@given(st.binary(max_size=200), st.lists(st.integers(0, 10**6), max_size=6))
def test_any_stream_gives_frames_or_waits(stream: bytes, cuts: list[int]) -> None:
    """What comes out is a beginning of what went in, each frame behind its length."""
    got, _ = read(stream, cuts)
    assert stream.startswith(framed(got))


@given(st.binary(min_size=1, max_size=60), st.integers(1, 20), st.randoms())
def test_parts_come_in_any_order(frame: bytes, size: int, order: Random) -> None:
    """A frame that a broker would not take whole is put together from its parts, once."""
    parts = list(enumerate(cut(frame, size), start=70))
    order.shuffle(parts)
    assembler = Assembler()
    got = [assembler.add(Opened(PART, counter, body), MAX_FRAME_BYTES) for counter, body in parts]
    assert got[:-1] == [None] * (len(parts) - 1) and got[-1] == frame


def test_parts_that_disagree_on_their_number_make_no_frame() -> None:
    """A peer that says one of two after it said three of three loses that frame; nothing raises."""
    assembler = Assembler()
    for index, count in ((2, 3), (0, 2), (2, 3)):
        body = PART_HEADER.pack(index, count) + b"x"
        assert assembler.add(Opened(PART, 40 + index, body), MAX_FRAME_BYTES) is None
