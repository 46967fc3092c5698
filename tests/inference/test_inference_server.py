import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from contracts.chat import SPECIAL_TOKENS, ChatTokenizer, ToolCallText
from inference.engines import BuiltinConfig, OpenAIConfig, open_engine
from inference.engines.base import SamplingParams, collect
from inference.engines.builtin import BuiltinEngine
from inference.engines.delegating import DelegatingEngine
from inference.engines.openai import OpenAIEngine
from inference.errors import EngineError, EngineUnreachable, RequestTooLong, StaleVersion
from inference.server.app import Application

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
WORDS = 320


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, checkpoint_writer: Callable[..., Path]
) -> Iterator[tuple[str, Path, Path]]:
    """(base URL, the policy served, another one) of a real server process."""
    root = tmp_path_factory.mktemp("served")
    first, second = (
        checkpoint_writer(root / name, seed, vocab_size=WORDS) for seed, name in enumerate(("first", "second"))
    )
    text = Tokenizer(models.BPE())
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    text.train_from_iterator(["def add(a, b): return a + b"] * 4, trainer)
    text.save(str(first / "tokenizer.json"))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "inference",
            "serve",
            "--policy",
            str(first),
            "--listen",
            "127.0.0.1:0",
            "--threads",
            "1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    found = re.search(r"policy first at (http://\S+/v1)", process.stdout.readline())
    assert found, process.stderr.read()
    yield found[1], first, second
    process.send_signal(signal.SIGINT)
    assert process.wait(20) in (0, 130, -signal.SIGINT)
    assert "Traceback" not in process.stderr.read()


@pytest.fixture
async def client(served: tuple[str, Path, Path]) -> Any:
    async with httpx.AsyncClient(base_url=served[0], timeout=60) as http:
        yield http
        await http.post("/load_weights", json={"directory": str(served[1]), "version": "first"})


async def test_the_client_gives_the_very_completions_of_the_engine(served: tuple[str, Path, Path]) -> None:
    url, directory, _ = served
    local = open_engine(BuiltinConfig(threads=1), directory, "first")
    remote = open_engine(OpenAIConfig(base_url=url), directory, "first")
    assert await remote.version() == "first"
    for seed in range(3):
        params = SamplingParams(0.9, 20, seed=2**64 - 1 - seed, stop_token_ids=(5,))
        mine = await local.generate([1, 2, 3], params)
        assert await remote.generate([1, 2, 3], params) == mine
        assert await remote.score([1, 2, 3, *mine.token_ids], 0.9) == await local.score([1, 2, 3, *mine.token_ids], 0.9)
    with pytest.raises(RequestTooLong, match="256"):
        await remote.generate([1] * 256, params)
    with pytest.raises(EngineError, match="tokenizer"):
        await remote.generate([WORDS], params)
    await local.close()
    await remote.close()


async def test_loading_weights_changes_scores_and_old_clients_are_refused(
    served: tuple[str, Path, Path], client: httpx.AsyncClient
) -> None:
    url, _, second = served
    old, new = OpenAIEngine(url, "policy", version="first"), OpenAIEngine(url, "policy")
    before = await old.score([1, 2, 3, 4])
    await new.load_weights(second, "second")
    expected = BuiltinEngine(second, "second")
    assert await new.version() == "second"
    assert await new.score([1, 2, 3, 4]) == await expected.score([1, 2, 3, 4]) != before
    with pytest.raises(StaleVersion, match=r"first was requested, but second is served"):
        await old.generate([1], SamplingParams(1.0, 2, seed=0))
    for engine in (old, new, expected):
        await engine.close()


class ReplacedEngine(DelegatingEngine):
    """Loads another policy before it admits a score."""

    def __init__(self, inner: BuiltinEngine, directory: Path) -> None:
        super().__init__(inner)
        self._directory = directory

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        await self.inner.load_weights(self._directory, "second")
        return await self.inner.score(token_ids, temperature)


@pytest.mark.parametrize("pin", ["first", "second", None])
async def test_a_score_at_a_reload_is_refused_instead_of_labeled_with_the_old_version(
    tmp_path: Path, checkpoint_writer: Callable[..., Path], pin: str | None
) -> None:
    first, second = (checkpoint_writer(tmp_path / str(seed), seed) for seed in range(2))
    engine = ReplacedEngine(BuiltinEngine(first, "first", threads=1), second)
    application = Application(lambda directory, version: engine, "policy")
    await application.open(first, "first")
    transport = httpx.ASGITransport(application.starlette())
    headers = {} if pin is None else {"X-Policy-Version": pin}
    async with httpx.AsyncClient(transport=transport, base_url="http://server/v1") as http:
        reply = await http.post("/score", json={"token_ids": [1, 2, 3]}, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "stale_policy_version")
    await application.close()


async def test_a_request_in_flight_at_a_reload_ends_with_both_versions(
    served: tuple[str, Path, Path], client: httpx.AsyncClient
) -> None:
    url, _, second = served
    engine = OpenAIEngine(url, "policy")
    flying = [asyncio.create_task(engine.generate([1, 2], SamplingParams(1.0, 250, seed))) for seed in range(8)]
    await asyncio.sleep(0.15)
    await engine.load_weights(second, "second")
    seen = {tuple(version for version, _, _ in completion.spans) for completion in await asyncio.gather(*flying)}
    assert ("first", "second") in seen
    await engine.close()


async def test_chat_answers_in_text_with_the_prompt_that_the_chat_contract_makes(
    served: tuple[str, Path, Path], client: httpx.AsyncClient
) -> None:
    tokenizer = ChatTokenizer.from_directory(served[1])
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
    messages = [
        {"role": "user", "content": "fix it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "def add(a, b):"},
    ]
    body = {"messages": messages, "seed": 7, "max_tokens": 12, "logprobs": True}
    answer = (await client.post("/chat/completions", json=body)).json()
    again = (await client.post("/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["logprobs"] == again["choices"][0]["logprobs"]
    prompt = tokenizer.prompt([("user", "fix it")]) + tokenizer.policy_turn([ToolCallText("read", {"path": "a.py"})])
    prompt += tokenizer.environment_turn(["def add(a, b):"])
    stops = [tokenizer.end_of_turn, tokenizer.pad]
    raw = {"prompt": prompt, "seed": 7, "max_tokens": 12, "logprobs": 1, "stop_token_ids": stops}
    direct = (await client.post("/completions", json=raw)).json()
    assert answer["usage"] == direct["usage"]
    logprobs = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert logprobs == direct["choices"][0]["logprobs"]["token_logprobs"]


async def events_of(
    client: httpx.AsyncClient, body: dict[str, Any], path: str = "/completions"
) -> list[dict[str, Any]]:
    """Events of a stream, which must end with [DONE]."""
    async with client.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_stream_has_the_completion_in_parts(served: tuple[str, Path, Path], client: httpx.AsyncClient) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 200, "seed": 5, "logprobs": 1, "return_token_ids": True}
    whole = (await client.post("/completions", json=body)).json()
    found = await events_of(client, body | {"stream_options": {"include_usage": True}})
    usage, parts = found.pop(), [each["choices"][0] for each in found]
    assert usage["choices"] == [] and usage["usage"] == whole["usage"] and "usage" not in found[0]
    assert len(parts) > 1 and len({each["id"] for each in found}) == 1
    (choice,) = whole["choices"]
    assert "".join(each["text"] for each in parts) == choice["text"]
    assert [token for each in parts for token in each["token_ids"]] == choice["token_ids"]
    logprobs = [value for each in parts for value in each["logprobs"]["token_logprobs"]]
    assert logprobs == choice["logprobs"]["token_logprobs"]
    assert [each["finish_reason"] for each in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    plain = await events_of(client, {"prompt": "def", "max_tokens": 3})
    assert {"token_ids", "policy_spans"}.isdisjoint(plain[0]["choices"][0])


async def test_a_streamed_message_has_the_content_of_the_whole_one(client: httpx.AsyncClient) -> None:
    for seed in range(3):
        body = {"messages": [{"role": "user", "content": "fix it"}], "seed": seed, "max_tokens": 60, "logprobs": True}
        (whole,) = (await client.post("/chat/completions", json=body)).json()["choices"]
        found = [each["choices"][0] for each in await events_of(client, body, "/chat/completions")]
        deltas = [each["delta"] for each in found]
        assert [each.get("role") for each in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(each["content"] for each in deltas) == (whole["message"]["content"] or "")
        assert [entry for each in found for entry in each["logprobs"]["content"]] == whole["logprobs"]["content"]
        assert found[-1]["finish_reason"] == whole["finish_reason"]


async def test_the_client_streams_what_the_engine_streams(served: tuple[str, Path, Path]) -> None:
    local = open_engine(BuiltinConfig(threads=1), served[1], "first")
    remote = open_engine(OpenAIConfig(base_url=served[0]), served[1], "first")
    params = SamplingParams(0.9, 200, seed=2**64 - 1, stop_token_ids=(5,))
    pieces = [piece async for piece in remote.stream([1, 2, 3], params)]
    assert len(pieces) > 1 and remote.streams(params)
    assert await collect(remote.stream([1, 2, 3], params)) == await local.generate([1, 2, 3], params)
    with pytest.raises(RequestTooLong, match="256"):
        await collect(remote.stream([1] * 256, params))
    with pytest.raises(EngineError, match="use generate"):
        await collect(remote.stream([1], SamplingParams(1.0, 2, 0, routing_from=0)))
    await local.close()
    await remote.close()


async def test_a_stream_at_a_reload_has_both_versions_and_pins_nothing(
    served: tuple[str, Path, Path], client: httpx.AsyncClient
) -> None:
    engine = OpenAIEngine(served[0], "policy")
    other = OpenAIEngine(served[0], "policy", version="another")
    with pytest.raises(StaleVersion, match="another was requested, but first is served"):
        await collect(other.stream([1], SamplingParams(1.0, 2, 0)))
    stream = engine.stream([1, 2], SamplingParams(1.0, 250, 3))
    first = await anext(stream)
    await engine.load_weights(served[2], "second")
    rest = [piece async for piece in stream]
    assert first.spans[0][0] == "first" and rest[-1].spans[-1][0] == "second"
    pinned = await client.post(
        "/completions", json={"prompt": [1], "stream": True}, headers={"x-policy-version": "first"}
    )
    assert pinned.status_code == 400 and "send stream=false" in pinned.json()["error"]["message"]
    for each in (engine, other):
        await each.close()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "those of a stream"),
        ("/completions", {"prompt": [WORDS], "stream": True}, "tokenizer"),
        ("/chat/completions", {"messages": [{"role": "tool", "content": "a"}], "stream": True}, "message"),
        ("/completions", {"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ("/completions", {"prompt": [1], "top_pp": 0.5}, "top_pp"),
        ("/completions", {"prompt": []}, "at least one token"),
        ("/completions", {"prompt": [2**63]}, "prompt"),
        ("/completions", {"prompt": [1], "stop_token_ids": [10**20]}, "stop_token_ids.0: Input should be less than"),
        ("/score", {"token_ids": [1, 2**63]}, "token_ids.1: Input should be less than"),
        (
            "/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "read", "arguments": '{"path": "\\ud83d"}'}}],
                    },
                    {"role": "tool", "content": "b"},
                ]
            },
            "not JSON",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "last message",
        ),
        ("/score", {"token_ids": [1], "temperature": 0}, "temperature"),
        ("/load_weights", {"directory": "/nowhere", "version": "x"}, "config.json"),
    ],
)
async def test_a_bad_request_gets_an_error_in_openais_shape(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], message: str
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_health_models_and_version_answer(client: httpx.AsyncClient, served: tuple[str, Path, Path]) -> None:
    root = served[0].removesuffix("/v1")
    assert (await client.get(f"{root}/health")).json() == {"status": "ok"}
    assert (await client.get(f"{root}/version")).json() == {"version": "first"}
    assert (await client.get("/models")).json()["data"][0]["id"] == "policy"


async def test_disconnected_client_frees_its_slot(served: tuple[str, Path, Path], client: httpx.AsyncClient) -> None:
    engine = OpenAIEngine(served[0], "policy", connections=600)
    endless = [asyncio.create_task(engine.generate([1], SamplingParams(1.0, 250, seed))) for seed in range(300)]
    await asyncio.sleep(0.3)
    for task in endless:
        task.cancel()
    await asyncio.gather(*endless, return_exceptions=True)
    streams = [engine.stream([1], SamplingParams(1.0, 250, seed)) for seed in range(300)]
    await asyncio.gather(*(anext(each) for each in streams))
    await asyncio.gather(*(each.aclose() for each in streams))
    completion = await asyncio.wait_for(engine.generate([1, 2], SamplingParams(1.0, 3, seed=0)), 10)
    assert len(completion.token_ids) == 3
    await engine.close()


async def test_an_unreachable_server_is_named_after_bounded_retries() -> None:
    engine = OpenAIEngine("http://127.0.0.1:9/v1", "policy", retries=1)
    with pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1:9.* 2 attempts"):
        await engine.version()
    await engine.close()
    engine = OpenAIEngine("http://127.0.0.1:80800/v1", "policy")
    with pytest.raises(EngineError, match=r"80800/.* is not the address of an engine .*port"):
        await engine.version()
    await engine.close()


@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_answers_what_was_accepted_and_exits_with_0(served: tuple[str, Path, Path], signals: int) -> None:
    """A second signal ends the time for late requests, not the requests in flight."""
    drain_s = 2 if signals == 1 else 600
    command = [
        "serve",
        "--policy",
        str(served[1]),
        "--listen",
        "127.0.0.1:0",
        "--threads",
        "1",
        "--drain",
        str(drain_s),
    ]
    process = subprocess.Popen([sys.executable, "-m", "inference", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"at (http://\S+/v1)", process.stdout.readline())
    assert found
    body = {"prompt": [1, 2], "max_tokens": 250, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.Client(base_url=found[1], timeout=120) as http, ThreadPoolExecutor(8) as threads:

        def ask(begun: threading.Event) -> int:
            with http.stream("POST", "/completions", json=body) as reply:
                lines = []
                for line in reply.iter_lines():
                    begun.set()
                    lines.append(line)
            assert reply.status_code == 200 and "data: [DONE]" in lines
            *_, last = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {"))
            return int(last["usage"]["completion_tokens"])

        def in_flight() -> list[Future[int]]:
            """Requests that have begun to be answered."""
            begun = [threading.Event() for _ in range(8)]
            asked = [threads.submit(ask, each) for each in begun]
            assert all(each.wait(120) for each in begun)
            return asked

        asked, began = in_flight(), time.monotonic()
        process.terminate()
        if signals == 2:
            assert process.stdout.readline().startswith("draining: ")
            asked += in_flight()  # late ones
            process.terminate()
        assert {each.result() for each in asked} == {250}
    assert process.wait(120) == 0
    assert (time.monotonic() - began >= 2) or signals == 2
    process.stdout.close()


def test_unknown_policy_is_a_one_line_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inference", "serve", "--policy", "abcdef123", "--store", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "neither a directory nor a checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
