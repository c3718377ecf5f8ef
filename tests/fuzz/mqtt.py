"""MQTT payloads: a broker that drops, doubles, swaps and forges; a peer that has the key and cuts frames wrongly."""

from __future__ import annotations

from paceline.topology.links.mqtt_frames import (
    DATA,
    HEADER,
    MAX_ASSEMBLIES,
    PART,
    PART_HEADER,
    SECURED,
    Assembler,
    Opener,
    Sealer,
    cut,
)
from paceline.topology.links.mqtt_presence import decode
from paceline.topology.wire import MAX_FRAME_BYTES

from .supply import Supply

KEY = bytes(range(32))


class Bench:
    """One direction of a channel. heard: every payload that a listener on the topic has seen."""

    def __init__(self, supply: Supply) -> None:
        self.supply = supply
        flags = supply.choose((0, SECURED))
        self.sealer, self.opener = Sealer(b"chan", KEY, flags), Opener(b"chan", KEY, flags)
        self.assembler = Assembler()
        self.sent: dict[bytes, bytes] = {}  # payload → body
        self.frames: list[bytes] = []  # that were cut into parts as they should be
        self.odd_parts = False
        self.taken: set[bytes] = set()

    def play(self) -> None:
        """One thing that happens on the topic."""
        supply = self.supply
        form = supply.below(8)
        if form == 0:
            self._send(DATA, supply.bytes(supply.below(20)))
        elif form == 1:
            self.frames.append(supply.bytes(supply.below(40)))
            for part in cut(self.frames[-1], 1 + supply.below(16)):
                self._send(PART, part)
        elif form == 2:
            self.odd_parts = True
            index, count = supply.number() & 0xFFFF, supply.choose((0, 1, 2, 3, 0xFFFF))
            self._send(PART, PART_HEADER.pack(index if supply.below(2) else index % 4, count) + supply.bytes(2))
        elif form == 3:
            self._send(supply.below(128), supply.bytes(supply.below(6)))
        elif form == 4:
            self.sealer._counter += supply.choose((1, 2, 1022, 1024, 1 << 15, 1 << 16))  # so many were lost
        elif form == 5 and self.sent:
            forged = bytearray(self._heard())
            forged[supply.below(len(forged))] ^= 1 + supply.below(255)
            if bytes(forged) not in self.sent:
                assert self.opener.open(bytes(forged)) is None
        elif form == 6:
            assert self.opener.open(supply.bytes(supply.below(60))) is None
        elif self.sent:
            self._deliver(self._heard())

    def _heard(self) -> bytes:
        """Mostly one of the last."""
        return list(self.sent)[-1 - self.supply.below(min(len(self.sent), 40))]

    def _send(self, kind: int, body: bytes) -> None:
        payload = self.sealer.seal(kind, body)
        self.sent[payload] = body
        if self.supply.below(4):
            self._deliver(payload)

    def _deliver(self, payload: bytes) -> None:
        opened = self.opener.open(payload)
        if opened is None:
            return
        assert payload not in self.taken and opened.body == self.sent[payload] == payload[HEADER.size :]
        self.taken.add(payload)
        if opened.kind == PART:
            frame = self.assembler.add(opened, MAX_FRAME_BYTES)
            assert frame is None or len(frame) <= MAX_FRAME_BYTES
            assert frame is None or self.odd_parts or frame in self.frames
            assert len(self.assembler._assemblies) <= MAX_ASSEMBLIES


def one(data: bytes) -> None:
    """What is opened was sent, once; frames come out whole or not at all; nothing raises, and little is held."""
    supply = Supply(data)
    bench = Bench(supply)
    if supply.below(8) == 0:
        assert decode(supply.bytes(len(data)), KEY, "topic") is None
    while supply.left:
        bench.play()
