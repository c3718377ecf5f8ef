"""The messages between a target and its drafter, and nothing else that crosses the wire.

Every frame is one msgpack array: a tag, then the fields in order. Structs grow only at the end, so a
newer peer's extra fields are ignored and an older peer's missing ones take their defaults. Token ids
travel as packed little-endian u32. `decode` turns every byte sequence into a message or a `WireError`.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Annotated

import msgspec

from paceline.core.errors import WireError
from paceline.core.sampling import Sampling
from paceline.topology.log_probs import check_log_probs
from paceline.topology.weights import check_weights

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
MAX_FRAME_BYTES = 4 << 20
MAX_ITEMS = 4096
MAX_SESSIONS_LISTED = 1 << 16  # in one Close or Ping
MAX_LOGIT_BIAS = 4096  # of a session
MAX_BIASES_A_FRAME = 4 * MAX_LOGIT_BIAS  # each takes ten times its bytes in memory
SAMPLING_LIMIT = 1e9  # of temperature, penalties and biases, and of the inverse of the first two
MAX_POSITION = 1 << 31
MAX_TOKENS_PER_ITEM = 1 << 19
MAX_DRAFT_LENGTH = 16
MAX_BRANCHES = 16  # of a session in one Drafted

# Bounds that the decoder itself holds.
SessionId = Annotated[int, msgspec.Meta(ge=0)]
Position = Annotated[int, msgspec.Meta(ge=0, lt=MAX_POSITION)]
DraftLength = Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFT_LENGTH)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Tokens = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS_PER_ITEM)]
Proposal = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_DRAFT_LENGTH)]
Branch = tuple[DraftLength, U32, Proposal]  # accepted, next, tokens
Branches = Annotated[list[Branch], msgspec.Meta(max_length=MAX_BRANCHES)]
SessionIds = Annotated[list[SessionId], msgspec.Meta(max_length=MAX_SESSIONS_LISTED)]


class Status(IntEnum):
    """What a drafter says of one session."""

    OK = 0  # tokens follow, from `position` on
    WARMING = 1  # it is still reading what was committed; do not wait for it
    UNKNOWN = 2  # it lacks the tokens before `base`: send again from `held`
    FULL = 3  # no room; ask again after `retry_after_ms`
    BEYOND = 4  # past the drafter's context window: no more drafts for this session


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


# Hello, Challenge and Prove keep their fields in every major version: two programs can always tell each
# other, once authenticated, that they speak different ones.


class Hello(_Message, tag=1, frozen=True):
    """T→D, first on a link. `nonce` is 32 random bytes."""

    major: int
    minor: int
    deployment: str
    target: str
    nonce: bytes
    tokenizer: str  # fingerprint, hex
    vocabulary_size: int
    capabilities: list[str] = []
    tokenizer_blocks: bytes = b""  # 4 bytes a block of ids, to name the first range that differs
    software: str = ""


class Challenge(_Message, tag=2, frozen=True):
    """D→T: the drafter's 32 random bytes; it says no more to a target that has proved nothing yet."""

    nonce: bytes


class Prove(_Message, tag=3, frozen=True):
    """T→D: the target's proof that it knows the deployment key (handshake.py)."""

    proof: bytes


class Welcome(_Message, tag=4, frozen=True):
    """D→T: the link is up. `epoch` names this run of the drafter; sessions belong to it."""

    epoch: int
    model: str
    strategy: str
    max_sessions: int
    max_context: int
    max_draft_length: int
    capabilities: list[str] = []
    software: str = ""
    major: int = 0
    minor: int = 0
    deployment: str = ""
    drafter: str = ""
    proof: bytes = b""  # the drafter's, over everything before it
    max_batch: int = 0  # sessions in one draft step; 0: not said
    max_messages: int = 0  # Drafts that are drafted for together; 0: any number


class DraftItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One session of a Draft. `base` committed tokens are known to be held; `tokens` follow them."""

    session: SessionId
    base: Position
    tokens: Tokens
    check: U32  # check_hash of the tokens before base
    k: DraftLength
    sampling: Sampling | None = None  # at open (base 0)
    prompt_length: Position = 0  # at open: how many of the first tokens are prompt
    limit: Position = 0  # at open: the longest this session can become, in tokens
    weights: bool = False  # at open: draw proposals from weights and send those along (`verification: rejection`)
    branches: Annotated[int, msgspec.Meta(ge=0, le=MAX_BRANCHES)] = 0  # outcomes to draft ahead for, k tokens each
    taken: DraftLength = 0  # so many tokens of a branch sent ahead are being verified: only branches are wanted
    log_probs: bool = False  # at open: say how likely proposals are (`verify_budget`)


class Draft(_Message, tag=5, frozen=True):
    """T→D: committed tokens, and how many to propose after them."""

    epoch: int
    items: Annotated[list[DraftItem], msgspec.Meta(max_length=MAX_ITEMS)]
    features: bytes | None = None  # reserved: hidden states for EAGLE
    adapter: str | None = None  # reserved


class DraftedItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One session of a Drafted. `position` is the absolute index of the first proposal."""

    session: SessionId
    status: int
    held: Position
    position: Position
    tokens: Proposal = b""
    retry_after_ms: Position = 0


class Drafted(_Message, tag=6, frozen=True):
    """D→T: proposals, with the time they waited and took.

    With `branches`, a list for each item, it holds no proposals but drafts made ahead: if of those that begin at the
    item's position so many are accepted and `next` comes after them, these tokens are the draft of the next round.
    """

    epoch: int
    items: Annotated[list[DraftedItem], msgspec.Meta(max_length=MAX_ITEMS)]
    queue_us: int = 0
    draft_us: int = 0
    parents: bytes | None = None  # reserved: tree drafts
    log_probs: bytes | None = None  # how likely the drafter found the tokens of all items, see log_probs.py
    weights: bytes | None = None  # what the tokens of all items were drawn from, see weights.py
    branches: Annotated[list[Branches], msgspec.Meta(max_length=MAX_ITEMS)] | None = None


class Close(_Message, tag=7, frozen=True):
    """T→D: these sessions are over, for good."""

    epoch: int
    sessions: SessionIds


class Ping(_Message, tag=8, frozen=True):
    """Both ways, once a second. A target lists its live sessions; the drafter frees all others."""

    time_us: int
    sessions: SessionIds | None = None


class Pong(_Message, tag=9, frozen=True):
    """The answer to a Ping, with its time. A drafter adds how many more sessions it could hold (-1: not said)."""

    time_us: int
    free_sessions: int = -1
    clock_us: int = 0  # wall clock of the sender, µs since 1970; 0: not said


class Goodbye(_Message, tag=10, frozen=True):
    """The sender leaves in good order."""

    code: str
    message: str = ""


class Error(_Message, tag=11, frozen=True):
    """The sender refuses the peer or its last message, and closes the link."""

    code: str
    message: str = ""


Message = Hello | Challenge | Prove | Welcome | Draft | Drafted | Close | Ping | Pong | Goodbye | Error

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The frame's payload, without its length prefix."""
    return _encoder.encode(message)


def decode(payload: bytes | bytearray | memoryview) -> Message:
    """A valid message, or `WireError` with the reason. Sizes are checked before anything is decoded."""
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        message = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from None
    _check(message)
    return message


def _check(message: Message) -> None:
    """What the fields' types do not say."""
    if isinstance(message, Draft):
        biases = 0
        for item in message.items:
            if len(item.tokens) & 3:
                raise _uneven(item)
            if item.base + len(item.tokens) // 4 >= MAX_POSITION:  # no answer could name this version
                raise WireError(f"session {item.session}: it is {item.base} + {len(item.tokens) // 4} tokens long")
            if item.sampling is not None:
                _check_sampling(item.session, item.sampling)
                biases += len(item.sampling.logit_bias)
        if biases > MAX_BIASES_A_FRAME:
            raise WireError(f"a Draft with {biases} logit biases is over the limit of {MAX_BIASES_A_FRAME}")
    elif isinstance(message, Drafted):
        for answer in message.items:
            if len(answer.tokens) & 3:
                raise _uneven(answer)
        if message.branches is not None:
            _check_branches(message.items, message.branches)
        if message.log_probs is not None:
            check_log_probs(message.log_probs, sum(len(answer.tokens) for answer in message.items) // 4)
        if message.weights is not None:
            check_weights(message.weights, unpack_tokens(b"".join([answer.tokens for answer in message.items])))


def _check_branches(items: Sequence[DraftedItem], branches: Sequence[Sequence[Branch]]) -> None:
    if sum(map(len, branches)) > MAX_ITEMS:
        raise WireError(f"{sum(map(len, branches))} branches in a Drafted are over the limit of {MAX_ITEMS}")
    if len(items) != len(branches):
        raise WireError(f"branches of {len(branches)} sessions in a Drafted of {len(items)}")
    for item, its_branches in zip(items, branches, strict=True):
        if item.tokens or any(len(tokens) & 3 for _, _, tokens in its_branches):
            raise WireError(f"session {item.session}: branches come alone, and their tokens are of 4 bytes each")


def _uneven(item: DraftItem | DraftedItem) -> WireError:
    return WireError(f"session {item.session}: {len(item.tokens)} bytes of tokens is no multiple of 4")


def _check_sampling(session: int, sampling: Sampling) -> None:
    """Comparisons are written so that NaN fails them. What passes can neither overflow a float64 nor an int64."""
    valid = (
        sampling.seed >= 0
        and (sampling.temperature == 0 or 1 / SAMPLING_LIMIT <= sampling.temperature <= SAMPLING_LIMIT)
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.top_k < 1 << 32
        and 0 <= sampling.min_p <= 1
        and abs(sampling.presence_penalty) <= SAMPLING_LIMIT
        and abs(sampling.frequency_penalty) <= SAMPLING_LIMIT
        and 1 / SAMPLING_LIMIT <= sampling.repetition_penalty <= SAMPLING_LIMIT
        and len(sampling.logit_bias) <= MAX_LOGIT_BIAS
        and all(token >= 0 and abs(bias) <= SAMPLING_LIMIT for token, bias in sampling.logit_bias.items())
    )
    if not valid:
        raise WireError(f"session {session}: a sampling parameter is out of range")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """The inverse of `pack_tokens`."""
    tokens = array("I")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def check_hash(tokens: Sequence[int] | array[int], start: int = 0) -> int:
    """u32 over token ids; `start` continues from the hash of the tokens before them."""
    return zlib.crc32(pack_tokens(tokens), start)
