"""What a target does not do is refused by name, with OpenAI's error object."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.cloud.api.schema import BodyLimits
from paceline.cloud.engine import EngineConfig
from paceline.core.emulated import Pace

pytestmark = pytest.mark.anyio

MOST = (64 << 10) + (64 << 10) + 16 * 4096  # bytes of a body, for a context of 4096 with tokens of 4 bytes

REFUSED = [
    ("tools", []),
    ("guided_json", {}),
    ("suffix", "end"),
    ("echo", True),
    ("best_of", 2),
    ("prompt", None),
    ("prompt", 7),
    ("prompt", ["a", "b"]),
    ("prompt", [[1], [2]]),
    ("prompt", [1, -1]),
    ("prompt", [1, 257]),
    ("prompt", [1.5]),
    ("prompt", [1, "a"]),
    ("prompt", [True]),
    ("prompt", ["a", 1]),
    ("max_tokens", 0),
    ("max_tokens", "16"),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("temperature", 1e-9),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", 1.5),
    ("n", 0),
    ("n", 129),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("logprobs", 21),
    ("logprobs", True),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("seed", 2**64),
    ("seed", 1.5),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("logit_bias", {"word": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"257": 1}),
    ("logit_bias", []),
    ("logit_bias", {"9" * 5000: 1}),
    ("stop_token_ids", [257]),
    ("ignore_eos", 1),
]


@asynccontextmanager
async def in_background(target: Any, body: dict[str, Any]) -> AsyncIterator[None]:
    """A call that waits for as long as the block runs; then its client leaves."""
    task = asyncio.create_task(target.client.post("/v1/completions", json=body))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_refused_by_name(target: Any) -> None:
    """Every value out of range and every unknown parameter is HTTP 400 that names it, and leaves nothing behind."""
    for param, value in REFUSED:
        response = await target.client.post("/v1/completions", json={"prompt": "x", param: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
        assert param in error["message"], (param, value, error)
    assert target.engine.statistics.sessions_peak == 0


async def test_null_is_absence(target: Any) -> None:
    """Clients that send null for what they leave out are served."""
    left_out = ["echo", "suffix", "best_of", "user", "stop", "seed", "logprobs", "stream_options", "n", "logit_bias"]
    await target.complete(prompt="x", max_tokens=1, **dict.fromkeys(left_out))


async def test_bodies_that_are_no_request(target: Any) -> None:
    """A body that is no JSON object is HTTP 400."""
    for body in (
        b"",
        b"{",
        b"[]",
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "temperature": NaN}',
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
    ):
        response = await target.client.post("/v1/completions", content=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


async def test_all_faults_are_told_at_once(target: Any) -> None:
    """Several faults are in one message."""
    response = await target.client.post("/v1/completions", json={"prompt": "x", "top_p": 2, "n": 0, "tools": []})
    message = response.json()["error"]["message"]
    assert all(name in message for name in ("top_p", "n must", "tools is not supported"))


async def test_other_models_paths_and_methods(target: Any) -> None:
    """An unknown model, path or method is refused with the same error object."""
    other = await target.client.post("/v1/completions", json={"prompt": "x", "model": "gpt"})
    path = await target.client.get("/v1/nothing")
    method = await target.client.get("/v1/completions")
    assert [response.status_code for response in (other, path, method)] == [404, 404, 405]
    assert other.json()["error"]["code"] == "model_not_found"
    assert "/v1/nothing" in path.json()["error"]["message"]
    assert method.headers["allow"] == "POST"


async def test_too_long_is_refused_with_the_numbers(running: Any) -> None:
    """Prompt and max_tokens beyond the context are refused with all three numbers; exactly full is served."""
    async with running(max_context=64) as target:
        response = await target.client.post("/v1/completions", json={"prompt": "x" * 50, "max_tokens": 15})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert all(number in error["message"] for number in ("50", "15", "65", "64"))
        await target.complete(prompt="x" * 50, max_tokens=14)


@pytest.mark.parametrize("size", [MOST + 1, 1 << 23, (16 << 20) + 1])
async def test_a_body_too_large(target: Any, size: int) -> None:
    """More than any request of this context needs is refused without being read as one, and who sends it hears so."""
    assert BodyLimits(4096, 4).body == MOST
    response = await target.client.post("/v1/completions", content=b" " * size)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"prompt": "x", "user": "%s"}' % ("u" * 70_000), "the body without its prompt is larger than 65536 bytes"),
        (json.dumps(dict.fromkeys(map(str, range(9000)), 1)), "the body without its prompt is larger"),
        ('{"prompt": [%s1], "prompt": "x"}' % ("1," * 40_000), "the body without its prompt is larger"),
        ('{"prompt": [%s1]}' % ("1," * 70_000), "a prompt of token ids may have at most 131072 bytes, not 140003"),
        ('{"prompt": ["a"%s]}' % (",1" * 70_000), "a prompt of token ids may have at most 131072 bytes"),
    ],
    ids=["label", "keys", "twice", "ids", "mixed"],
)
async def test_long_lists_are_refused_before_they_are_made(target: Any, body: str, expected: str) -> None:
    """A body within its bound whose parts are not; many small objects would hold up everybody's streams."""
    response = await target.client.post("/v1/completions", content=body.encode())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert expected in response.json()["error"]["message"]


async def test_more_ids_than_the_context_are_counted_before_they_are_looked_at(target: Any) -> None:
    """One by one or in a list of one prompt; what the ids are does not matter then."""
    for prompt in ([None] * 5000, [[1.5] * 5000]):
        response = await target.client.post("/v1/completions", json={"prompt": prompt})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "prompt has 5000 tokens, more than this target's context of 4096" in response.text


async def test_the_longest_prompts_are_served(target: Any) -> None:
    """All of the context as ids with white space, and as text whose every character is escaped."""
    ids = json.dumps({"prompt": [[255] * 4095], "max_tokens": 1}, indent=2)
    text = '{"max_tokens": 1, "prompt": ["%s"]}' % ("\\u0041" * 4095)
    for body in (ids, text):
        response = await target.client.post("/v1/completions", content=body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens"] == 4095


async def test_an_empty_key_lets_nobody_in(running: Any) -> None:
    """Neither who shows none, nor an empty one, nor any."""
    async with running(api_key="") as target:
        for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer x"}):
            assert (await target.client.get("/v1/models", headers=headers)).status_code == 401


async def test_queue_full_is_503_with_retry_after(running: Any) -> None:
    """When sessions and queue are full a call is told to come back; once there is room it is served."""
    config = EngineConfig(max_sessions=1)
    async with running(config=config, pace=Pace(forward_ms=2), max_queued=1) as target:
        long: dict[str, Any] = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        async with (
            target.client.stream("POST", "/v1/completions", json=long) as first,
            in_background(target, long),
        ):
            assert first.status_code == 200
            await target.until(lambda: target.engine.queued == 1)
            full = await target.client.post("/v1/completions", json={"prompt": "x"})
            assert (full.status_code, full.headers["retry-after"]) == (503, "1")
            assert full.json()["error"]["code"] == "queue_full"
        await target.until(lambda: target.engine.live_sessions == target.engine.queued == 0)
        await target.complete(prompt="x", max_tokens=2)
        never = await target.client.post("/v1/completions", json={"prompt": "x", "n": 3})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")


async def test_the_api_key(running: Any) -> None:
    """With a key, /v1 wants it; the health check does not."""
    async with running(api_key="secret") as target:
        stranger = (await target.client.get("/health")).json()
        user = (await target.client.get("/health", headers={"Authorization": "Bearer secret"})).json()
        assert "link_trouble" not in stranger and user["link_trouble"] == {}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = await target.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        allowed = {"Authorization": "Bearer secret"}
        assert (await target.client.get("/v1/models", headers=allowed)).status_code == 200
        assert (await target.client.get("/health")).status_code == 200


async def test_a_text_that_can_never_fit_is_not_encoded(running: Any) -> None:
    """Encoding megabytes takes gigabytes; the longest token tells that they cannot fit."""
    async with running(max_context=64) as target:
        target.service.vocabulary.encode = None
        response = await target.client.post("/v1/completions", json={"prompt": "a" * 321})
        assert response.status_code == 400
        assert response.json()["error"] | {"type": ""} == {
            "message": "prompt has 321 characters, more than 64 tokens can hold",
            "type": "",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
