"""A real vLLM on this CPU under our grammar: what it reports is what the trainer gets over the supports we derive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.chat import ChatTokenizer, parse_turn
from curation.tokenizer import train_tokenizer
from inference.engines import SamplingParams, open_engine
from inference.engines.vllm_keeper import VllmKeeper
from inference.errors import EngineError
from inference.grammar.tools import tools_grammar
from tests.inference.conftest import logits_after, write_checkpoint
from tests.vllm.conftest import real_config

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(1800)]
FLAGS = ["--no-skip-tokenizer-init"]
SIZE = 416
VERSION = "d" * 64


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("grammar") / "policy", 0, vocab_size=SIZE)
    texts = ['{"name":"read","arguments":{"path":"a.py","start":12}}\n', "def f(x): return x + 1\n"]
    (directory / "tokenizer.json").write_text(train_tokenizer(texts * 40, ["read", "path"], 400).to_str())
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    return directory


@pytest.fixture(scope="module")
def keeper() -> Iterator[VllmKeeper]:
    keeper = VllmKeeper(real_config(flags=FLAGS))
    yield keeper
    keeper.stop()


async def test_masked_log_probabilities_are_those_over_the_derived_supports(keeper: VllmKeeper, policy: Path) -> None:
    tokenizer = ChatTokenizer.from_directory(policy)
    tag = json.loads(tools_grammar(tokenizer))
    calling = json.dumps({**tag, "format": {**tag["format"], "at_least_one": True, "stop_after_first": True}})
    prompt, stops = tokenizer.prompt([("user", "mend it")]), (tokenizer.end_of_turn, tokenizer.pad)
    wanted = [
        SamplingParams(temperature, 120, seed, stops, grammar=grammar)
        for seed in range(12)
        for grammar, temperature in ((calling, 1.0), (calling, 1.6), (tools_grammar(tokenizer), 1.0))
    ]
    engine = open_engine(real_config(flags=FLAGS), policy, VERSION, keeper)
    found = await asyncio.gather(*(engine.generate(prompt, each) for each in wanted))
    gaps, calls, forced = [], 0, 0
    for params, each in zip(wanted, found, strict=True):
        assert each.supports is not None
        logits = logits_after(policy, prompt, each.token_ids) / params.temperature
        allowed = torch.from_numpy(each.supports.masks(np.arange(len(each.token_ids)), SIZE))
        over = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
        over = over.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
        gaps.append(float((over - torch.tensor(each.logprobs)).abs().max()))
        forced += sum(each.forced or [])
        if each.finish_reason == "stop" and tokenizer.call_end in each.token_ids:
            assert parse_turn(tokenizer.decode(each.token_ids[:-1])).error is None
            calls += 1
    await engine.close()
    assert max(gaps) < 1e-4
    assert calls >= 5 and forced >= 5


async def test_a_nucleus_is_refused_and_so_is_a_grammar_that_does_not_compile(keeper: VllmKeeper, policy: Path) -> None:
    engine = open_engine(real_config(flags=FLAGS), policy, VERSION, keeper)
    with pytest.raises(EngineError, match="does not return what tokens were drawn from"):
        await engine.generate([5, 6], SamplingParams(1.0, 4, 1, (2,), top_p=0.5))
    with pytest.raises(EngineError, match="answered 400: Invalid grammar"):
        await engine.generate([5, 6], SamplingParams(1.0, 4, 1, (2,), grammar='{"type":"structural_tag"}'))
    assert (await engine.generate([5, 6], SamplingParams(1.0, 4, 1, (2,)))).token_ids
    await engine.close()
