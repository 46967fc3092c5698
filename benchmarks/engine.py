"""Tokens per second of the built-in engine and of `transformers`' generate, with the same weights, prompts and threads
in one run.

lockstep   one batch, every sequence as long as the others: what a static batch is best at
ragged     four times as many sequences of all lengths, as turns of agents are; the reference takes them a batch after
           the other
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
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
from trainer.model_config import ModelConfig

VOCABULARY = 768
Prompts = list[list[int]]


class EngineOptions(Options):
    """Options of the `engine` benchmark."""

    concurrency: int = Field(64, ge=1, le=1024)
    """Number of concurrent sequences."""
    prompt_tokens: int = Field(32, ge=1, le=256)
    """Tokens of each prompt."""
    new_tokens: int = Field(64, ge=1, le=256)
    """Maximum tokens sampled for one prompt."""
    repeats: int = Field(3, ge=1, le=100)
    """Runs of each engine, alternating; results are medians."""
    threads: int = Field(0, ge=0, le=256)
    """Torch threads; 0: one per core."""


OPTIONS = EngineOptions


@dataclass(frozen=True)
class Workload:
    """Prompts with the number of tokens to sample for each; sampling never stops earlier."""

    prompts: Prompts
    lengths: list[int]

    def batches(self, size: int) -> list[Workload]:
        """The workload in order, in batches of `size`."""
        starts = range(0, len(self.prompts), size)
        return [Workload(self.prompts[i : i + size], self.lengths[i : i + size]) for i in starts]


def workloads(options: EngineOptions) -> dict[str, Workload]:
    """The two workloads; equal options give equal workloads."""
    random = torch.Generator().manual_seed(0)

    def make(count: int, shortest: int) -> Workload:
        prompts = torch.randint(8, VOCABULARY, (count, options.prompt_tokens), generator=random).tolist()
        return Workload(prompts, torch.randint(shortest, options.new_tokens + 1, (count,), generator=random).tolist())

    return {"lockstep": make(options.concurrency, options.new_tokens), "ragged": make(4 * options.concurrency, 1)}


def run(options: EngineOptions) -> Result:
    """Measure both engines alternately, so that changes of load affect both."""
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    metrics: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as scratch:
        policy = write_random_policy(Path(scratch) / "fp8", ModelConfig(), vocabulary=VOCABULARY)
        plain = dequantize_policy(policy, Path(scratch) / "plain")
        for kind, work in workloads(options).items():
            seconds = _measure(policy, plain, work, options, threads)
            rates = {name: sum(work.lengths) / median(found) for name, found in seconds.items()}
            metrics |= {f"{kind}_{name}_tokens_per_second": rate for name, rate in rates.items()}
            metrics[f"{kind}_speedup_over_hf_generate"] = rates["builtin"] / rates["hf_generate"]
            rows += [
                {
                    "workload": kind,
                    "engine": name,
                    "tokens/s": rates[name],
                    "median s": median(found),
                    "runs": len(found),
                }
                for name, found in seconds.items()
            ]
    return Result(metrics, rows, [f"{threads} threads; both sample at temperature 1; loading is not counted"])


def _measure(policy: Path, plain: Path, work: Workload, options: EngineOptions, threads: int) -> dict[str, list[float]]:
    reference = _Reference(plain)
    batches = work.batches(options.concurrency)
    seconds: dict[str, list[float]] = {"builtin": [], "hf_generate": []}
    with asyncio.Runner() as loop:
        # no state is reused between runs, so each run computes its prompts
        engine = BuiltinEngine(policy, "random", max_batch=options.concurrency, threads=threads, prefix_bytes=0)
        try:
            for index in range(options.repeats + 1):
                own = loop.run(_generate(engine, work, seed=index))
                theirs = sum(reference.generate(batch) for batch in batches)
                if index:  # the first round warms both up
                    seconds["builtin"].append(own)
                    seconds["hf_generate"].append(theirs)
        finally:
            loop.run(engine.close())
    return seconds


async def _generate(engine: BuiltinEngine, work: Workload, *, seed: int) -> float:
    begin = time.perf_counter()
    first = seed * len(work.prompts)
    params = [SamplingParams(1.0, length, first + index) for index, length in enumerate(work.lengths)]
    done = await asyncio.gather(*(engine.generate(*pair) for pair in zip(work.prompts, params, strict=True)))
    seconds = time.perf_counter() - begin
    assert [len(each.token_ids) for each in done] == work.lengths, "no stop token ends a sequence early"
    return seconds


class _Reference:
    """transformers' generate, KV cache on. Source of the call: the transformers documentation, "Generation"."""

    def __init__(self, directory: Path) -> None:
        try:
            from transformers import GenerationConfig, Qwen3MoeForCausalLM
        except ImportError:
            raise ConfigError(
                "the engine benchmark compares with transformers: install it by pip install -e '.[dev]'"
            ) from None
        model: Any = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model = model.eval()
        self._make_config: Any = GenerationConfig

    @torch.inference_mode()
    def generate(self, work: Workload) -> float:
        """Seconds for one batch, to the length of its longest sequence."""
        longest = max(work.lengths)
        config = self._make_config(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        )
        ids = torch.tensor(work.prompts)
        begin = time.perf_counter()
        self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return time.perf_counter() - begin
