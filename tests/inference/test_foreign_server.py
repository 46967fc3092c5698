"""A server that isn't ours knows no policy versions: what it samples may only be stamped with a policy that it shows to
serve.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer

from contracts.artifacts import Artifact
from contracts.chat import TURN_END, TURN_START
from contracts.errors import ConfigError
from contracts.store import open_store
from curation.tasks.suite import TaskSuiteConfig
from curation.tokenizer import build_tokenizer
from inference.engines import BuiltinConfig, OpenAIConfig, SglangConfig, VllmConfig, open_engine
from inference.engines.base import SamplingParams, collect
from inference.engines.outside import OutsideEngine, connected, open_outside
from inference.engines.vllm import VllmEngine
from inference.errors import EngineError, EngineStopped, StaleVersion
from ops import policies

pytestmark = pytest.mark.anyio
SERVED = "/checkpoints/served"


class _Server(BaseHTTPRequestHandler):
    """What `vllm serve /checkpoints/served --served-model-name policy` says of itself, and completions of one token
    that depends on the seed alone. Texts have a token per character, unless it has a tokenizer.
    """

    tokenizer: ClassVar[Tokenizer | None] = None
    raw: ClassVar[tuple[str, bytes] | None] = None
    """Content type and body of completions, in place of its own."""
    status: ClassVar[int] = 200
    """Of completions."""
    asked: ClassVar[dict[str, Any]] = {}
    """Body of the last request for a completion."""

    def do_GET(self) -> None:
        card = {"id": "policy", "object": "model", "owned_by": "vllm", "root": SERVED, "parent": None}
        self._reply({"object": "list", "data": [card]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _Server.asked = body
        token = body.get("seed", 0) % 65_537
        choice: dict[str, Any] = {
            "token_ids": [token],
            "logprobs": {"token_logprobs": [-1.0]},
            "finish_reason": "length",
        }
        if self.tokenizer is not None and isinstance(body["prompt"], str):
            choice["prompt_token_ids"] = self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
        answer = {"model": body["model"], "choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}
        self._reply(answer, self.raw, self.status)

    def _reply(self, reply: dict[str, Any], raw: tuple[str, bytes] | None = None, status: int = 200) -> None:
        kind, body = raw or ("application/json", json.dumps(reply).encode())
        self.send_response(status)
        self.send_header("Content-Type", kind)
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


async def test_preferences_of_the_model_are_overridden(address: str) -> None:
    """Those of generation_config.json, such as Qwen2.5's repetition_penalty, would change the distribution."""
    engine = open_engine(OpenAIConfig(base_url=address), Path(SERVED), "ab" * 32)
    await engine.generate([1], SamplingParams(0.5, 1, 0, (7,)))
    assert {"temperature": 0.5, "top_p": 1, "top_k": -1, "min_p": 0.0}.items() <= _Server.asked.items()
    penalties = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert {**penalties, "stop_token_ids": [7], "ignore_eos": True}.items() <= _Server.asked.items()
    await engine.close()


@pytest.mark.parametrize(
    "reply",
    ["null", "5", "[" * 100_000, '{"choices": [null]}', '{"choices": 5}', '{"error": "lost"}', '{"model": "policy"}'],
)
async def test_reply_of_another_shape_is_an_error_of_the_engine(
    address: str, monkeypatch: pytest.MonkeyPatch, reply: str
) -> None:
    engine, params = open_engine(OpenAIConfig(base_url=address), Path(SERVED), "ab" * 32), SamplingParams(1.0, 4, 0)
    monkeypatch.setattr(_Server, "raw", ("application/json", reply.encode()))
    for call in (engine.generate([1], params), engine.score([1, 2])):
        with pytest.raises(EngineError, match="sent an invalid reply"):
            await call
    monkeypatch.setattr(_Server, "raw", ("text/event-stream", f"data: {reply}\n\n".encode()))
    with pytest.raises(EngineError, match="sent an invalid"):
        await anext(engine.stream([1], params))
    await engine.close()


async def test_a_reply_without_end_is_an_error_of_the_engine(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.engines.http.REPLY_BYTES", 1 << 20)
    engine, params = open_engine(OpenAIConfig(base_url=address), Path(SERVED), "ab" * 32), SamplingParams(1.0, 4, 0)
    monkeypatch.setattr(_Server, "raw", ("application/json", b" " * (2 << 20)))
    with pytest.raises(EngineError, match="more than 1 MiB"):
        await engine.generate([1], params)
    monkeypatch.setattr(_Server, "raw", ("text/event-stream", b"data: " + b" " * (2 << 20)))
    with pytest.raises(EngineError, match="more than 1 MiB"):
        await anext(engine.stream([1], params))
    await engine.close()


@pytest.mark.parametrize("text", ["\u0085", "\u2028", "\u2029", "\U0001f642"])
async def test_events_end_at_line_ends_alone(address: str, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    choice = {"text": text, "token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
    event = json.dumps({"model": "policy", "choices": [choice]}, ensure_ascii=False)
    monkeypatch.setattr(_Server, "raw", ("text/event-stream", f"data: {event}\r\n\r\ndata: [DONE]".encode()))
    engine = open_engine(OpenAIConfig(base_url=address), Path(SERVED), "ab" * 32)
    made = await collect(engine.stream([1], SamplingParams(1.0, 1, 0)))
    assert made.token_ids == [7]
    await engine.close()


@pytest.mark.parametrize("status", [408, 425, 429, 503])
async def test_a_busy_server_has_a_fault_that_another_replica_may_not_have(
    address: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(_Server, "status", status)
    engine = open_engine(OpenAIConfig(base_url=address), Path(SERVED), "ab" * 32)
    with pytest.raises(EngineStopped, match=f"answered {status}"):
        await engine.generate([1], SamplingParams(1.0, 4, 0))
    await engine.close()


@pytest.mark.parametrize(
    ("url", "said"), [("https://engine.invalid", "can't be reached .ProxyError"), ("http://xn--", "is not the address")]
)
async def test_an_address_that_leads_to_no_engine_is_named(
    address: str, monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", address)  # which refuses to connect further
    engine = open_engine(OpenAIConfig(base_url=url), Path(SERVED), "ab" * 32)
    with pytest.raises(EngineError, match=f"{url}/models {said}"):
        await engine.version()
    await engine.close()


@pytest.mark.parametrize("kind", ["vllm", "fleet", "sglang"])
async def test_another_reply_about_the_server_is_an_error_of_the_engine(address: str, kind: str) -> None:
    here = address.removesuffix("/v1")
    urls = f"{here},{here.replace('127.0.0.1', 'localhost')}"  # one odd server must not end a fleet
    config = SglangConfig(kind="sglang", base_url=here) if kind == "sglang" else VllmConfig(base_url=here)
    engine = open_engine(VllmConfig(base_url=urls) if kind == "fleet" else config, Path(SERVED), "ab" * 32)
    with pytest.raises(EngineError, match=r"/(weight|server)_info sent an invalid reply"):
        await (engine.mark() if isinstance(engine, VllmEngine) else engine.version())
    await engine.close()


@pytest.fixture
def outside(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """What stands for the server's policy."""
    store = open_store(str(tmp_path))
    tokenizer = build_tokenizer(TaskSuiteConfig(train=1, gate=1, held_out=1, unseen=1), store).directory()
    server = OpenAIConfig(base_url=address)
    with pytest.raises(ConfigError, match="has no model 'other', its first one is 'policy'"):
        policies.outside_policy(store, server, "other", tokenizer)
    with pytest.raises(ConfigError, match=f"the tokenizer in {tokenizer} is not that of 'policy'"):
        policies.outside_policy(store, server, None, tokenizer)  # the server counts characters
    own = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    first, last = (own.token_to_id(token) for token in (TURN_START, TURN_END))
    text = own.to_str().replace(TURN_START, "<|swap|>").replace(TURN_END, TURN_START).replace("<|swap|>", TURN_END)
    swapped = Tokenizer.from_str(text)
    assert (swapped.token_to_id(TURN_END), swapped.token_to_id(TURN_START)) == (first, last)
    monkeypatch.setattr(_Server, "tokenizer", swapped)
    with pytest.raises(ConfigError, match=f"the tokenizer in {tokenizer} is not that of 'policy'"):
        policies.outside_policy(store, server, None, tokenizer)  # as many tokens, other ids of markup
    monkeypatch.setattr(_Server, "tokenizer", own)
    return policies.outside_policy(store, server, None, tokenizer)


async def test_tokens_of_an_outside_policy_have_its_digest(address: str, outside: Artifact) -> None:
    assert outside.json("policy.json") == {"model": "policy", "version": "policy", "pinned": False}
    async with open_outside(outside, OpenAIConfig(base_url=address)) as engine:
        made = await engine.generate([1, 2], SamplingParams(1.0, 4, seed=0))
        assert made.spans == [(outside.ref.digest, 0, 1)] and await engine.version() == outside.ref.digest
    with pytest.raises(EngineError, match="name it by the server's URL"):
        async with open_outside(outside, BuiltinConfig()):
            pass


async def test_tokens_of_another_model_are_never_taken_for_an_outside_policy(address: str, outside: Artifact) -> None:
    async with connected(OpenAIConfig(base_url=address), "renamed") as inner:
        with pytest.raises(StaleVersion, match="samples with 'renamed' now, the policy is 'policy'"):
            await OutsideEngine(inner, "policy", outside.ref.digest).generate([1], SamplingParams(1.0, 4, seed=0))
