"""Bodies of requests to the HTTP servers."""

from __future__ import annotations

from starlette.requests import Request

from inference.errors import BodyTooLong, NotJson

BODY_BYTES = 64 * 1024 * 1024
"""Longest body of a request that is read."""
_JSON = "application/json"


async def read_body(request: Request) -> bytes:
    """The body of a request. Raises BodyTooLong once more than BODY_BYTES have arrived."""
    chunks, size = list[bytes](), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > BODY_BYTES:
            raise BodyTooLong(f"the body is longer than {BODY_BYTES >> 20} MiB: send less in one request")
        chunks.append(chunk)
    return b"".join(chunks)


async def read_json(request: Request) -> bytes:
    """As `read_body`, of a request that says that it sends JSON. Raises NotJson for others.

    A browser lets pages of other origins send everything else, also to a server that only this machine can reach.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise NotJson(f"the body is not declared as JSON: send the header content-type: {_JSON}")
    return await read_body(request)
