"""A Qwen3-MoE of real width trains by two recipes on the same tokens: speed, memory, and whether the losses agree.

for each recipe: the same masters -> warm-up steps -> timed steps of (forward, backward, AdamW, requantize) -> losses

Sequences are drawn from the Python sources of the installed torch, two bytes a token. Parity compares the mean losses
of the last tenth of the steps, on equal sequences. Trainings that differ by rounding alone drift apart, too; therefore
each recipe trains from the same masters, and again from masters changed by as much as bfloat16 rounds them. The spread
of bf16's losses is what a gap must be compared with.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from benchmarks.result import NotHereError, Options, Result
from trainer.config import RlConfig
from trainer.model import Batch, score
from trainer.model_config import ModelConfig
from trainer.optimizers import AdamW
from trainer.parameters import Parameters, draw_masters
from trainer.precision import with_precision
from trainer.schedule import Schedule, rate_factor

GIB = 2**30
SETTINGS: Mapping[str, dict[str, Any]] = {
    "bf16": {"kind": "bf16"},
    "fp8-block": {"kind": "fp8-block", "activations": "bfloat16", "router_dtype": "bfloat16"},
    "te-float8-block": {"kind": "te-float8-block"},
    "te-mxfp8": {"kind": "te-mxfp8"},
}


class PrecisionOptions(Options):
    """Options of the `precision` benchmark. The defaults are the width of Qwen3-30B-A3B, with 4 of its 48 layers."""

    recipe: Literal["fp8-block", "te-float8-block", "te-mxfp8"] = "fp8-block"
    """Recipe compared with bf16."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where to train. On a CPU the figures are no measurement; it shows that the benchmark runs."""
    steps: int = Field(200, ge=1)
    """Optimizer steps of each recipe."""
    layers: int = Field(4, ge=1)
    """Decoder layers."""
    hidden: int = Field(2048, ge=128)
    """Width of the residual stream."""
    experts: int = Field(128, ge=1)
    """Experts per layer."""
    expert_width: int = Field(768, ge=128)
    """Inner width of one expert."""
    picks: int = Field(8, ge=1)
    """Experts per token."""
    heads: int = Field(32, ge=1)
    """Query heads of width 128; a quarter as many key and value heads, at least one."""
    vocabulary: int = Field(151_936, ge=8)
    """Entries of the vocabulary."""
    sequences: int = Field(4, ge=1)
    """Sequences of a forward pass."""
    length: int = Field(4096, ge=8)
    """Tokens of a sequence."""
    accumulate: int = Field(1, ge=1)
    """Forward and backward passes of a step."""
    learning_rate: float = Field(3e-4, gt=0)
    """Of AdamW, after a linear warm-up over the first tenth of the steps."""
    schedule: Schedule = "cosine"
    """Course of the learning rate after the warm-up, down to a tenth."""
    repeats: int = Field(3, ge=1)
    """Trainings of each recipe."""
    peak_tflops: float = Field(989.0, gt=0)
    """Dense bfloat16 peak of the device, the denominator of MFU of both recipes. H100 and H200: 989."""


OPTIONS = PrecisionOptions


def run(options: PrecisionOptions) -> Result:
    """Train by bf16 and by `options.recipe`. Raises NotHereError without the device."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise NotHereError("precision: this machine has no CUDA device: run it on one, or with --device cpu")
    rows: list[dict[str, Any]] = []
    ends: dict[str, list[float]] = defaultdict(list)
    for repeat in range(options.repeats):
        for name in ("bf16", options.recipe):
            rows.append(train(name, options, repeat))
            ends[name].append(rows[-1]["loss at the end"])
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    plain, rounded = ends["bf16"], ends[options.recipe]

    def middle(name: str, figure: str) -> float:
        return float(median(row[figure] for row in rows if row["recipe"] == name))

    metrics = {
        "loss_gap_percent": 100 * abs(mean(rounded) / mean(plain) - 1),
        "bf16_loss_spread_percent": 100 * (max(plain) - min(plain)) / mean(plain),
        "speed_ratio": middle(options.recipe, "tokens/s") / middle("bf16", "tokens/s"),
    }
    for prefix, name in (("recipe", options.recipe), ("bf16", "bf16")):
        metrics[f"{prefix}_tokens_per_second"] = middle(name, "tokens/s")
        metrics[f"{prefix}_mfu_percent"] = middle(name, "MFU %")
        metrics[f"{prefix}_peak_gib"] = middle(name, "peak GiB")
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    size = f"{options.accumulate} x {options.sequences} x {options.length} tokens a step, {options.steps} steps"
    note = f"{where}; {size}; losses are compared over the last tenth"
    return Result(metrics, rows, [note], judged=options.device == "cuda")


def train(name: str, options: PrecisionOptions, repeat: int) -> dict[str, Any]:
    """Figures of a training by recipe `name`. repeat: 0 starts from the drawn masters, others from perturbed ones."""
    config = with_precision(
        _model(options).hf_config(options.vocabulary), RlConfig.model_validate({"precision": SETTINGS[name]}).precision
    )
    masters = draw_masters(config, 0, options.device)
    if repeat:
        generator = torch.Generator(options.device).manual_seed(repeat)
        for master in masters.values():
            noise = torch.empty_like(master).normal_(generator=generator)
            master.addcmul_(master, noise, value=2.0**-9)
    parameters = Parameters.from_masters(config, masters)
    del masters
    optimizer = AdamW(parameters.buffers, 0.9, 0.95)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []
    warm = min(5, options.steps - 1)
    began = time.perf_counter()
    for step in range(options.steps):
        if step == warm:
            _wait(options)
            began = time.perf_counter()
        parameters.clear_gradients()
        parts = []
        for part in range(options.accumulate):
            batch = _batch(options, step * options.accumulate + part)
            loss = -score(parameters.leaves, config, batch).logprobs.mean() / options.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(loss.detach())
        parameters.clip_gradients(1.0)
        factor = rate_factor(options.schedule, step, options.steps // 10, options.steps, 0.1)
        optimizer.step(options.learning_rate * factor)
        parameters.requantize()
        losses.append(torch.stack(parts).sum())
        if (step + 1) % max(1, options.steps // 10) == 0:
            print(
                f"{name}: step {step + 1} of {options.steps}, loss {float(losses[-1]):.4f}", file=sys.stderr, flush=True
            )
    _wait(options)
    tokens = options.accumulate * options.sequences * options.length * (options.steps - warm)
    speed = tokens / (time.perf_counter() - began)
    found = [float(loss) for loss in losses]
    tail = max(1, options.steps // 10)
    cuda = options.device == "cuda"
    return {
        "recipe": name,
        "repeat": repeat,
        "tokens/s": speed,
        "MFU %": 100 * speed * _flops(options) / (options.peak_tflops * 1e12),
        "peak GiB": torch.cuda.max_memory_allocated() / GIB if cuda else float("nan"),
        "first loss": found[0],
        "loss at the end": sum(found[-tail:]) / tail,
    }


def _model(options: PrecisionOptions) -> ModelConfig:
    return ModelConfig(
        hidden_size=options.hidden,
        layers=options.layers,
        experts=options.experts,
        expert_width=options.expert_width,
        experts_per_token=options.picks,
        heads=options.heads,
        kv_heads=max(1, options.heads // 4),
        head_dim=128,
        max_positions=options.length,
        tie_word_embeddings=False,
    )


def _flops(options: PrecisionOptions) -> float:
    """Of a trained token: 6 for each weight that it meets, and the attention's products, half of them masked."""
    keys = max(1, options.heads // 4)
    attention = options.hidden * 128 * (2 * options.heads + 2 * keys)
    experts = options.picks * 3 * options.hidden * options.expert_width + options.experts * options.hidden
    weights = options.layers * (attention + experts) + options.vocabulary * options.hidden
    return 6.0 * weights + options.layers * 6.0 * options.length * options.heads * 128


@functools.cache
def _text() -> Tensor:
    """int64 [tokens]: the Python sources of the installed torch, two bytes a token."""
    sources = sorted(Path(torch.__file__).parent.rglob("*.py"))
    content = b"".join(source.read_bytes() for source in sources)
    return torch.frombuffer(bytearray(content[: len(content) // 2 * 2]), dtype=torch.uint16).long()


def _batch(options: PrecisionOptions, number: int) -> Batch:
    """Sequences that start at drawn places of the text."""
    count, length, text = options.sequences, options.length, _text()
    starts = torch.randint(len(text) - length, (count, 1), generator=torch.Generator().manual_seed(number))
    flat = (text[starts + torch.arange(length)] % options.vocabulary).flatten().to(options.device)
    rows = torch.cat([torch.arange(length - 1) + length * index for index in range(count)]).to(options.device)
    return Batch(flat, rows, flat[rows + 1], rows // length, [length] * count)


def _wait(options: PrecisionOptions) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()
