"""Both sides prove who they are, or are refused with a code and a sentence that names both."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import HandshakeRefused
from paceline.core.vocabulary import VocabularyIdentity
from paceline.topology.handshake import DrafterHandshake, Identity, TargetHandshake, refusal_frame
from paceline.topology.wire import Challenge, Error, Goodbye, Hello, Message, Ping, Prove, Welcome, decode, encode

WORDS = VocabularyIdentity("aa" * 16, 1000, b"one.two.thr.for.")
TARGET = Identity("star", "chat-a", key=b"secret", vocabulary=WORDS, software="paceline 0.1")
DRAFTER = Identity(
    "star", "orin-1", key=b"secret", vocabulary=WORDS, model="tiny", strategy="draft_model", max_sessions=16
)


def shake(target: TargetHandshake, drafter: DrafterHandshake) -> list[bytes]:
    """Carries frames between the two until the target is welcome; returns all of them."""
    frames = [target.start()]
    while True:
        frames.append(drafter.receive(frames[-1]))
        answer = target.receive(frames[-1])
        if answer is None:
            return frames
        frames.append(answer)


def refused(target: Identity, drafter: Identity) -> HandshakeRefused:
    """Why the handshake of these two fails."""
    with pytest.raises(HandshakeRefused) as caught:
        shake(TargetHandshake(target), DrafterHandshake(drafter))
    return caught.value


@pytest.mark.parametrize("key", [b"secret", b""])
def test_two_of_one_deployment_meet(key: bytes) -> None:
    """With the same key, or with none at both ends, each learns who the other is."""
    target, drafter = TargetHandshake(replace(TARGET, key=key)), DrafterHandshake(replace(DRAFTER, key=key))
    shake(target, drafter)
    assert drafter.done and drafter.hello is not None and target.welcome is not None
    assert (drafter.hello.target, drafter.hello.tokenizer) == ("chat-a", WORDS.fingerprint)
    assert (target.welcome.drafter, target.welcome.model, target.welcome.epoch) == ("orin-1", "tiny", DRAFTER.epoch)


def test_a_wrong_key_learns_nothing() -> None:
    """Every other difference is hidden behind a wrong key, and no frame names the drafter's side."""
    stranger = replace(TARGET, key=b"guess", deployment="other", major=9, vocabulary=None)
    target, drafter = TargetHandshake(stranger), DrafterHandshake(DRAFTER)
    challenge = drafter.receive(target.start())
    prove = target.receive(challenge)
    assert prove is not None
    with pytest.raises(HandshakeRefused) as caught:
        drafter.receive(prove)
    assert caught.value.code == "unauthenticated"
    assert decode(refusal_frame(caught.value)) == Error("unauthenticated", "")
    for secret in (b"orin-1", b"star", b"tiny", WORDS.fingerprint.encode()):
        assert secret not in challenge + refusal_frame(caught.value)


def test_a_key_against_none_is_refused() -> None:
    """An open drafter does not open a keyed deployment, nor the other way round."""
    assert refused(TARGET, replace(DRAFTER, key=b"")).code == "unauthenticated"
    assert refused(replace(TARGET, key=b""), DRAFTER).code == "unauthenticated"


def test_a_drafter_without_the_key_is_refused() -> None:
    """A fake drafter cannot make the last proof from what it has seen."""
    target = TargetHandshake(TARGET)
    target.start()
    target.receive(encode(Challenge(bytes(32))))
    fake = Welcome(1, "m", "ngram", 1, 1, 1, major=1, deployment="star", drafter="orin-1", proof=bytes(32))
    with pytest.raises(HandshakeRefused) as caught:
        target.receive(encode(fake))
    assert caught.value.code == "unauthenticated"


def test_a_replayed_handshake_is_refused() -> None:
    """Recorded frames prove nothing to another run, at either side: the nonces are fresh."""
    recorded = shake(TargetHandshake(TARGET), DrafterHandshake(DRAFTER))
    drafter = DrafterHandshake(DRAFTER)
    drafter.receive(recorded[0])
    with pytest.raises(HandshakeRefused) as caught:
        drafter.receive(recorded[2])
    assert caught.value.code == "unauthenticated"
    target = TargetHandshake(TARGET)
    target.start()
    target.receive(recorded[1])
    with pytest.raises(HandshakeRefused) as caught:
        target.receive(recorded[3])
    assert caught.value.code == "unauthenticated"


def test_a_reflected_proof_is_refused() -> None:
    """A target's own proof, sent back to it as the drafter's, is not taken."""
    target = TargetHandshake(TARGET)
    target.start()
    frame = target.receive(encode(Challenge(bytes(32))))
    assert frame is not None
    prove = decode(frame)
    assert isinstance(prove, Prove)
    mirror = Welcome(1, "m", "ngram", 1, 1, 1, major=1, deployment="star", drafter="chat-a", proof=prove.proof)
    with pytest.raises(HandshakeRefused) as caught:
        target.receive(encode(mirror))
    assert caught.value.code == "unauthenticated"


def test_a_changed_hello_breaks_the_proof() -> None:
    """Who alters the names on the way is noticed."""
    target, drafter = TargetHandshake(TARGET), DrafterHandshake(DRAFTER)
    hello = target.start().replace(b"chat-a", b"chat-b")
    prove = target.receive(drafter.receive(hello))
    assert prove is not None
    with pytest.raises(HandshakeRefused, match="'chat-b' does not know the deployment key"):
        drafter.receive(prove)


@pytest.mark.parametrize("field", [f for f in Welcome.__struct_fields__ if f not in ("proof", "software")])
def test_nothing_that_welcome_says_can_be_changed_on_the_way(field: str) -> None:
    """Names, limits, capabilities: the proof covers all but the drafter's word on its release."""
    target, drafter = TargetHandshake(TARGET), DrafterHandshake(DRAFTER)
    prove = target.receive(drafter.receive(target.start()))
    assert prove is not None
    welcome = decode(drafter.receive(prove))
    assert isinstance(welcome, Welcome)
    value = getattr(welcome, field)
    changed = [*value, "x"] if isinstance(value, list) else value + ("x" if isinstance(value, str) else 1)
    with pytest.raises(HandshakeRefused) as caught:
        target.receive(encode(msgspec.structs.replace(welcome, **{field: changed})))
    assert caught.value.code == "unauthenticated"


def test_another_deployment_is_named() -> None:
    """The same key in two deployments: both are named."""
    refusal = refused(replace(TARGET, deployment="lab"), DRAFTER)
    assert refusal.code == "deployment"
    assert "'orin-1' belongs to deployment 'star' and target 'chat-a' to 'lab'" in str(refusal)
    assert decode(refusal_frame(refusal)) == Error("deployment", str(refusal))


def test_another_major_version_is_named() -> None:
    """Both protocol versions appear in the sentence; another minor version is welcome."""
    refusal = refused(replace(TARGET, major=2), DRAFTER)
    assert refusal.code == "protocol"
    assert "drafter 'orin-1' speaks protocol 1 and target 'chat-a' speaks 2" in str(refusal)
    shake(TargetHandshake(replace(TARGET, minor=7)), DrafterHandshake(DRAFTER))


def test_the_wrong_drafter_at_an_address_is_named() -> None:
    """A target that expects a name does not take another."""
    with pytest.raises(HandshakeRefused, match="expects drafter 'orin-2', here answers 'orin-1'"):
        shake(TargetHandshake(TARGET, drafter="orin-2"), DrafterHandshake(DRAFTER))


@pytest.mark.parametrize(
    ("theirs", "code", "sentence"),
    [
        (VocabularyIdentity("bb", 1000, b"one.TWO.thr.for."), "tokenizer", "first in ids 256..511"),
        (VocabularyIdentity("bb", 1000, b"one.two.thr.FOR."), "tokenizer", "first in ids 768..999"),
        (VocabularyIdentity("bb", 1030, b"one.two.thr.for.fiv."), "tokenizer", "ids 1000..1029 exist"),
        (VocabularyIdentity("bb", 1000, WORDS.block_hashes), "tokenizer", "special tokens"),
        (VocabularyIdentity("bb", 900, b"odd"), "tokenizer", "ids 900..999 exist"),
        (None, "vocabulary", "vocabularies of 1000 and 0 ids"),
    ],
)
def test_another_tokenizer_is_named_with_its_first_difference(
    theirs: VocabularyIdentity | None, code: str, sentence: str
) -> None:
    """The sentence has both names and the first range of ids that differs."""
    refusal = refused(replace(TARGET, vocabulary=theirs), DRAFTER)
    assert refusal.code == code
    assert sentence in str(refusal) and "'orin-1'" in str(refusal) and "'chat-a'" in str(refusal)


def test_a_drafter_without_a_tokenizer_accepts_any() -> None:
    """n-grams are copied from the target's own ids."""
    shake(TargetHandshake(TARGET), DrafterHandshake(replace(DRAFTER, vocabulary=None, strategy="ngram")))


def test_ids_without_a_tokenizer_compare_their_size() -> None:
    """Emulated models have ids alone: equal sizes meet, others do not."""
    bare = VocabularyIdentity("", 512, b"")
    shake(TargetHandshake(replace(TARGET, vocabulary=bare)), DrafterHandshake(replace(DRAFTER, vocabulary=bare)))
    other = replace(DRAFTER, vocabulary=VocabularyIdentity("", 256, b""))
    assert refused(replace(TARGET, vocabulary=bare), other).code == "vocabulary"


def test_a_refusal_reaches_the_other_side_in_words_fit_for_a_log() -> None:
    """The peer's Error becomes our HandshakeRefused, without its control characters."""
    target = TargetHandshake(TARGET)
    target.start()
    with pytest.raises(HandshakeRefused, match=r"line one\?line two") as caught:
        target.receive(encode(Error("tokenizer", "line one\nline two" + "x" * 1000)))
    assert caught.value.code == "tokenizer" and len(str(caught.value)) <= 300


def test_the_key_is_not_shown() -> None:
    """An identity in a log line keeps its key to itself."""
    assert "secret" not in repr(TARGET)


nonce = st.binary(min_size=32, max_size=32) | st.binary(max_size=40)
handshake_messages = st.one_of(
    st.builds(Hello, st.integers(0, 3), st.just(0), st.text(), st.text(), nonce, st.text(), st.integers(0, 9)),
    st.builds(Challenge, nonce),
    st.builds(Prove, nonce),
    st.builds(Welcome, st.integers(0, 9), *[st.text()] * 2, *[st.integers(0, 9)] * 3, proof=nonce),
    st.builds(Error, st.text(), st.text()),
    st.builds(Goodbye, st.text()),
    st.builds(Ping, st.integers(0, 9)),
)


@given(st.lists(handshake_messages.map(encode) | st.binary(max_size=50), max_size=6))
def test_frames_in_any_order_are_refused_and_never_crash(frames: list[bytes]) -> None:
    """Nobody gets in without the key; all that is raised is HandshakeRefused."""
    target, drafter = TargetHandshake(TARGET), DrafterHandshake(DRAFTER)
    target.start()
    for receive in (drafter.receive, target.receive):
        try:
            for frame in frames:
                receive(frame)
        except HandshakeRefused as refusal:
            assert isinstance(decode(refusal_frame(refusal)), Error)
    assert not drafter.done and target.welcome is None


@given(st.permutations(range(4)), st.data())
def test_genuine_frames_in_a_wrong_order_are_refused(order: list[int], data: st.DataObject) -> None:
    """Even with the right key, only the one order opens the link, and only once."""
    genuine: list[Message] = [decode(frame) for frame in shake(TargetHandshake(TARGET), DrafterHandshake(DRAFTER))]
    drafter = DrafterHandshake(DRAFTER)
    with pytest.raises(HandshakeRefused):
        for index in order:
            drafter.receive(encode(genuine[index]))


@pytest.mark.parametrize("name", ["", "x" * 129, "two\nlines"])
def test_a_drafter_with_a_name_that_is_none_is_refused(name: str) -> None:
    """Names go into logs and status files: 1 to 128 printable characters, also where any drafter may answer."""
    refusal = refused(TARGET, replace(DRAFTER, name=name))
    assert refusal.code == "malformed"
