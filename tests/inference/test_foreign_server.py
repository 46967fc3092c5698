"""A server that isn't ours knows no policy versions: what it samples may only be stamped with a policy that it shows to
serve.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from inference.engines import OpenAIConfig, open_engine
from inference.engines.base import SamplingParams
from inference.errors import StaleVersion

pytestmark = pytest.mark.anyio
SERVED = "/checkpoints/served"


class _Server(BaseHTTPRequestHandler):
    """What `vllm serve /checkpoints/served --served-model-name policy` says of itself, and completions of one token
    that depends on the seed alone.
    """

    def do_GET(self) -> None:
        card = {"id": "policy", "object": "model", "owned_by": "vllm", "root": SERVED, "parent": None}
        self._reply({"object": "list", "data": [card]})

    def do_POST(self) -> None:
        seed = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["seed"]
        choice = {"token_ids": [seed % 65_537], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
        self._reply({"model": "policy", "choices": [choice]})

    def _reply(self, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


async def test_a_server_that_loaded_the_checkpoint_asked_for_serves_its_version(address: str) -> None:
    engine = open_engine(OpenAIConfig(base_url=address), Path(SERVED), "ab" * 32)
    assert await engine.version() == "ab" * 32
    await engine.close()


async def test_a_server_that_loaded_another_is_never_taken_for_the_policy(address: str) -> None:
    engine = open_engine(OpenAIConfig(base_url=address), Path("/checkpoints/other"), "ab" * 32)
    with pytest.raises(StaleVersion, match="vllm serve /checkpoints/other --served-model-name policy"):
        await engine.version()
    for _ in range(2):
        with pytest.raises(StaleVersion, match="from '/checkpoints/served'"):
            await engine.generate([1, 2], SamplingParams(1.0, 4, seed=0))
    await engine.close()


async def test_turns_of_one_episode_get_random_numbers_of_their_own(address: str) -> None:
    engine = open_engine(OpenAIConfig(base_url=address), Path(SERVED), "ab" * 32)
    params = SamplingParams(1.0, 1, seed=2**64 - 1)
    drawn = [(await engine.generate([1] * length, params)).token_ids[0] for length in (1, 2, 3, 3)]
    assert len(set(drawn)) == 3 and drawn[2] == drawn[3]
    await engine.close()
