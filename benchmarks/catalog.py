"""Which benchmarks exist. A module is imported only when it is asked for, so that listing them needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from benchmarks.result import Options, Result
from contracts.errors import ConfigError

CATALOG: Mapping[str, str] = {
    "learning": "held-out compositions before and after learning, by seed, with a control that must not learn",
    "intervals": "coverage of the printed intervals and errors of the promotion gate, by simulation",
    "overhead": "the share of an iteration that is not sampling, tools, grading or optimizing",
    "engine": "tokens a second of the built-in engine beside HF generate of the same checkpoint",
    "chaos": "iterations killed at named points and random instants: same content, nothing sampled twice, nothing left",
    "envd": "sandboxes through gRPC beside bubblewrap, runc, runsc and SWE-ReX: latency, rate, memory of idle ones",
    "envd-soak": "sandboxes come and go while clients, spawner and server are killed: nothing is left",
    "envd-fuzz": "malformed and hostile requests on every method: the server stays up and right",
    "verdicts": "forged final states caught, honest ones left alone, and milliseconds of one verification",
    "kernels": "TFLOP/s and TB/s of the FP8 kernels on a GPU, beside the card's ceilings and torch's own products",
    "s3": "an experiment on a local S3 server beside a directory: equal digests, and what S3 costs an iteration",
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
