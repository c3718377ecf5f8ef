"""Marks, counters and parts of payloads: what is the peer's and new comes out, nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import WireError
from paceline.topology.links import mqtt_presence as presence
from paceline.topology.links.mqtt_frames import (
    DATA,
    HEADER,
    MAX_ASSEMBLIES,
    PART,
    SECURED,
    WINDOW,
    Assembler,
    Opened,
    Opener,
    Sealer,
    cut,
)
from paceline.topology.links.mqtt_presence import OFFLINE, ONLINE, Presence

KEY = bytes(range(32))
CHANNEL = b"chan"


def ends() -> tuple[Sealer, Opener]:
    return Sealer(CHANNEL, KEY), Opener(CHANNEL, KEY)


def test_the_counter_outlives_its_sixteen_bits() -> None:
    """A month of frames: the low bits wrap, and each frame still comes out once."""
    sealer, opener = ends()
    for number in range(70_000):
        payload = sealer.seal(DATA, number.to_bytes(4, "little"))
        opened = opener.open(payload)
        assert opened is not None and opened.counter == number
        assert opener.open(payload) is None
    assert payload[HEADER.size :] == (69_999).to_bytes(4, "little")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, WINDOW))
def test_whatever_overtakes_within_the_window_comes_out_once(seed: int, width: int) -> None:
    """In any order within the window, with doubles: every frame once, none twice."""
    sealer, opener = ends()
    payloads = [sealer.seal(DATA, bytes([number % 256])) for number in range(2 * WINDOW)]
    shuffle = random.Random(seed)
    for start in range(0, len(payloads), width):
        block = payloads[start : start + width]
        mixed = block + shuffle.choices(block, k=len(block) // 2)
        shuffle.shuffle(mixed)
        assert sum(opener.open(payload) is not None for payload in mixed) == len(block)


def test_what_is_older_than_the_window_is_dropped() -> None:
    """Nothing is remembered of it, so it may be a replay."""
    sealer, opener = ends()
    first, *others = [sealer.seal(DATA) for _ in range(WINDOW + 1)]
    assert all(opener.open(payload) is not None for payload in others)
    assert opener.open(first) is None


@given(st.integers(0, HEADER.size + 4), st.integers(1, 255))
def test_one_changed_byte_is_noticed(place: int, change: int) -> None:
    """In the header or in the frame, whatever the change."""
    sealer, opener = ends()
    payload = bytearray(sealer.seal(DATA, b"hello"))
    payload[place] ^= change
    assert opener.open(bytes(payload)) is None
    payload[place] ^= change
    assert opener.open(bytes(payload)) == Opened(DATA, 0, b"hello")


@given(st.binary(max_size=64))
def test_bytes_of_a_stranger_come_to_nothing(payload: bytes) -> None:
    """Whatever they are, and the next genuine frame comes out."""
    sealer, opener = ends()
    assert opener.open(payload) is None
    assert opener.open(sealer.seal(DATA)) is not None


def test_marks_of_the_two_stages_are_not_taken_for_one_another() -> None:
    """A payload from before the handshake's end is none after it, even under one key."""
    before, after = Sealer(CHANNEL, KEY), Opener(CHANNEL, KEY, SECURED)
    assert after.open(before.seal(DATA)) is None
    assert after.open(Sealer(CHANNEL, KEY, SECURED).seal(DATA)) == Opened(DATA, 0, b"")


@given(st.binary(min_size=1, max_size=5000), st.integers(1, 700), st.integers(0, 2**32))
def test_parts_make_the_frame_in_any_order(frame: bytes, size: int, seed: int) -> None:
    """Cut anywhere, mixed up: the frame is whole with its last part."""
    bodies = cut(frame, size)
    parts = [Opened(PART, 40 + index, body) for index, body in enumerate(bodies)]
    random.Random(seed).shuffle(parts)
    assembler = Assembler()
    results = [assembler.add(part, 5000) for part in parts]
    assert results[-1] == frame
    assert results[:-1] == [None] * (len(parts) - 1)


def test_a_lost_part_loses_that_frame_only() -> None:
    """The next frames come out, and the torso does not stay for ever."""
    assembler = Assembler()
    counter = 0
    for number in range(3 * MAX_ASSEMBLIES):
        whole = bytes([number]) * 100
        for index, body in enumerate(cut(whole, 30)):
            frame = assembler.add(Opened(PART, counter, body), 1000) if (number % 2, index) != (0, 1) else None
            counter += 1
        assert frame == (whole if number % 2 else None)
    assert len(assembler._assemblies) <= MAX_ASSEMBLIES


def test_a_frame_over_the_limit_is_not_put_together() -> None:
    """It costs no more than the limit before it is refused."""
    assembler = Assembler()
    with pytest.raises(WireError, match="over the limit of 1000 bytes"):
        for index, body in enumerate(cut(bytes(2000), 100)):
            assembler.add(Opened(PART, index, body), 1000)


def test_presence_is_believed_from_who_knows_the_key_for_that_node() -> None:
    """A changed state, another node's word and another key's are all nothing."""
    word = presence.encode(Presence(ONLINE, b"instance"), KEY, "p/d/presence/a")
    assert presence.decode(word, KEY, "p/d/presence/a") == Presence(ONLINE, b"instance")
    assert presence.decode(word.replace(b"online", b"offline"), KEY, "p/d/presence/a") is None
    assert presence.decode(word, KEY, "p/d/presence/b") is None
    assert presence.decode(word, b"other", "p/d/presence/a") is None
    assert presence.encode(Presence(OFFLINE, b"instance"), KEY, "p/d/presence/a") != word


@given(st.binary(max_size=200))
def test_any_bytes_may_be_retained_as_a_presence(payload: bytes) -> None:
    """They are not believed, and nothing breaks."""
    assert presence.decode(payload, KEY, "p/d/presence/a") is None
