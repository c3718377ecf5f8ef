"""The HTTP face of a target: OpenAI's completions, the models list and a health check."""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import Any

import anyio
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.cloud.api.errors import ApiError, body_too_large, error_body
from paceline.cloud.api.render import Renderer
from paceline.cloud.api.responses import CompletionResponse
from paceline.cloud.api.schema import MAX_BODY, BodyLimits, CompletionRequest, parse
from paceline.cloud.api.service import CompletionService

LONG_BODY = 16_384  # bytes; longer ones are parsed beside the loop
BODY_SECONDS = 30.0  # for all of it, however slowly it comes


def create_app(service: CompletionService, model_name: str, *, api_key: str | None = None) -> FastAPI:
    """The application. With `api_key`, everything under /v1 wants it as `Authorization: Bearer …`.

    `app.state.api_key` holds it and may be changed while the application serves.
    """
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None)
    app.state.api_key = api_key
    created = int(time.time())
    limits = BodyLimits(service.max_context, service.longest)

    @app.post("/v1/completions", openapi_extra=_body_schema())
    async def completions(request: Request) -> Response:
        _authorize(request)
        body = await _read(request, limits.body)
        call = parse(body, limits) if len(body) <= LONG_BODY else await asyncio.to_thread(parse, body, limits)
        if call.model is not None and call.model != model_name:
            message = f"model {call.model!r} is not served here, {model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")
        completion = await service.start(call)
        renderer = Renderer(call, completion.id, model_name, int(time.time()), completion.prompt, service.vocabulary)
        return CompletionResponse(completion, renderer, call.stream)

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models(request: Request) -> Response:
        _authorize(request)
        model = {"id": model_name, "object": "model", "created": created, "owned_by": "paceline"}
        return _json({"object": "list", "data": [model | {"max_model_len": service.max_context}]})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health(request: Request) -> Response:
        serving, facts = service.health()
        if not _authorized(request):
            facts.pop("link_trouble")  # it names addresses
        return _json({"status": facts.pop("status"), "model": model_name, **facts}, 200 if serving else 503)

    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    return app


async def _read(request: Request, limit: int) -> bytes:
    """limit: bytes that are kept. More is read all the same: a client that still writes would not see the answer."""
    body = bytearray()
    size = 0
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    body += part
                elif size > MAX_BODY:
                    break
    except TimeoutError:
        message = f"the body was not complete within {BODY_SECONDS:g} s"
        raise ApiError(408, message, code="body_too_slow", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body was complete", code="incomplete_body") from None
    if size > limit:
        raise body_too_large(f"the body is larger than {limit} bytes")
    return bytes(body)


def _authorized(request: Request) -> bool:
    api_key: str | None = request.app.state.api_key
    if api_key is None:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), api_key.encode())
    return scheme.lower() == "bearer" and bool(api_key) and right  # an empty key lets nobody in


def _authorize(request: Request) -> None:
    if not _authorized(request):
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, error.headers, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return Response(error_body(error.status_code, message), error.status_code, error.headers, "application/json")


async def _unexpected(request: Request, error: Exception) -> Response:
    return Response(error_body(500, "an unexpected error; the target's log has it"), 500, None, "application/json")


def _body_schema() -> dict[str, Any]:
    content = {"application/json": {"schema": CompletionRequest.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
