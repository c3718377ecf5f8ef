"""Sends a completion over ASGI, whole or as server-sent events, and notices when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.cloud.api.errors import ApiError, shutting_down
from paceline.cloud.api.render import Renderer
from paceline.cloud.api.service import Completion
from paceline.cloud.requests import Delta

Batch = list[tuple[int, Delta]]


class CompletionResponse(Response):
    """The answer to one call. Errors before the first token have an HTTP status, later ones are an event."""

    def __init__(self, completion: Completion, renderer: Renderer, stream: bool) -> None:
        super().__init__()
        self._completion = completion
        self._renderer = renderer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _cancelled_on_disconnect(self._completion, receive):
            async with aclosing(self._completion.deltas()) as deltas:
                try:
                    await (self._send_events(deltas, send) if self._stream else self._send_whole(deltas, send))
                except ApiError as error:
                    await Response(error.body(), error.status, error.headers, "application/json")(scope, receive, send)

    async def _send_whole(self, deltas: AsyncIterator[Batch], send: Send) -> None:
        outputs = [Delta(request.id) for request in self._completion.requests]
        async for batch in deltas:
            _raise_error(batch)
            for index, delta in batch:
                _append(outputs[index], delta)
        if any(output.finish_reason == "cancelled" for output in outputs):
            return
        body = self._renderer.whole(outputs)
        await send(_head(b"application/json", [(b"content-length", b"%d" % len(body))]))
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, deltas: AsyncIterator[Batch], send: Send) -> None:
        started = False
        async for batch in deltas:
            if not started:
                _raise_error(batch)
                await send(_head(b"text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")]))
                started = True
            if any(delta.finish_reason == "cancelled" for _, delta in batch):
                return
            events = [self._renderer.event(index, delta) for index, delta in batch if delta.finish_reason != "error"]
            if failed := _error(batch):
                events.append(b"data: %s\n\ndata: [DONE]\n\n" % failed.body())
                await _send_part(send, b"".join(events), more=False)
                return
            await _send_part(send, b"".join(events))
        await _send_part(send, self._renderer.end(), more=False)


@contextmanager
def _cancelled_on_disconnect(completion: Completion, receive: Receive) -> Iterator[None]:
    watcher = asyncio.create_task(_watch(completion, receive), name=f"watch {completion.id}")
    try:
        yield
    finally:
        watcher.cancel()
        completion.cancel()


async def _watch(completion: Completion, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    completion.cancel()


async def _send_part(send: Send, body: bytes, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _head(content_type: bytes, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, object]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type), *headers]}


def _append(output: Delta, delta: Delta) -> None:
    output.token_ids += delta.token_ids
    output.text += delta.text
    output.log_probs += delta.log_probs
    output.finish_reason = delta.finish_reason


def _error(batch: Batch) -> ApiError | None:
    failed = next((delta for _, delta in batch if delta.finish_reason == "error"), None)
    if failed is None:
        return None
    message = failed.error or "failed"
    return shutting_down(message) if failed.leaving else ApiError(500, message, code="generation_failed")


def _raise_error(batch: Batch) -> None:
    if failed := _error(batch):
        raise failed
