"""List of benchmarks. Modules are imported on request only, so that listing them needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from benchmarks.result import Options, Result
from contracts.errors import ConfigError

CATALOG: Mapping[str, str] = {
    "learning": "held-out compositions before and after learning, by seed, with a control that must not learn",
    "algorithms": "held-out pass rates by each policy-gradient algorithm, beside the same run with permuted rewards",
    "trainer": "tokens per second of a GRPO iteration, in turn with TRL's GRPOTrainer, and where the time goes",
    "intervals": "coverage of the printed intervals and errors of the promotion gate, by simulation",
    "overhead": "share of an iteration outside sampling, tools, grading and optimizing",
    "overlap": "wall clock of an iteration when the next one is sampled while it trains, with simulated GPUs",
    "engine": "tokens per second of the built-in engine, compared with HF generate on the same checkpoint",
    "speculation": "turns sampled with guessed tokens and without: the same bits, tokens per second, passes per token",
    "stragglers": "rollouts in which some episodes take twenty times as long: waited for, carried over or dropped",
    "bridge": "steps of episodes over the bridge: latency, rate and memory, compared with bare gRPC and OpenEnv",
    "bridge-chaos": "episodes under cut connections, killed bridges and killed clients: the same tokens, nothing left",
    "chaos": "iterations killed at named points and random times: same content, nothing sampled twice or left over",
    "routing": "simulated replicas behind the HTTP router, beside consistent hashing: tokens computed, makespan, load",
    "router": "microseconds to choose a replica by its cache, compared with Dynamo; cache events at bounded memory",
    "envd": "sandboxes over gRPC, compared with bubblewrap, runc, runsc and SWE-ReX: latency, rate, idle memory",
    "envd-soak": "sandboxes created and destroyed while clients, spawner and server are killed: nothing is left over",
    "envd-fuzz": "malformed and hostile requests to every method: the server stays available and correct",
    "envd-templates": "templates of tasks of one repository, sent as patches of its tree: bytes on disk, milliseconds",
    "tasks": "suites made of twelve packages without a setting: yields, time, oracle, noop and a searching agent",
    "screen": "candidates a second of the factory's screen, of one process each, of cosmic-ray and of mutmut",
    "flips": "verdicts on tasks of a made suite, repeated beside busy processes: none may change",
    "verdicts": "forged final states detected, honest ones accepted, and milliseconds per verification",
    "kernels": "TFLOP/s and TB/s of the FP8 kernels on a GPU, compared with the card's ceilings and torch's products",
    "memory": "peak memory of the trainer's output head at a large vocabulary, in tiles and plain: bytes and errors",
    "training-memory": "peak memory of training jobs of ten shapes, compared with the forecast of `triplane plan`",
    "precision": "a Qwen3-MoE of real width trained in bf16 and in FP8 on a GPU: tokens/s, MFU, memory, loss parity",
    "recall": "seconds and memory of `triplane recall` and `quarantine --dry-run` over five million episodes",
    "tick": "milliseconds of a tick of the sensor that runs iterations, after 10,000 of them, locally and on S3",
    "data": "a data pipeline of twenty stages: memory, rows a second beside one DuckDB query, overlap of waiting",
    "cluster": "API calls, event rows, S3 requests and sandboxes of 8 to 512 GPUs, and which limit is reached first",
    "s3": "an experiment on a local S3 server and in a directory: equal digests, and the cost of S3 per iteration",
}


@dataclass(frozen=True)
class Benchmark:
    """A loaded benchmark."""

    name: str
    options: type[Options]
    run: Callable[[Options], Result]


def load_benchmark(name: str) -> Benchmark:
    """Import the benchmark called `name`. Raises ConfigError for an unknown one."""
    if name not in CATALOG:
        raise ConfigError(f"no benchmark is called {name!r}: choose one of {', '.join(CATALOG)}")
    module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
    return Benchmark(name, cast(type[Options], module.OPTIONS), cast(Callable[[Options], Result], module.run))
