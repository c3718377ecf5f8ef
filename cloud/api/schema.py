"""The request of POST /v1/completions: OpenAI's parameters and the common ones of vLLM.

A parameter is honoured or refused by name (HTTP 400); none is ignored. A null is the same as leaving it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from paceline.cloud.api.errors import ApiError, body_too_large

MAX_STOPS = 16
MAX_BIASES = 300  # OpenAI's limit
MAX_BODY = 16 << 20  # bytes, whatever the context
MAX_BESIDE = 64 << 10  # bytes of a body without its prompt
ID_BYTES = 16  # of a token id, with the comma and white space
ESCAPED = 6  # bytes of JSON for a byte of text: \u00e9
MIN_TEMPERATURE = 1e-6  # below it, logits divided by the temperature leave float64's exact range

TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end of the stream, with the usage and no choices."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class CompletionRequest(BaseModel):
    """One prompt and how to continue it, n times."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | list[int]
    model: str | None = None
    user: str | None = None  # the caller's own label; nothing depends on it
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = None
    max_tokens: int = Field(16, ge=1, lt=2**31)
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool = False

    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1: all tokens
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=MAX_BIASES)

    stop: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=MAX_STOPS)
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of token ids")
        if value and isinstance(value[0], (str, list)):
            if len(value) > 1:
                raise ValueError("must be a single prompt: send one request for each")
            value = value[0]
        if not isinstance(value, str) and not all(type(id) is int and 0 <= id < 2**32 for id in value):
            raise ValueError("must be a string or a list of token ids")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("temperature")
    @classmethod
    def _not_tiny(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"must be 0 or {MIN_TEMPERATURE:g}..2")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_as_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError(f"must have token ids as keys, not {key!r}")
        return value

    @field_validator("echo")
    @classmethod
    def _no_echo(cls, value: bool) -> bool:
        if value:
            raise ValueError("is not supported: only false is")
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("is not supported")
        return value

    @model_validator(mode="after")
    def _together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of is not supported unless it equals n ({self.n})")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


@dataclass(frozen=True)
class BodyLimits:
    """What a body may hold, by what the target can use. longest: bytes of a token."""

    max_context: int
    longest: int

    @property
    def ids(self) -> int:
        """Bytes of a prompt of token ids."""
        return MAX_BESIDE + ID_BYTES * self.max_context

    @property
    def body(self) -> int:
        """Bytes."""
        return min(MAX_BODY, MAX_BESIDE + max(self.ids, ESCAPED * self.longest * self.max_context))


class _Prompt(msgspec.Struct):
    """A body's prompt as it is written; what is beside it makes no objects."""

    prompt: msgspec.Raw = msgspec.Raw(b"")


def parse(body: bytes, limits: BodyLimits) -> CompletionRequest:
    """The request in an HTTP body. Raises ApiError (400, or 413 where it is too long) naming what is wrong.

    A long body is first looked through: making and checking millions of objects would hold up all other threads.
    """
    try:
        if len(body) > MAX_BESIDE:
            _look_through(body, limits)
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    _not_too_many(values.get("prompt"), limits.max_context)
    try:
        return CompletionRequest.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        sentences = list(dict.fromkeys(_sentence(one) for one in found))
        first = sentences[0]
        code = "unsupported_parameter" if "not supported" in first else "invalid_value"
        param = str(found[0]["loc"][0]) if found[0]["loc"] else first.split()[0]
        raise ApiError(400, "; ".join(sentences[:8]), param=param, code=code) from None


def _look_through(body: bytes, limits: BodyLimits) -> None:
    prompt = bytes(msgspec.json.decode(body, type=_Prompt).prompt)
    if len(body) - len(prompt) > MAX_BESIDE:
        raise body_too_large(f"the body without its prompt is larger than {MAX_BESIDE} bytes")
    if len(prompt) > limits.ids and not _is_text(prompt):
        raise body_too_large(f"a prompt of token ids may have at most {limits.ids} bytes, not {len(prompt)}")


def _is_text(prompt: bytes) -> bool:
    """A string, or a list of just one."""
    try:
        msgspec.json.decode(prompt, type=str | tuple[str])
    except msgspec.ValidationError:
        return False
    return True


def _not_too_many(prompt: Any, max_context: int) -> None:
    """Before each is looked at."""
    ids = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else prompt
    if isinstance(ids, list) and len(ids) > max_context:
        message = f"prompt has {len(ids)} tokens, more than this target's context of {max_context}"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")


def _sentence(error: ErrorDetails) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{name} is not supported"
    if error["type"] == "missing":
        return f"{name} is required"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "must")
    message = message[:1].lower() + message[1:]
    return f"{name} {message}" if name else message
