"""Which hosts a server that listens on this machine only is asked by."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inference.server.listening import own_hosts_only

pytestmark = pytest.mark.anyio


async def answer(request: Request) -> Response:
    return Response("yes")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("listens", ["127.0.0.1", "::1", "localhost", "0.0.0.0"])
@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("10.1.2.3:8000", True),
        ("router", True),
        ("a.localhost:1", True),
        ("evil.example", False),
        ("evil.example.:8000", False),
        ("127.0.0.1.evil.example:8000", False),
        ("localhost.evil.example", False),
    ],
)
async def test_a_page_of_a_name_that_leads_to_loopback_reaches_no_server_there(
    listens: str, host: str, own: bool
) -> None:
    app = own_hosts_only(Starlette(routes=[Route("/", answer)]), listens)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        reply = await client.get("/", headers={"host": host})
    if own or listens == "0.0.0.0":
        assert reply.text == "yes"
    else:
        assert reply.status_code == 403 and "send Host: localhost" in reply.json()["error"]["message"]
