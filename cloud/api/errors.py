"""Failures as the OpenAI API words them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ApiError(Exception):
    """A request that is answered with an error; `param` names the parameter at fault, if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON that the client gets."""
        return error_body(self.status, self.message, self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error object as JSON."""
    error = {"message": message, "type": _error_type(status), "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 503:
        return "service_unavailable"
    return "invalid_request_error" if status < 500 else "server_error"


def bad_parameter(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """HTTP 400 that names the parameter."""
    return ApiError(400, f"{param} {message}", param=param, code=code)


def body_too_large(message: str) -> ApiError:
    """HTTP 413; what is left of the body is not read."""
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def shutting_down(message: str, retry_after: int = 1) -> ApiError:
    """HTTP 503: another target may serve the call at once, this one when it is started again."""
    return ApiError(503, message, code="shutting_down", headers={"Retry-After": str(retry_after)})


def busy(message: str, retry_after: int = 1) -> ApiError:
    """HTTP 503; the client may try again after so many seconds."""
    return ApiError(503, message, code="queue_full", headers={"Retry-After": str(retry_after)})
