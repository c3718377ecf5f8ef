"""Clients that leave, engines that fail, servers that stop: nothing leaks and everybody is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from paceline.cloud.api.app import create_app
from paceline.cloud.api.serving import bind, serve
from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import EngineConfig
from paceline.cloud.events import LinkDown
from paceline.core.emulated import Pace, ToyModel
from paceline.core.errors import UserError
from paceline.topology.certificates import new_authority, new_node

pytestmark = pytest.mark.anyio

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
SLOW = Pace(forward_ms=2)


class Failing(ToyModel):
    """A model that raises after some forwards."""

    left = 0

    def forward(self, segments: Any) -> Any:
        if self.left == 0:
            raise RuntimeError("device lost")
        self.left -= 1
        return super().forward(segments)


def failing(after: int) -> Any:
    """Turns a model into one that raises after so many forwards."""

    def wrap(model: ToyModel) -> ToyModel:
        model.__class__ = Failing
        model.left = after  # type: ignore[attr-defined]
        return model

    return wrap


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_sessions(running: Any, stream: bool) -> None:
    """Closing the connection in mid-generation frees every choice's session and its memory, streamed or not."""
    async with running(pace=SLOW) as target:
        async with httpx.AsyncClient(base_url=target.url, trust_env=False, verify=False) as leaving:
            call = asyncio.create_task(_read_all(leaving, LONG | {"stream": stream, "n": 3}))
            await target.until(lambda: target.engine.live_sessions == 3)
            await target.until(lambda: target.engine.statistics.tokens > 12)
            call.cancel()
            await asyncio.wait([call])
        await target.until(lambda: target.engine.live_sessions == 0)
        assert target.engine.statistics.tokens < 3 * 2000
        assert target.model._used == 0
        await target.complete(prompt="still here", max_tokens=3)


async def _read_all(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


async def test_a_client_that_leaves_the_queue(running: Any) -> None:
    """A call that is still queued when its client leaves is never run."""
    async with running(config=EngineConfig(max_sessions=1), pace=SLOW) as target:
        calls = [asyncio.create_task(_read_all(target.client, LONG)) for _ in range(2)]
        await target.until(lambda: target.engine.queued == 1)
        calls[1].cancel()
        await target.until(lambda: target.engine.queued == 0)
        assert target.engine.live_sessions == 1
        calls[0].cancel()
        await asyncio.wait(calls)
        await target.until(lambda: target.engine.live_sessions == 0)


async def test_failure_before_the_first_token_is_500(running: Any) -> None:
    """A model that fails at once is HTTP 500 for who waits, then 503 at the door, and the health check says why."""
    async with running(wrap=failing(0)) as target:
        for stream in (True, False):
            response = await target.client.post("/v1/completions", json={"prompt": "x", "stream": stream})
            expected = 500 if stream else 503
            assert response.status_code == expected
            assert "device lost" in response.json()["error"]["message"]
        health = await target.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert health.json()["error"] == "device lost"


async def test_failure_in_mid_stream_is_an_event(running: Any) -> None:
    """A failure after the first token is an error event, and the stream still ends with [DONE]."""
    async with running(wrap=failing(10_000), pace=SLOW) as target:
        events = []
        async with target.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    target.model.left = 0
    assert response.status_code == 200
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["type"] == "server_error"
    assert "text" in json.loads(events[0])["choices"][0]


async def test_failure_reaches_who_waits_in_the_queue(running: Any) -> None:
    """When the engine fails, calls that run and calls that wait for room are both told, none hangs."""
    config = EngineConfig(max_sessions=1)
    async with running(config=config, wrap=failing(10_000), pace=SLOW) as target:
        calls = [target.client.post("/v1/completions", json=LONG) for _ in range(3)]
        waiting = [asyncio.create_task(call) for call in calls]
        await target.until(lambda: target.engine.queued == 2)
        target.model.left = 0
        responses = await asyncio.gather(*waiting)
    assert [response.status_code for response in responses] == [500] * 3


async def test_a_server_that_stops_does_not_wait_for_ever(running: Any) -> None:
    """Leaving `serve` cancels what still runs after its grace and frees the sessions."""
    async with running(pace=SLOW) as target:
        async with serve(create_app(target.service, "toy"), "127.0.0.1:0", grace=1.0) as url:
            client = httpx.AsyncClient(base_url=url, trust_env=False, verify=False)
            call = asyncio.create_task(_read_all(client, LONG | {"stream": True}))
            await target.until(lambda: target.engine.statistics.tokens > 2)
        assert target.engine.statistics.tokens < 4000
        with pytest.raises(httpx.HTTPError):
            await call
        await client.aclose()
        await target.until(lambda: target.engine.live_sessions == 0)


async def test_health_of_a_target_with_drafters(running: Any) -> None:
    """The health check names the model, sessions, queue and every drafter."""
    config = EngineConfig(max_sessions=1, drafting=DraftingConfig(drafters=("orin-1", "orin-2")))
    async with running(config=config, pace=SLOW) as target:
        target.engine.drafting.drafters["orin-1"].send = lambda message: True
        target.engine.drafting.drafters["orin-2"].suspect = True
        target.service.link_trouble = lambda: {"orin-2": "no route to host"}
        idle = (await target.client.get("/health")).json()
        assert idle == {
            "status": "ok",
            "model": "toy",
            "live_sessions": 0,
            "queued": 0,
            "drafters": {"orin-1": "up", "orin-2": "down"},
            "sessions_at": {"orin-1": 0, "orin-2": 0},
            "suspect": ["orin-2"],
            "link_trouble": {"orin-2": "no route to host"},
        }
        target.engine.inbox.put(LinkDown("orin-1"))
        calls = [asyncio.create_task(_read_all(target.client, LONG)) for _ in range(2)]
        await target.until(lambda: target.engine.live_sessions == target.engine.queued == 1)
        busy = (await target.client.get("/health")).json()
        assert (busy["live_sessions"], busy["queued"], busy["drafters"]["orin-1"]) == (1, 1, "down")
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


async def test_the_models_list(target: Any) -> None:
    """The one model is listed with its context."""
    listed = (await target.client.get("/v1/models")).json()
    assert [(one["id"], one["max_model_len"]) for one in listed["data"]] == [("toy", 4096)]


async def test_closing_tells_open_calls(running: Any) -> None:
    """On shutdown open streams end with an error event, new calls get 503, and no session is left."""
    async with running(pace=SLOW) as target:
        call = asyncio.create_task(target.events(**LONG))
        await target.until(lambda: target.engine.statistics.tokens > 3)
        target.service.close()
        events = await call
        assert "shutting down" in json.loads(events[-2])["error"]["message"]
        assert (await target.client.post("/v1/completions", json=LONG)).status_code == 503
        assert (await target.client.get("/health")).json()["status"] == "closing"
        await target.until(lambda: target.engine.live_sessions == 0)


def test_a_port_in_use_is_one_sentence() -> None:
    """A taken port, an unknown host and a bad address are the user's errors, each with one sentence."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            bind(f"127.0.0.1:{port}")
    for listen in ("orin..lan:80", "a" * 64 + ":80"):
        with pytest.raises(UserError, match=f"cannot listen at {listen}: "):
            bind(listen)
    for listen in ("127.0.0.1", ":80", "127.0.0.1:http", "127.0.0.1:70000"):
        with pytest.raises(UserError, match="write host:port"):
            bind(listen)
    with pytest.raises(UserError, match=r"cannot listen at 192\.0\.2\.1:0"):
        bind("192.0.2.1:0")


def test_binding_ipv6_and_a_free_port() -> None:
    """Port 0 is any free port; IPv6 addresses go in brackets."""
    with bind("127.0.0.1:0") as bound:
        assert bound.getsockname()[1] > 0
    try:
        with bind("[::1]:0") as bound:
            assert bound.family == socket.AF_INET6
    except UserError as error:
        assert "cannot listen" in str(error)  # a machine without IPv6


async def test_draining_lets_what_runs_finish_and_refuses_the_queue(running: Any) -> None:
    """Queued calls get 503 with Retry-After at once, running ones all their tokens; then the target is idle."""
    async with running(config=EngineConfig(max_sessions=2), pace=SLOW) as target:
        begun = [asyncio.create_task(target.complete(prompt="x", max_tokens=300, ignore_eos=True)) for _ in range(2)]
        await target.until(lambda: target.engine.live_sessions == 2)
        queued = asyncio.create_task(target.client.post("/v1/completions", json=LONG | {"stream": True}))
        await target.until(lambda: target.engine.queued == 1)
        draining = asyncio.create_task(target.service.drain())
        for response in (await queued, await target.client.post("/v1/completions", json=LONG)):
            assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
            assert response.json()["error"]["code"] == "shutting_down"
        assert not draining.done()
        for call in begun:
            assert (await call)["usage"]["completion_tokens"] == 300
        await draining
        assert target.engine.live_sessions == target.engine.queued == 0


async def test_draining_keeps_all_choices_of_a_call_that_has_begun(running: Any) -> None:
    """A call of three choices, two of which run, is finished as a whole."""
    async with running(config=EngineConfig(max_sessions=2), pace=SLOW) as target:
        call = asyncio.create_task(target.complete(prompt="x", max_tokens=100, ignore_eos=True, n=3))
        await target.until(lambda: target.engine.queued == 1)
        await target.service.drain()
        assert (await call)["usage"]["completion_tokens"] == 300


async def test_draining_an_idle_target_ends_at_once(target: Any) -> None:
    """Nobody runs, nobody is waited for."""
    with anyio.fail_after(1):
        await target.service.drain()


async def test_the_api_key_may_change(running: Any) -> None:
    """The old key is refused from then on, the new one taken."""
    async with running(api_key="old") as target:

        async def status(key: str) -> int:
            response = await target.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            return int(response.status_code)

        assert [await status("old"), await status("new")] == [200, 401]
        target.app.state.api_key = "new"
        assert [await status("old"), await status("new")] == [401, 200]


async def test_a_body_that_comes_too_slowly_is_408(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed after a sentence, however steadily it trickles."""
    monkeypatch.setattr("paceline.cloud.api.app.BODY_SECONDS", 0.3)
    async with running() as target:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        answer = await _trickle(target.url, head)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"body_too_slow" in answer
        await target.complete(prompt="x", max_tokens=1)


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_connection_without_a_request_is_closed(
    running: Any, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """Whether it says nothing or a request's head that never ends; a stream that runs is left alone."""
    monkeypatch.setattr("paceline.cloud.api.serving.REQUEST_SECONDS", 0.5)
    async with running(pace=SLOW) as target:
        stream = asyncio.create_task(target.events(prompt="x", max_tokens=600, ignore_eos=True))
        assert await _trickle(target.url, head, trickles=bool(head)) == b""
        assert json.loads((await stream)[-2])["choices"][0]["finish_reason"] == "length"


async def test_connections_that_wait_make_room(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the oldest of the host that has most goes; who has a request that runs is never the one."""
    monkeypatch.setattr("paceline.cloud.api.serving.MAX_CONNECTIONS", 8)
    async with running(pace=SLOW) as target:
        stream = asyncio.create_task(target.events(prompt="x", max_tokens=600, ignore_eos=True))
        await target.until(lambda: target.engine.live_sessions == 1)
        host, port = target.url.removeprefix("http://").split(":")
        mute = [await asyncio.open_connection(host, int(port)) for _ in range(30)]
        assert (await target.client.get("/health")).status_code == 200
        with anyio.fail_after(10):
            for reader, _ in mute[:22]:
                assert await reader.read() == b""
        assert not mute[-1][0].at_eof()
        for _, writer in mute:
            writer.close()
        assert json.loads((await stream)[-2])["choices"][0]["finish_reason"] == "length"


async def test_connections_that_never_finish_tls(running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds take 64 places at most, for as long as a handshake may take; others are served meanwhile."""
    monkeypatch.setattr("paceline.cloud.api.serving.HANDSHAKE_SECONDS", 1.0)
    authority = new_authority("star", 10)
    pair = new_node(authority, "t", ["127.0.0.1"], 10)
    for name, data in (("ca.pem", authority.certificate), ("t.pem", pair.certificate), ("t.key", pair.key)):
        (tmp_path / name).write_bytes(data)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "t.pem", tmp_path / "t.key")
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with running() as target, serve(create_app(target.service, "toy"), "127.0.0.1:0", tls=context) as url:
        host, port = url.removeprefix("https://").split(":")
        mute = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=trusting) as client:
            assert (await client.get("/health")).status_code == 200
        with anyio.fail_after(10):
            for reader, writer in mute:
                assert await _rest(reader) == b""
                writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    got = b""
    with contextlib.suppress(ConnectionResetError):  # closed before it had read all that was sent
        while part := await reader.read(65536):
            got += part
    return got


async def _trickle(url: str, head: bytes, trickles: bool = True) -> bytes:
    """Sends a byte now and then after `head` until the server ends the connection; what it had answered."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)

    async def feed() -> None:
        while True:
            await asyncio.sleep(0.02)
            writer.write(b"x" if trickles else b"")

    feeding = asyncio.create_task(feed())
    try:
        with anyio.fail_after(10):
            return await _rest(reader)
    finally:
        feeding.cancel()
        writer.close()
