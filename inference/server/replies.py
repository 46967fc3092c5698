"""Replies of the HTTP servers that are no results: errors in OpenAI's format."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from contracts.errors import TriplaneError
from inference.errors import BodyTooLong, EngineStopped, NoPolicyYet, NotJson, RequestTooLong, StaleVersion, Withdrawn


async def explain(request: Request, error: Exception) -> JSONResponse:
    """Reply for an error of a handler."""
    status, content = error_of(error)
    return JSONResponse(content, status)


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error of a handler."""
    match error:
        case StaleVersion():
            return 409, error_body(str(error), "stale_policy_version")
        case Withdrawn():
            return 503, error_body(str(error), "withdrawn", "server_error")
        case NoPolicyYet():
            return 503, error_body(str(error), "no_policy_yet", "server_error")
        case RequestTooLong():
            return 400, error_body(str(error), "context_length_exceeded")
        case EngineStopped():
            return 503, error_body(str(error), "engine_stopped", "server_error")
        case BodyTooLong():
            return 413, error_body(str(error), "request_too_large")
        case NotJson():
            return 415, error_body(str(error), "unsupported_media_type")
        case TriplaneError():
            return 400, error_body(str(error), "invalid_request")
    return 500, error_body(f"the server failed ({type(error).__name__}): see its log", "internal", "server_error")


def error_body(message: str, code: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_reply(status: int, message: str, code: str, kind: str = "invalid_request_error") -> JSONResponse:
    """Reply with an error in OpenAI's format."""
    return JSONResponse(error_body(message, code, kind), status_code=status)


async def disconnected(request: Request) -> None:
    """Return when the client disconnects, so that its request frees what it holds."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
