"""Sampling under a grammar and from a nucleus: what is drawn, with which log probability, from which recorded set."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contracts.chat import CALL_END, CALL_START, ChatTokenizer, ToolCallText, parse_turn, render_call
from contracts.rpc import caller
from contracts.supports import WHOLE
from curation.tokenizer import train_tokenizer
from envd.tools import TOOLSETS, ToolSpec, toolset_named
from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.errors import EngineError
from inference.grammar import compiled as compiling
from inference.grammar import matcher as matching
from inference.grammar.compiled import Vocabulary, compiled
from inference.grammar.matcher import Matcher
from inference.grammar.replay import with_supports
from inference.grammar.tools import tools_grammar
from tests.inference.conftest import logits_after, write_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ENDLESS = '{"type":"structural_tag","format":{"type":"grammar","grammar":"root ::= root"}}'
SIZE = 416
"""Of the policy's vocabulary, some more than the tokenizer's."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy with a tokenizer, which begins calls and ends turns more often than other tokens."""
    directory = write_checkpoint(tmp_path_factory.mktemp("grammar") / "policy", 0, vocab_size=SIZE)
    texts = ['{"name":"read","arguments":{"path":"a.py","start":12}}\n', "def f(x): return x + 1\n", "done, it works\n"]
    tokenizer = train_tokenizer(texts * 40, ["read", "path", "arguments"], 400)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    return directory


@pytest.fixture(scope="module")
def tokenizer(policy: Path) -> ChatTokenizer:
    return ChatTokenizer.from_directory(policy)


@pytest.fixture
def engine(policy: Path) -> Iterator[BuiltinEngine]:
    made = BuiltinEngine(policy, "v", threads=1)
    yield made
    asyncio.run(made.close())


def requests(tokenizer: ChatTokenizer, count: int, **changes: Any) -> list[tuple[list[int], SamplingParams]]:
    settings = {"top_p": 1.0, "grammar": tools_grammar(tokenizer), "max_tokens": 90, "temperature": 1.5} | changes
    stops = (tokenizer.end_of_turn, tokenizer.pad)
    prompt = tokenizer.prompt([("user", "mend it")])
    return [(prompt, SamplingParams(seed=seed, stop_token_ids=stops, **settings)) for seed in range(count)]


async def answers(engine: BuiltinEngine, wanted: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(*each) for each in wanted)))


def calling(
    tokenizer: ChatTokenizer, count: int, toolset: str = "", **changes: Any
) -> list[tuple[list[int], SamplingParams]]:
    """Requests whose turns are nothing but calls, so that random weights make many."""
    tag = json.loads(tools_grammar(tokenizer, toolset))
    tag["format"] |= {"at_least_one": True, "stop_after_first": True}
    return requests(tokenizer, count, grammar=json.dumps(tag), **changes)


@pytest.mark.parametrize("toolset", TOOLSETS)
async def test_every_call_of_random_weights_that_ends_is_valid(
    engine: BuiltinEngine, tokenizer: ChatTokenizer, toolset: str
) -> None:
    tools: dict[str, ToolSpec] = dict(toolset_named(toolset).listed)
    ended, names = 0, set()
    for found in await answers(engine, calling(tokenizer, 40, toolset, max_tokens=160)):
        if found.finish_reason == "length":
            continue
        turn = parse_turn(tokenizer.decode(found.token_ids[:-1]))
        assert turn.error is None and len(turn.calls) == 1
        (call,) = turn.calls
        fault = tools[call.name].wrong(call.arguments)
        assert fault is None or "null character" in fault
        ended, names = ended + 1, names | {call.name}
    assert ended >= 10 and len(names) >= 3
    free = await answers(engine, requests(tokenizer, 16))
    assert all(
        tokenizer.call_end not in each.token_ids or CALL_START in tokenizer.decode(each.token_ids) for each in free
    )


@pytest.mark.parametrize("top_p", [1.0, 0.8])
async def test_log_probabilities_are_those_over_the_recorded_supports(
    policy: Path, engine: BuiltinEngine, tokenizer: ChatTokenizer, top_p: float
) -> None:
    wanted, forced, restricted = calling(tokenizer, 12, top_p=top_p), 0, 0
    grammar = compiled(wanted[0][1].grammar or "", Vocabulary.of(policy / "tokenizer.json", SIZE), (0, 2))
    for (prompt, params), found in zip(wanted, await answers(engine, wanted), strict=True):
        assert found.supports is not None
        logits = logits_after(policy, prompt, found.token_ids) / params.temperature
        assert found.supports.fault(np.array(found.token_ids), SIZE) is None
        masks = found.supports.masks(np.arange(len(found.token_ids)), SIZE)
        masked = logits.masked_fill(~torch.from_numpy(masks), -torch.inf).log_softmax(-1)
        expected = masked.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(found.logprobs, expected, atol=2e-5)
        shares = (logits.double().softmax(-1) * torch.from_numpy(masks)).sum(-1).log()
        np.testing.assert_allclose(found.log_mass, shares, atol=2e-5)
        matcher = Matcher(grammar, SIZE)
        for place, token in enumerate(found.token_ids):
            allowed = matcher.mask()
            assert allowed is not None
            alone = allowed.sum() == 1
            assert (found.forced is not None and found.forced[place]) == alone
            forced, restricted = forced + alone, restricted + (found.supports.numbers[place] != WHOLE)
            if top_p == 1.0:
                np.testing.assert_array_equal(masks[place], allowed)
            else:
                nucleus = logits[place].masked_fill(~torch.from_numpy(allowed), -torch.inf).softmax(-1)
                kept, inside = masks[place], nucleus[torch.from_numpy(masks[place])]
                assert not (kept & ~allowed).any() and inside.sum() >= top_p - 1e-6
                assert inside.sum() - inside.min() < top_p + 1e-6  # without the least probable one it is too little
                assert inside.min() >= nucleus[torch.from_numpy(~kept)].max() - 1e-9
            matcher.accept(token)
    assert forced and restricted


@pytest.mark.parametrize("top_p", [1.0, 0.6])
async def test_neither_drafts_nor_neighbours_change_a_restricted_token(
    policy: Path, tokenizer: ChatTokenizer, top_p: float
) -> None:
    wanted = [*calling(tokenizer, 10, top_p=top_p, temperature=0.4), *requests(tokenizer, 6), *calling(tokenizer, 4)]
    wanted += requests(tokenizer, 4, grammar=None)
    plain = BuiltinEngine(policy, "v", threads=1, prefix_bytes=0, drafts=False)
    expected = [await plain.generate(*each) for each in wanted]
    drafting = BuiltinEngine(policy, "v", threads=1)
    for _ in range(2):
        together = await answers(drafting, wanted)
        alone = [await drafting.generate(*each) for each in wanted]
        assert together == alone == expected
        for own, other in zip(alone, expected, strict=True):
            assert (own.supports is None) == (other.supports is None)
            if own.supports is not None and other.supports is not None:
                places = np.arange(len(own.token_ids))
                np.testing.assert_array_equal(own.supports.masks(places, SIZE), other.supports.masks(places, SIZE))
    await plain.close()
    await drafting.close()


def test_a_vocabulary_is_the_same_in_every_locale(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Vocabulary.of(policy / "tokenizer.json", SIZE)
    assert any(not token.isascii() for token in expected.tokens)
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "latin-1")
    compiling._read.cache_clear()
    assert Vocabulary.of(policy / "tokenizer.json", SIZE) == expected


async def test_supports_of_another_engine_follow_from_its_tokens(
    policy: Path, engine: BuiltinEngine, tokenizer: ChatTokenizer
) -> None:
    """As vLLM returns completions: without supports, with some rounding."""
    vocabulary = Vocabulary.of(policy / "tokenizer.json", SIZE)
    wanted = calling(tokenizer, 6)
    checked = 0
    for (_, params), own in zip(wanted, await answers(engine, wanted), strict=True):
        bare = replace(own, supports=None, forced=None, log_mass=None, logprobs=[each - 1e-6 for each in own.logprobs])
        found = with_supports(bare, params, vocabulary)
        assert found.supports is not None and own.supports is not None and found.forced == own.forced
        places = np.arange(len(own.token_ids))
        np.testing.assert_array_equal(found.supports.masks(places, SIZE), own.supports.masks(places, SIZE))
        foreign = replace(bare, token_ids=[own.token_ids[0], tokenizer.pad, *own.token_ids[2:]])
        with pytest.raises(EngineError, match="which the grammar does not allow after 1 tokens"):
            with_supports(foreign, params, vocabulary)
        if own.forced:
            place = own.forced.index(True)
            assert found.logprobs[place] == 0.0
            raw = replace(bare, logprobs=[*bare.logprobs[:place], -3.0, *bare.logprobs[place + 1 :]])
            with pytest.raises(EngineError, match=r"log probability -3 instead of 0.*processed_logprobs"):
                with_supports(raw, params, vocabulary)
            checked += 1
    assert checked


async def test_forced_tokens_take_no_pass_of_their_own(policy: Path, tokenizer: ChatTokenizer) -> None:
    engine = BuiltinEngine(policy, "v", threads=1, drafts=False)
    elements = [{"type": "token", "token": 20 + place} for place in range(12)]
    chain = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})
    (asked,) = requests(tokenizer, 1, grammar=chain)
    found = await engine.generate(*asked)
    assert found.token_ids[:-1] == list(range(20, 32)) and found.finish_reason == "stop"
    assert found.forced == [True] * 12 + [False] and found.logprobs[:12] == [0.0] * 12
    assert engine.passes == 3  # the prompt, and 8 tokens in each of the next
    await engine.close()


def test_the_grammar_of_a_template_takes_what_the_template_writes(policy: Path, tokenizer: ChatTokenizer) -> None:
    calls = [
        {"path": "a.py", "start": 1, "end": 20},
        {"path": "b", "content": 'x = "\\n"\n</tool_call\t\u00e9\U0001f600'},
        {"pattern": "[a-z]+", "path": "."},
        {"command": "ls <x> </tool", "timeout_s": 1.5},
    ]
    for spaced in (False, True):
        chat = ChatTokenizer.from_directory(policy, spaced=spaced)
        vocabulary = Vocabulary.of(policy / "tokenizer.json", SIZE)
        grammar = compiled(tools_grammar(chat), vocabulary, (chat.end_of_turn, chat.pad))
        texts = [
            ToolCallText(name, each) for name, each in zip(("read", "write", "search", "exec"), calls, strict=True)
        ]
        matcher = Matcher(grammar, SIZE)
        for token in chat.policy_turn(texts, "I look first"):
            mask = matcher.mask()
            assert mask is None or mask[token], chat.decode([token])
            matcher.accept(token)
        assert parse_turn(chat.decode(chat.policy_turn(texts))).error is None
        closing = f"{render_call(texts[1], spaced=spaced)[: -len(CALL_END) - 4]}{CALL_END}"
        matcher = Matcher(grammar, SIZE)
        refused = []
        for token in [chat._ids[CALL_START], *chat.encode_text(closing[len(CALL_START) :])]:
            mask = matcher.mask()
            if mask is not None and not mask[token]:
                refused.append(token)
                break
            matcher.accept(token)
        assert refused, "a string must not spell the end of its call"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"grammar": "{"}, "does not compile"),
        ({"grammar": '{"type":"structural_tag","format":{"type":"nope"}}'}, "does not compile"),
        (
            {"grammar": '{"type":"structural_tag","format":{"type":"grammar","grammar":"root ::= root"}}'},
            "can begin the",
        ),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"stop_token_ids": ()}, "needs stop_token_ids"),
    ],
)
async def test_a_bad_restriction_is_one_clear_error_and_the_engine_goes_on(
    engine: BuiltinEngine, tokenizer: ChatTokenizer, changes: dict[str, Any], fault: str
) -> None:
    ((prompt, params),) = requests(tokenizer, 1)
    bad = SamplingParams(**{**vars(params), **changes})
    with pytest.raises(EngineError, match=fault):
        await engine.generate(prompt, bad)
    with pytest.raises(EngineError, match=fault):
        await anext(engine.stream(prompt, bad))
    assert (await engine.generate(prompt, params)).token_ids


async def test_a_grammar_that_the_tokenizer_can_not_write_ends_its_request_alone(
    policy: Path, tokenizer: ChatTokenizer
) -> None:
    """After the token 9 the grammar asks for a token that the tokenizer does not have."""
    engine = BuiltinEngine(policy, "v", threads=1)
    elements = [{"type": "token", "token": 9}, {"type": "token", "token": SIZE - 1}]
    dead = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})
    (bad,) = requests(tokenizer, 1, grammar=dead)
    good = requests(tokenizer, 3)
    found = await asyncio.gather(*(engine.generate(*each) for each in (bad, *good)), return_exceptions=True)
    assert isinstance(found[0], EngineError) and "allows no token of the policy's vocabulary after 9" in str(found[0])
    assert all(isinstance(each, Completion) for each in found[1:])
    await engine.close()


def test_a_grammar_that_explodes_is_refused_in_bounded_time(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "SECONDS", 4)
    many = {f"p{place}": {"type": "string", "pattern": "([a-z]{1,50}[0-9]?){1,50}"} for place in range(400)}
    schema = {"type": "json_schema", "json_schema": {"type": "object", "properties": many}}
    with pytest.raises(EngineError, match="takes more than 4 s or 16 GiB"):
        compiled(
            json.dumps({"type": "structural_tag", "format": schema}),
            Vocabulary.of(policy / "tokenizer.json", SIZE),
            [2],
        )


async def test_a_grammar_that_is_slow_to_follow_ends_its_request_alone(
    policy: Path, engine: BuiltinEngine, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ambiguous = {"type": "grammar", "grammar": 'root ::= root root | [^x] | ""'}
    grammar = json.dumps({"type": "structural_tag", "format": ambiguous})
    ((prompt, params),) = requests(tokenizer, 1, grammar=grammar, max_tokens=30)
    begun = await engine.generate(prompt, params)
    assert len(begun.token_ids) == 30
    monkeypatch.setattr(matching, "TOKEN_S", 0.001)
    longer = replace(params, max_tokens=200)
    good = requests(tokenizer, 3)
    found = await asyncio.gather(
        *(engine.generate(*each) for each in ((prompt, longer), *good)), return_exceptions=True
    )
    assert isinstance(found[0], EngineError) and "takes more than 1 ms of processor time a token" in str(found[0])
    assert all(isinstance(each, Completion) for each in found[1:])
    monkeypatch.setattr(matching, "TOKEN_S", 0.00001)
    with pytest.raises(EngineError, match="of processor time a token"):
        await engine.generate([*prompt, *begun.token_ids], replace(longer, begun=30))
    with pytest.raises(EngineError, match="of processor time a token"):
        with_supports(begun, params, Vocabulary.of(policy / "tokenizer.json", SIZE))


async def test_a_slow_grammar_holds_up_no_known_one_and_no_thread_of_the_pool(
    engine: BuiltinEngine, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((prompt, params),) = requests(tokenizer, 1)
    await engine.generate(prompt, params)
    real, begun, go_on = compiling._try, threading.Event(), threading.Event()

    def slow(*key: Any) -> None:
        begun.set()
        go_on.wait(60)
        real(*key)

    monkeypatch.setattr(compiling, "_try", slow)
    new = replace(params, grammar=ENDLESS, stop_token_ids=(2, 3))
    waiting = [asyncio.create_task(engine.generate(prompt, new)) for _ in range(40)]
    try:
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(engine.generate(prompt, params), 20)).token_ids
        assert not any(each.done() for each in waiting)
    finally:
        go_on.set()
    assert all(isinstance(each, EngineError) for each in await asyncio.gather(*waiting, return_exceptions=True))


async def test_many_new_grammars_of_one_key_delay_that_of_another_by_one(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, go_on = list[str](), threading.Event()

    def refuse(grammar: str, *others: Any) -> None:
        tried.append(grammar)
        go_on.wait(60)
        raise EngineError("no")

    async def compiled_for(key: bytes, grammar: str) -> None:
        caller.known_by(key)
        await compiling.compiled_async(grammar, vocabulary, [2])

    monkeypatch.setattr(compiling, "_try", refuse)
    vocabulary = Vocabulary.of(policy / "tokenizer.json", SIZE)
    asked = [*((b"one", f"one {number}") for number in range(4)), (b"other", "other")]
    works = [asyncio.create_task(compiled_for(*each)) for each in asked]
    await asyncio.sleep(0)
    go_on.set()
    assert all(isinstance(each, EngineError) for each in await asyncio.gather(*works, return_exceptions=True))
    assert tried.index("other") <= 2 and tried[-1] == "one 3"


def test_a_refused_grammar_is_tried_once_in_a_while(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(grammar: str, *others: Any) -> None:
        tried.append(grammar)
        raise EngineError("takes more than 60 s")

    def ask(times: int) -> None:
        for _ in range(times):
            with pytest.raises(EngineError, match="takes more than 60 s"):
                compiled("costly", Vocabulary.of(policy / "tokenizer.json", SIZE), [2])

    monkeypatch.setattr(compiling, "_try", refuse)
    monkeypatch.setattr(compiling, "REFUSED_S", 0.0)
    ask(2)
    monkeypatch.undo()
    monkeypatch.setattr(compiling, "_try", refuse)
    ask(3)
    assert len(tried) == 3


def test_without_xgrammar_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['xgrammar'] = None\n"
        "from inference.grammar.library import xgrammar\n"
        "try:\n    xgrammar()\nexcept Exception as error:\n    print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'triplane[grammar]'" in out
