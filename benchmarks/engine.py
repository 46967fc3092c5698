"""Tokens a second of the built-in engine beside `transformers`' generate, on the same weights, prompts and threads in the same run."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from benchmarks.measure import median
from benchmarks.policies import dequantize_policy, write_random_policy
from benchmarks.result import Options, Result
from contracts.errors import ConfigError
from inference.engines.base import SamplingParams
from inference.engines.builtin import BuiltinEngine
from trainer.config import ModelConfig

VOCABULARY = 768
Prompts = list[list[int]]


class EngineOptions(Options):
    """Options of the `engine` benchmark."""

    concurrency: int = Field(64, ge=1, le=1024)
    """Sequences at once."""
    prompt_tokens: int = Field(32, ge=1, le=256)
    """Tokens of each prompt."""
    new_tokens: int = Field(64, ge=1, le=256)
    """Tokens sampled for each prompt; nothing stops earlier."""
    repeats: int = Field(3, ge=1, le=100)
    """Runs of each engine, turn about; medians count."""
    threads: int = Field(0, ge=0, le=256)
    """Of torch; 0: as many as there are cores."""


OPTIONS = EngineOptions


def run(options: EngineOptions) -> Result:
    """Measure both engines turn about, so that a change of load meets both."""
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    random = torch.Generator().manual_seed(0)
    shape = (options.concurrency, options.prompt_tokens)
    prompts: Prompts = torch.randint(8, VOCABULARY, shape, generator=random).tolist()
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as scratch:
        policy = write_random_policy(Path(scratch) / "fp8", ModelConfig(), vocabulary=VOCABULARY)
        plain = dequantize_policy(policy, Path(scratch) / "plain")
        seconds = _measure(policy, plain, prompts, options, threads)
    tokens = options.concurrency * options.new_tokens
    rates = {name: tokens / median(found) for name, found in seconds.items()}
    metrics = {f"{name}_tokens_per_second": rate for name, rate in rates.items()}
    metrics["speedup_over_hf_generate"] = rates["builtin"] / rates["hf_generate"]
    rows = [
        {"engine": name, "tokens/s": rates[name], "median s": median(found), "runs": len(found)}
        for name, found in seconds.items()
    ]
    return Result(metrics, rows, [f"{threads} threads; both sample at temperature 1; loading is not counted"])


def _measure(
    policy: Path, plain: Path, prompts: Prompts, options: EngineOptions, threads: int
) -> dict[str, list[float]]:
    reference = _Reference(plain, options.new_tokens)
    seconds: dict[str, list[float]] = {"builtin": [], "hf_generate": []}
    with asyncio.Runner() as loop:
        # no state is kept between runs, so each run computes its prompts
        engine = BuiltinEngine(policy, "random", max_batch=options.concurrency, threads=threads, prefix_bytes=0)
        try:
            for index in range(options.repeats + 1):
                own = loop.run(_generate(engine, prompts, options.new_tokens, seed=index))
                theirs = reference.generate(prompts)
                if index:  # the first round warms both up
                    seconds["builtin"].append(own)
                    seconds["hf_generate"].append(theirs)
        finally:
            loop.run(engine.close())
    return seconds


async def _generate(engine: BuiltinEngine, prompts: Prompts, new_tokens: int, *, seed: int) -> float:
    begin = time.perf_counter()
    params = [SamplingParams(1.0, new_tokens, seed * len(prompts) + index) for index in range(len(prompts))]
    done = await asyncio.gather(*(engine.generate(*pair) for pair in zip(prompts, params, strict=True)))
    seconds = time.perf_counter() - begin
    assert all(len(each.token_ids) == new_tokens for each in done), "nothing stops a sequence early here"
    return seconds


class _Reference:
    """transformers' generate, KV cache on. Source of the call: the transformers documentation, "Generation"."""

    def __init__(self, directory: Path, new_tokens: int) -> None:
        try:
            from transformers import GenerationConfig, Qwen3MoeForCausalLM
        except ImportError:
            raise ConfigError(
                "the engine benchmark compares with transformers: install it by pip install -e '.[dev]'"
            ) from None
        model: Any = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model = model.eval()
        make_config: Any = GenerationConfig
        self._config = make_config(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )

    @torch.inference_mode()
    def generate(self, prompts: Prompts) -> float:
        """Seconds for one batch."""
        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self._config)
        return time.perf_counter() - begin
