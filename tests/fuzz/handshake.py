"""Both handshakes, with somebody on the line who sees every frame, may send any to either end, and has no key."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from paceline.core.errors import HandshakeRefused
from paceline.core.vocabulary import VocabularyIdentity
from paceline.topology.handshake import DrafterHandshake, Identity, TargetHandshake, refusal_frame
from paceline.topology.wire import Challenge, Error, Prove, Welcome, decode, encode

from . import messages, wire
from .supply import Supply

WORDS = VocabularyIdentity("aa" * 16, 1000, b"one.two.thr.for.")
TARGET = Identity("star", "chat-a", key=b"secret", vocabulary=WORDS)
DRAFTER = Identity("star", "orin-1", key=b"secret", vocabulary=WORDS, model="tiny", strategy="draft_model")
HANDSHAKE_FIELDS = [wire.FIELDS[index] for index in (0, 1, 2, 3, 8, 9, 10)]


def one(data: bytes) -> None:
    """The link comes up only when the genuine frames arrive as they were sent."""
    supply = Supply(data)
    binding = supply.choose((b"", b"", b"certificate"))
    target = TargetHandshake(TARGET, supply.choose((None, "orin-1")), binding)
    drafter = DrafterHandshake(replace(DRAFTER, vocabulary=supply.choose((WORDS, None))), binding)
    to_drafter, to_target = [target.start()], list[bytes]()  # what each end really said
    ends = {"drafter", "target"}
    while supply.left and ends:
        end = supply.choose(("drafter", "target"))
        frame = _frame(supply, to_drafter, to_target)
        if end not in ends or frame is None:
            continue
        try:
            answer = (drafter if end == "drafter" else target).receive(frame)
        except HandshakeRefused as refusal:
            assert isinstance(decode(refusal_frame(refusal)), Error)
            ends.discard(end)
            continue
        if answer is not None:
            (to_target if end == "drafter" else to_drafter).append(answer)
        if end == "drafter" and drafter.done and answer is not None and isinstance(decode(answer), Welcome):
            assert frame in to_drafter and isinstance(decode(frame), Prove)
            assert drafter.hello == decode(to_drafter[0])
        if end == "target" and target.welcome is not None:
            assert _proved(frame) in [_proved(genuine) for genuine in to_target]
            assert drafter.done and drafter.frame_key == target.frame_key


def _frame(supply: Supply, to_drafter: list[bytes], to_target: list[bytes]) -> bytes | None:
    """Something heard, something heard and changed, or something made up."""
    form = supply.below(8)
    heard = [*to_drafter, *to_target]
    if form < 4:
        return supply.choose(heard)
    if form == 4:
        changed = bytearray(supply.choose(heard))
        changed[supply.below(len(changed))] ^= 1 + supply.below(255)
        return bytes(changed)
    if form == 5:
        return supply.bytes(supply.below(80))
    if form == 6:
        return encode(supply.choose((Challenge(bytes(32)), Prove(bytes(32)), Prove(heard[0][-32:]))))
    try:
        return msgspec.msgpack.encode(messages.anything(supply, supply.choose(HANDSHAKE_FIELDS)))
    except (msgspec.EncodeError, OverflowError):
        return None


def _proved(frame: bytes) -> tuple[object, ...]:
    """What a Welcome's proof covers of it."""
    welcome = decode(frame)
    if not isinstance(welcome, Welcome):
        return ()
    return (welcome.epoch, welcome.major, welcome.minor, welcome.deployment, welcome.drafter, welcome.proof)
