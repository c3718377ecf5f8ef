"""A real target behind a real HTTP server: an engine over the toy language in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from paceline.cloud.api.app import create_app
from paceline.cloud.api.dispatch import Dispatch
from paceline.cloud.api.serving import serve
from paceline.cloud.api.service import CompletionService
from paceline.cloud.engine import Engine, EngineConfig, Stop
from paceline.core.emulated import Pace, ToyLanguage, ToyModel

MODEL = "toy"
PATIENCE = 10.0


@dataclass
class Bytes:
    """A vocabulary of given pieces; a text's bytes are its ids."""

    token_bytes: list[bytes] = field(default_factory=lambda: [bytes([id]) for id in range(256)] + [b""])
    eos_ids: frozenset[int] = frozenset({256})
    bos: int | None = 0

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    def encode(self, text: str) -> list[int]:
        return [byte % self.size for byte in text.encode()]


@dataclass
class Target:
    """What a test talks to, and what it looks into."""

    client: httpx.AsyncClient
    url: str
    engine: Engine
    service: CompletionService
    model: ToyModel

    async def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that is expected to succeed."""
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    async def events(self, **body: Any) -> list[str]:
        """The data of all events of a stream that is expected to succeed."""
        async with self.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns as soon as the condition holds; fails when it does not in time."""
        async with asyncio.timeout(PATIENCE) if hasattr(asyncio, "timeout") else _no_timeout():
            while not condition():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def _no_timeout() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def running(
    vocabulary: Bytes | None = None,
    config: EngineConfig | None = None,
    *,
    pace: Pace | None = None,
    max_queued: int = 128,
    wrap: Callable[[ToyModel], ToyModel] = lambda model: model,
    **options: Any,
) -> AsyncIterator[Target]:
    """A served target; `wrap` may replace the model."""
    vocabulary = vocabulary or Bytes()
    model = wrap(ToyModel(ToyLanguage(vocabulary.size), pace=pace, max_context=options.pop("max_context", 4096)))
    dispatch = Dispatch()
    engine = Engine(model, vocabulary.token_bytes, config or EngineConfig(), dispatch.publish)
    service = CompletionService(engine, vocabulary, dispatch, max_queued=max_queued)
    thread = threading.Thread(target=engine.run, name="engine")
    thread.start()
    try:
        app = create_app(service, MODEL, **options)
        async with (
            serve(app, "127.0.0.1:0") as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client,
        ):
            yield Target(client, url, engine, service, model)
    finally:
        engine.inbox.put(Stop())
        thread.join(PATIENCE)
    assert not thread.is_alive()


def direct(vocabulary: Bytes, requests: Sequence[Any]) -> dict[str, tuple[list[int], str]]:
    """What the engine alone makes of requests, one after the other: id → (token ids, text)."""
    from paceline.cloud.engine import Submit

    outputs: dict[str, tuple[list[int], str]] = {}

    def publish(deltas: list[Any]) -> None:
        for delta in deltas:
            ids, text = outputs.get(delta.request_id, ([], ""))
            outputs[delta.request_id] = (ids + delta.token_ids, text + delta.text)

    engine = Engine(ToyModel(ToyLanguage(vocabulary.size)), vocabulary.token_bytes, EngineConfig(), publish)
    for request in requests:
        engine.inbox.put(Submit(request))
        while engine.step():
            pass
    return outputs


Scenario = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture
def run() -> Iterator[Callable[[Scenario], None]]:
    """Runs a test's coroutine in a fresh loop."""

    def go(scenario: Scenario) -> None:
        asyncio.run(scenario())

    yield go
