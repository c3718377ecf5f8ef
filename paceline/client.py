"""A user of a target: sends a prompt over HTTP, reads the stream, and takes the times."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.core.errors import PacelineError, UserError
from paceline.core.percentiles import summary


@dataclass(frozen=True)
class Endpoint:
    """A target's completions: its name, the URL, and the API key where it has one."""

    target: str
    url: str
    key: str | None = field(repr=False)


@dataclass
class Completion:
    """One answer. Times in seconds on the monotonic clock; arrivals: when each streamed piece came."""

    target: str
    prompt: str | list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # where the usage was asked for
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """As `--json` prints it. itl_ms: gaps between streamed pieces, of which one may hold several tokens."""
        gaps = [(later - sooner) * 1000.0 for sooner, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
        times = summary(gaps)
        return {
            "target": self.target,
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "ttft_ms": (self.arrivals[0] - self.sent) * 1000.0 if self.arrivals else None,
            "itl_ms": {name: times[name] for name in ("p50", "p99", "std")},
        }


async def complete(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    prompt: str | list[int],
    options: dict[str, Any],
    progress: Callable[[int], None] = lambda tokens: None,
) -> Completion:
    """Streams one completion. UserError when the target refuses the request itself,
    PacelineError when it cannot serve it or breaks off; in its own words."""
    target = endpoint.target
    done = Completion(target, prompt, sent=time.monotonic())
    body = {"prompt": prompt, "stream": True, "return_token_ids": True, **options}
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    try:
        async with client.stream("POST", endpoint.url, json=body, headers=headers) as response:
            if response.status_code != 200:
                failure = UserError if response.status_code == 400 else PacelineError
                raise failure(f"{target}: {_refusal(response.status_code, await response.aread())}")
            async for line in _lines(response):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    _take(done, json.loads(line[6:]), progress)
    except httpx.HTTPError as error:
        raise PacelineError(f"{target} broke off: {type(error).__name__} {error}".rstrip()) from error
    if done.finish_reason is None:
        raise PacelineError(f"{target} ended the stream without a finish reason")
    return done


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Up to each line feed. httpx's own lines also end at separators that a text may hold, such as U+2028."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _take(done: Completion, event: dict[str, Any], progress: Callable[[int], None]) -> None:
    if "error" in event:
        raise PacelineError(f"{done.target}: {event['error'].get('message', event['error'])}")
    if event.get("usage"):
        done.prompt_tokens = event["usage"]["prompt_tokens"]
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        done.text += choice.get("text", "")
        done.token_ids += ids
        done.finish_reason = choice.get("finish_reason") or done.finish_reason
        if ids:
            done.arrivals.append(time.monotonic())
            progress(len(ids))


def _refusal(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
