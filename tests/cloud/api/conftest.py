"""A real target behind a real HTTP server: an engine over the toy language in its own thread."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI

from paceline.cloud.api.app import create_app
from paceline.cloud.api.dispatch import Dispatch
from paceline.cloud.api.service import CompletionService
from paceline.cloud.api.serving import serve
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Stop, Submit
from paceline.core.emulated import Pace, ToyLanguage, ToyModel

MODEL = "toy"
PATIENCE = 10.0


@dataclass
class Bytes:
    """A vocabulary of given pieces; a text's bytes are its ids."""

    token_bytes: list[bytes] = field(default_factory=lambda: [bytes([id]) for id in range(256)] + [b"</s>"])
    eos_ids: frozenset[int] = frozenset({256})
    special_ids: frozenset[int] = frozenset({256})
    bos: int | None = 0

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    @property
    def shown(self) -> list[bytes]:
        """What the engine gets: special tokens show no text."""
        return [b"" if id in self.special_ids else data for id, data in enumerate(self.token_bytes)]

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
    app: FastAPI

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
        with anyio.fail_after(PATIENCE):
            while not condition():
                await anyio.sleep(0.002)


@asynccontextmanager
async def running(
    vocabulary: Any = None,
    config: EngineConfig | None = None,
    *,
    pace: Pace | None = None,
    max_queued: int = 128,
    wrap: Callable[[ToyModel], ToyModel] = lambda model: model,
    **options: Any,
) -> AsyncIterator[Target]:
    """A served target; `wrap` may replace the model."""
    vocabulary = vocabulary or Bytes()
    shown = [b"" if id in vocabulary.special_ids else data for id, data in enumerate(vocabulary.token_bytes)]
    model = wrap(ToyModel(ToyLanguage(vocabulary.size), pace=pace, max_context=options.pop("max_context", 4096)))
    dispatch = Dispatch()
    engine = Engine(model, shown, config or EngineConfig(), dispatch.publish)
    service = CompletionService(engine, vocabulary, dispatch, max_queued=max_queued)
    thread = threading.Thread(target=engine.run, name="engine")
    thread.start()
    try:
        app = create_app(service, MODEL, **options)
        async with (
            serve(app, "127.0.0.1:0") as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False, verify=False) as client,
        ):
            yield Target(client, url, engine, service, model, app)
    finally:
        engine.inbox.put(Stop())
        thread.join(PATIENCE)
    assert not thread.is_alive()


def direct(vocabulary: Bytes, requests: Sequence[Any]) -> dict[str, tuple[list[int], str]]:
    """What the engine alone makes of requests, one after the other: id → (token ids, text)."""
    outputs: dict[str, tuple[list[int], str]] = {}

    def publish(deltas: list[Any]) -> None:
        for delta in deltas:
            ids, text = outputs.get(delta.request_id, ([], ""))
            outputs[delta.request_id] = (ids + delta.token_ids, text + delta.text)

    engine = Engine(ToyModel(ToyLanguage(vocabulary.size)), vocabulary.shown, EngineConfig(), publish)
    for request in requests:
        engine.inbox.put(Submit(request))
        while engine.step():
            pass
    return outputs


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(name="running")
def _running() -> Any:
    """The context manager `running`, for a test that wants its own settings."""
    return running


@pytest.fixture(name="direct")
def _direct() -> Any:
    """The function `direct`."""
    return direct


@pytest.fixture
def vocabulary() -> Bytes:
    """257 ids: the bytes, and an end token."""
    return Bytes()


@pytest.fixture
def pieces() -> Bytes:
    """Tokens that are parts of characters: most characters of a text are split over two tokens."""
    token_bytes = (
        [b"\xe2\x82"] * 24 + [b"\xac"] * 24 + [b"\xf0\x9f", b"\x98\x80"] + [b"a", b"b", b" ", "é".encode()] * 3
    )
    return Bytes(token_bytes, frozenset())


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    """A target with the usual settings."""
    async with running() as target:
        yield target
