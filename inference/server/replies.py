"""Replies of the HTTP servers that are no results: errors in OpenAI's format."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from contracts.errors import TriplaneError
from inference.errors import EngineStopped, NoPolicyYet, RequestTooLong, StaleVersion, Withdrawn


async def explain(request: Request, error: Exception) -> JSONResponse:
    """Reply for an error of a handler."""
    match error:
        case StaleVersion():
            return error_reply(409, str(error), "stale_policy_version")
        case Withdrawn():
            return error_reply(503, str(error), "withdrawn", kind="server_error")
        case NoPolicyYet():
            return error_reply(503, str(error), "no_policy_yet", kind="server_error")
        case RequestTooLong():
            return error_reply(400, str(error), "context_length_exceeded")
        case EngineStopped():
            return error_reply(503, str(error), "engine_stopped", kind="server_error")
        case TriplaneError():
            return error_reply(400, str(error), "invalid_request")
    said = f"the server failed ({type(error).__name__}): see its log"
    return error_reply(500, said, "internal", kind="server_error")


def error_reply(status: int, message: str, code: str, kind: str = "invalid_request_error") -> JSONResponse:
    """Error in OpenAI's format."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status_code=status)


async def disconnected(request: Request) -> None:
    """Return when the client disconnects, so that its request frees what it holds."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
