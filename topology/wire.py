"""The messages between a target and its drafter, and nothing else that crosses the wire.

Every frame is one msgpack array: a tag, then the fields in order. Structs grow only at the end, so a
newer peer's extra fields are ignored and an older peer's missing ones take their defaults. Token ids
travel as packed little-endian u32. `decode` turns every byte sequence into a message or a `WireError`.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec

from paceline.core.errors import WireError
from paceline.core.sampling import Sampling

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
MAX_FRAME_BYTES = 4 << 20
MAX_ITEMS = 4096
MAX_SESSIONS_LISTED = 1 << 16  # in one Close or Ping
MAX_LOGIT_BIAS = 4096
MAX_POSITION = 1 << 31
MAX_TOKENS_PER_ITEM = 1 << 19
MAX_DRAFT_LENGTH = 16


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


class DraftItem(msgspec.Struct, frozen=True, array_like=True):
    """One session of a Draft. `base` committed tokens are known to be held; `tokens` follow them."""

    session: int
    base: int
    tokens: bytes
    check: int  # check_hash of the tokens before base
    k: int
    sampling: Sampling | None = None  # at open (base 0)
    prompt_length: int = 0  # at open: how many of the first tokens are prompt
    limit: int = 0  # at open: the longest this session can become, in tokens


class Draft(_Message, tag=5, frozen=True):
    """T→D: committed tokens, and how many to propose after them."""

    epoch: int
    items: list[DraftItem]
    features: bytes | None = None  # reserved: hidden states for EAGLE
    adapter: str | None = None  # reserved


class DraftedItem(msgspec.Struct, frozen=True, array_like=True):
    """One session of a Drafted. `position` is the absolute index of the first proposal."""

    session: int
    status: int
    held: int
    position: int
    tokens: bytes = b""
    retry_after_ms: int = 0


class Drafted(_Message, tag=6, frozen=True):
    """D→T: proposals, with the time they waited and took."""

    epoch: int
    items: list[DraftedItem]
    queue_us: int = 0
    draft_us: int = 0
    parents: bytes | None = None  # reserved: tree drafts
    log_probs: bytes | None = None  # reserved
    weights: bytes | None = None  # reserved: rejection mode
    branches: list[tuple[int, int, bytes]] | None = None  # reserved: draft ahead


class Close(_Message, tag=7, frozen=True):
    """T→D: these sessions are over, for good."""

    epoch: int
    sessions: list[int]


class Ping(_Message, tag=8, frozen=True):
    """Both ways, once a second. A target lists its live sessions; the drafter frees all others."""

    time_us: int
    sessions: list[int] | None = None


class Pong(_Message, tag=9, frozen=True):
    """The answer to a Ping, with its time."""

    time_us: int


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
    if isinstance(message, (Draft, Drafted)):
        if len(message.items) > MAX_ITEMS:
            raise WireError(f"{len(message.items)} items in one message, at most {MAX_ITEMS} are allowed")
        for item in message.items:
            _check_item(item)
    elif isinstance(message, (Close, Ping)) and message.sessions:
        if len(message.sessions) > MAX_SESSIONS_LISTED:
            raise WireError(
                f"{len(message.sessions)} sessions in one message, at most {MAX_SESSIONS_LISTED} are allowed"
            )
        if min(message.sessions) < 0:
            raise WireError("a session id is negative")


def _check_item(item: DraftItem | DraftedItem) -> None:
    if item.session < 0:
        raise WireError("a session id is negative")
    if len(item.tokens) % 4:
        raise WireError(f"session {item.session}: {len(item.tokens)} bytes of tokens is no multiple of 4")
    if isinstance(item, DraftedItem):
        if len(item.tokens) > 4 * MAX_DRAFT_LENGTH:
            raise WireError(f"session {item.session}: more than {MAX_DRAFT_LENGTH} tokens proposed")
        if not (0 <= item.held < MAX_POSITION and 0 <= item.position < MAX_POSITION and item.retry_after_ms >= 0):
            raise WireError(f"session {item.session}: a position outside 0..{MAX_POSITION}")
        return
    if len(item.tokens) > 4 * MAX_TOKENS_PER_ITEM:
        raise WireError(f"session {item.session}: more than {MAX_TOKENS_PER_ITEM} tokens in one item")
    if not 0 <= item.k <= MAX_DRAFT_LENGTH:
        raise WireError(f"session {item.session}: k = {item.k} is outside 0..{MAX_DRAFT_LENGTH}")
    if not (
        0 <= item.base < MAX_POSITION and 0 <= item.prompt_length < MAX_POSITION and 0 <= item.limit < MAX_POSITION
    ):
        raise WireError(f"session {item.session}: a position outside 0..{MAX_POSITION}")
    if not 0 <= item.check < 1 << 32:
        raise WireError(f"session {item.session}: check is no u32")
    if item.sampling is not None:
        _check_sampling(item.session, item.sampling)


def _check_sampling(session: int, sampling: Sampling) -> None:
    """Comparisons are written so that NaN fails them."""
    valid = (
        sampling.seed >= 0
        and 0 <= sampling.temperature < math.inf
        and 0 < sampling.top_p <= 1
        and sampling.top_k >= 0
        and 0 <= sampling.min_p <= 1
        and math.isfinite(sampling.presence_penalty)
        and math.isfinite(sampling.frequency_penalty)
        and 0 < sampling.repetition_penalty < math.inf
        and len(sampling.logit_bias) <= MAX_LOGIT_BIAS
        and all(token >= 0 and math.isfinite(bias) for token, bias in sampling.logit_bias.items())
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
