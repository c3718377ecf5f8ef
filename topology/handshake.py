"""Who is there: Hello → Challenge → Prove → Welcome, as two small state machines without I/O.

Each proof is an HMAC-SHA256 under the deployment key over the raw frames exchanged so far, which hold both
nonces, the names, the deployment, the versions and the tokenizer fingerprint, and over what binds them to
their channel (the certificate shown in TLS). The nonces are fresh, so a
recorded handshake proves nothing; the proofs carry the role, so one side's cannot be sent back to it. The
target proves itself first, and the drafter tells a peer that cannot only `unauthenticated`.
Without a key both sides use an empty one: that is for loopback, where the operating system is the guard.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

import msgspec

from paceline.core.errors import HandshakeRefused, WireError
from paceline.core.vocabulary import BLOCK_IDS, VocabularyIdentity
from paceline.topology.wire import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Challenge,
    Error,
    Goodbye,
    Hello,
    Message,
    Prove,
    Welcome,
    decode,
    encode,
)

REJECTION = "rejection"  # the capability of a drafter that can draw from weights and send them along
DRAFT_AHEAD = "draft_ahead"  # the capability of a drafter that drafts for several outcomes of a round
PROBE = "probe"  # the capability of who only measures the link: no vocabulary to compare, nothing to draft for
NONCE_BYTES = 32
MAX_NAME_LENGTH = 128


def new_epoch() -> int:
    """A random name for one run of a drafter, 0 < epoch < 2**63."""
    return secrets.randbits(63) | 1


@dataclass(frozen=True)
class Identity:
    """What a process says of itself. The second half concerns drafters only."""

    deployment: str
    name: str
    key: bytes = field(default=b"", repr=False)
    vocabulary: VocabularyIdentity | None = None  # None: no tokenizer of its own (a drafter that copies n-grams)
    capabilities: tuple[str, ...] = ("coupled", REJECTION)
    software: str = ""
    major: int = PROTOCOL_MAJOR
    minor: int = PROTOCOL_MINOR
    model: str = ""
    strategy: str = ""
    max_sessions: int = 0
    max_context: int = 0
    max_draft_length: int = 0
    max_batch: int = 0
    max_messages: int = 0
    epoch: int = field(default_factory=new_epoch)


class TargetHandshake:
    """The target's side: send `start()`, then what `receive` returns, until `welcome` is there."""

    def __init__(self, identity: Identity, drafter: str | None = None, binding: bytes = b"") -> None:
        """`drafter`: the name that must answer; None accepts any that knows the key. `binding`: the channel's."""
        self.identity = identity
        self._binding = binding
        self.welcome: Welcome | None = None
        self._expected = drafter
        self._frames: list[bytes] = []

    def start(self) -> bytes:
        """The Hello frame."""
        own = self.identity
        vocabulary = own.vocabulary or VocabularyIdentity("", 0, b"")
        hello = Hello(
            major=own.major,
            minor=own.minor,
            deployment=own.deployment,
            target=own.name,
            nonce=secrets.token_bytes(NONCE_BYTES),
            tokenizer=vocabulary.fingerprint,
            vocabulary_size=vocabulary.size,
            capabilities=list(own.capabilities),
            tokenizer_blocks=vocabulary.block_hashes,
            software=own.software,
        )
        self._frames = [encode(hello)]
        return self._frames[0]

    def receive(self, frame: bytes) -> bytes | None:
        """The frame to answer with, None once `welcome` is set; raises HandshakeRefused."""
        message = _decoded(frame)
        if isinstance(message, (Error, Goodbye)):
            raise HandshakeRefused(printable(message.code), printable(message.message) or "refused by the drafter")
        if isinstance(message, Challenge) and len(self._frames) == 1:
            _check_nonce(message.nonce)
            self._frames.append(frame)
            prove = encode(Prove(_proof(self.identity.key, b"target", self._binding, *self._frames)))
            self._frames.append(prove)
            return prove
        if isinstance(message, Welcome) and len(self._frames) == 3 and self.welcome is None:
            self._check(message)
            self.welcome = message
            return None
        raise _unexpected(message, "drafter")

    @property
    def frame_key(self) -> bytes:
        """What only these two ends know, once welcomed: see Channel.secure."""
        return _proof(self.identity.key, b"frames", self._binding, *self._frames)

    def _check(self, welcome: Welcome) -> None:
        own = self.identity
        if not hmac.compare_digest(welcome.proof, _drafter_proof(own.key, self._binding, self._frames, welcome)):
            raise HandshakeRefused(
                "unauthenticated",
                f"the drafter {printable(welcome.drafter)!r} does not know the deployment key of target {own.name!r}",
            )
        if not 0 < len(welcome.drafter) <= MAX_NAME_LENGTH or not welcome.drafter.isprintable():
            raise HandshakeRefused("malformed", f"a drafter's name is 1 to {MAX_NAME_LENGTH} printable characters")
        if self._expected is not None and welcome.drafter != self._expected:
            raise HandshakeRefused(
                "name", f"target {own.name!r} expects drafter {self._expected!r}, here answers {welcome.drafter!r}"
            )
        _check_common(f"target {own.name!r}", own, f"drafter {welcome.drafter!r}", welcome.major, welcome.deployment)


class DrafterHandshake:
    """The drafter's side: send what `receive` returns; the link is up once `done`."""

    def __init__(self, identity: Identity, binding: bytes = b"") -> None:
        self.identity = identity
        self._binding = binding
        self.hello: Hello | None = None
        self.done = False
        self._frames: list[bytes] = []

    def receive(self, frame: bytes) -> bytes:
        """The Challenge, then the Welcome frame to answer with; raises HandshakeRefused."""
        message = _decoded(frame)
        if isinstance(message, (Error, Goodbye)):
            raise HandshakeRefused(printable(message.code), printable(message.message) or "refused by the target")
        if isinstance(message, Hello) and self.hello is None:
            return self._challenge(frame, message)
        if isinstance(message, Prove) and self.hello is not None and not self.done:
            return self._welcome(frame, message, self.hello)
        raise _unexpected(message, "target")

    @property
    def probe(self) -> bool:
        """Whether the peer only wants to measure."""
        return self.hello is not None and PROBE in self.hello.capabilities

    def _challenge(self, frame: bytes, hello: Hello) -> bytes:
        _check_nonce(hello.nonce)
        if not 0 < len(hello.target) <= MAX_NAME_LENGTH or not hello.target.isprintable():
            raise HandshakeRefused("malformed", f"a target's name is 1 to {MAX_NAME_LENGTH} printable characters")
        self.hello = hello
        self._frames = [frame, encode(Challenge(secrets.token_bytes(NONCE_BYTES)))]
        return self._frames[1]

    def _welcome(self, frame: bytes, prove: Prove, hello: Hello) -> bytes:
        own = self.identity
        if not hmac.compare_digest(prove.proof, _proof(own.key, b"target", self._binding, *self._frames)):
            raise HandshakeRefused(
                "unauthenticated", f"target {hello.target!r} does not know the deployment key of drafter {own.name!r}"
            )
        _check_common(f"drafter {own.name!r}", own, f"target {hello.target!r}", hello.major, hello.deployment)
        if own.vocabulary is not None and not self.probe:
            _check_vocabulary(own.name, own.vocabulary, hello)
        self._frames.append(frame)
        welcome = Welcome(
            epoch=own.epoch,
            model=own.model,
            strategy=own.strategy,
            max_sessions=own.max_sessions,
            max_context=own.max_context,
            max_draft_length=own.max_draft_length,
            max_batch=own.max_batch,
            max_messages=own.max_messages,
            capabilities=list(own.capabilities),
            software=own.software,
            major=own.major,
            minor=own.minor,
            deployment=own.deployment,
            drafter=own.name,
        )
        self.done = True
        proof = _drafter_proof(own.key, self._binding, self._frames, welcome)
        return encode(msgspec.structs.replace(welcome, proof=proof))

    @property
    def frame_key(self) -> bytes:
        """What only these two ends know, once `done`: see Channel.secure."""
        return _proof(self.identity.key, b"frames", self._binding, *self._frames)


def refusal_frame(refusal: HandshakeRefused) -> bytes:
    """The Error that tells the peer; one that is not authenticated learns the code and nothing else."""
    secret = refusal.code in ("unauthenticated", "malformed", "unexpected")
    return encode(Error(refusal.code, "" if secret else str(refusal)))


def printable(text: str, limit: int = 300) -> str:
    """A peer's words made fit for a log line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


def _decoded(frame: bytes) -> Message:
    try:
        return decode(frame)
    except WireError as error:
        raise HandshakeRefused("malformed", str(error)) from None


def _unexpected(message: Message, role: str) -> HandshakeRefused:
    return HandshakeRefused("unexpected", f"the {role} sent {type(message).__name__} out of turn in the handshake")


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise HandshakeRefused("malformed", f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")


def _proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the role and the parts, each with its length before it."""
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in (role, *parts))
    return hmac.digest(key, b"paceline handshake\0" + framed, "sha256")


def _drafter_proof(key: bytes, binding: bytes, frames: list[bytes], welcome: Welcome) -> bytes:
    """What Welcome says of the drafter is covered by its proof, beside the three frames before it."""
    names = [welcome.drafter, welcome.deployment, welcome.model, welcome.strategy, *welcome.capabilities]
    limits = (welcome.max_sessions, welcome.max_context, welcome.max_draft_length, welcome.max_batch)
    numbers = [welcome.epoch, welcome.major, welcome.minor, *limits, welcome.max_messages]
    said = " ".join(map(str, numbers)).encode()
    return _proof(key, b"drafter", binding, *frames, said, *(name.encode(errors="replace") for name in names))


def _check_common(own_name: str, own: Identity, peer_name: str, major: int, deployment: str) -> None:
    if major != own.major:
        raise HandshakeRefused(
            "protocol", f"{own_name} speaks protocol {own.major} and {peer_name} speaks {major}: run the same release"
        )
    if deployment != own.deployment:
        theirs = printable(deployment, MAX_NAME_LENGTH)
        raise HandshakeRefused(
            "deployment", f"{own_name} belongs to deployment {own.deployment!r} and {peer_name} to {theirs!r}"
        )


def _check_vocabulary(drafter: str, own: VocabularyIdentity, hello: Hello) -> None:
    """A padded tail is no difference: fingerprint and size count what the tokenizer can produce."""
    both = f"drafter {drafter!r} and target {hello.target!r}"
    if hello.vocabulary_size != own.size and not (own.fingerprint and hello.tokenizer):
        raise HandshakeRefused(
            "vocabulary", f"{both} have vocabularies of {own.size} and {hello.vocabulary_size} ids: use one family"
        )
    if hello.tokenizer != own.fingerprint:
        raise HandshakeRefused(
            "tokenizer", f"{both} have different tokenizers ({_first_difference(own, hello)}): use one family"
        )


def _first_difference(own: VocabularyIdentity, hello: Hello) -> str:
    """The first range of ids whose tokens differ, from the hashes of blocks of 256 ids."""
    ours, theirs = own.block_hashes, hello.tokenizer_blocks
    for start in range(0, min(len(ours), len(theirs)) & ~3, 4):
        if ours[start : start + 4] != theirs[start : start + 4]:
            first = start // 4 * BLOCK_IDS
            last = min(first + BLOCK_IDS, max(own.size, hello.vocabulary_size)) - 1
            return f"first in ids {first}..{last}"
    if own.size != hello.vocabulary_size:
        low, high = sorted((own.size, hello.vocabulary_size))
        return f"ids {low}..{high - 1} exist on one side only"
    return "in their special tokens"
