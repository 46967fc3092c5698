"""The HTTP application in this process."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from contracts.chat import SPECIAL_TOKENS, ChatTokenizer, chat_template
from inference.__main__ import main
from inference.errors import EngineStopped
from inference.server.app import Application
from inference.server.serve import Serving, _serve
from tests.inference.conftest import break_engine

pytestmark = pytest.mark.anyio
WORDS = 320


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = Application(Serving("").opener(None), "policy")
    await app.open(directory, "first")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.starlette()), base_url="http://server") as client:
        yield client
    await app.close()


def write_tokenizer(directory: Path, text: str, *, spaced: bool = False) -> Path:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    made.train_from_iterator([text] * 4, trainer)
    made.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(chat_template(spaced=spaced))
    return directory


async def test_text_is_that_of_the_tokenizer_of_the_served_policy(write_policy: Callable[..., Path]) -> None:
    first, second, third = (
        write_policy(name, seed=seed, vocab_size=WORDS) for seed, name in enumerate(("first", "second", "third"))
    )
    write_tokenizer(first, "make it add")
    write_tokenizer(second, "a quick brown fox", spaced=True)
    response = {"role": "tool", "content": "quick"}
    messages = [{"role": "user", "content": "make it add"}, {"role": "assistant", "content": "a quick fox"}, response]
    async with opened(first) as client:
        for version, directory in (("first", first), ("second", second)):
            await client.post("/v1/load_weights", json={"directory": str(directory), "version": version})
            theirs = ChatTokenizer.from_directory(directory)
            prompt = theirs.prompt([("user", "make it add")]) + theirs.policy_turn([], "a quick fox")
            prompt += theirs.environment_turn(["quick"])
            body = {"seed": 3, "max_tokens": 8}
            tokens = await client.post("/v1/completions", json=body | {"prompt": prompt, "return_token_ids": True})
            made = tokens.json()["choices"][0]
            assert made["text"] == theirs.decode(made["token_ids"])
            asked = {"prompt": "make <|im_start|>", "return_token_ids": True}
            of_text = (await client.post("/v1/completions", json=body | asked)).json()["choices"][0]
            assert of_text["prompt_token_ids"] == theirs.encode_text("make <|im_start|>")
            chat = (await client.post("/v1/chat/completions", json=body | {"messages": messages})).json()
            assert chat["usage"]["prompt_tokens"] == len(prompt)
            assert chat["choices"][0]["message"]["content"] == made["text"]
        await client.post("/v1/load_weights", json={"directory": str(third), "version": "third"})
        refused = await client.post("/v1/completions", json={"prompt": "make"})
        assert refused.status_code == 400 and "no tokenizer.json" in refused.json()["error"]["message"]


async def test_a_tokenizer_that_cannot_be_read_keeps_the_policy(write_policy: Callable[..., Path]) -> None:
    first, second = (write_policy(name, vocab_size=WORDS) for name in ("first", "second"))
    write_tokenizer(first, "make it add")
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(second / "tokenizer.json"))
    async with opened(first) as client:
        refused = await client.post("/v1/load_weights", json={"directory": str(second), "version": "second"})
        assert refused.status_code == 400 and "lacks the chat tokens" in refused.json()["error"]["message"]
        long = await client.post("/v1/load_weights", json={"directory": "d" * 5000, "version": "second"})
        assert long.status_code == 400 and "File name too long" in long.json()["error"]["message"]
        assert (await client.get("/version")).json() == {"version": "first"}


async def test_a_body_that_any_web_page_may_send_is_refused(policy: Path) -> None:
    async with opened(policy) as client:
        for path, body in (("withdraw", {"reason": "x"}), ("load_weights", {"directory": "/x", "version": "y"})):
            headers = {"content-type": "text/plain"}
            reply = await client.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert (await client.get("/health")).status_code == 200


async def test_a_server_whose_engine_has_failed_is_neither_healthy_nor_ready(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_engine(monkeypatch)
    async with opened(policy) as client:
        for path in ("/health", "/ready", "/v1/models"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": [1]})).status_code == 503
        for path in ("/health", "/ready", "/v1/models"):
            found = await client.get(path)
            assert (found.status_code, found.json()["error"]["code"]) == (503, "engine_stopped")


async def test_a_server_ends_when_its_engine_fails(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_engine(monkeypatch)
    monkeypatch.setattr("inference.engines.base.LOOK_S", 0.01)
    serving, said = asyncio.create_task(_serve(Serving("127.0.0.1:0"), (policy, "first"), None)), ""
    async with asyncio.timeout(60):
        while (address := re.search(r"at (http://\S+)/v1", said)) is None:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
        async with httpx.AsyncClient(base_url=address[1]) as client:
            assert (await client.post("/v1/completions", json={"prompt": [1]})).status_code == 503
        with pytest.raises(EngineStopped, match="no room"):
            await serving


def test_a_system_error_of_the_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inference", "serve", "--policy", "x" * 300])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1 and "File name too long: shorten it" in said
