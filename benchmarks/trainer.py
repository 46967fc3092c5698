"""Tokens per second of one GRPO iteration, by Triplane's trainer and by TRL's GRPOTrainer, in turn; and where
Triplane's time goes.

    one case (weights, sequences, rewards, steps)  ->  Triplane, TRL, Triplane, TRL, ...   each a process of its own
                                                   ->  Triplane once more, by part

Timed on both sides: old log probabilities of all rows, then for each optimizer step forward, loss, backward, clipping
and AdamW, in float32 on the same number of threads. Triplane's time also has requantizing to FP8, and building its
batches and metrics. TRL's has nothing else: generation, rewards, decoding and padding are left out of it. The second
pair of metrics, `whole`, has on our side reading the checkpoint, state and dataset and publishing the new ones, and on
TRL's all that `train()` does but generation; `whole_cpu_ratio` is the ratio of its processor time, which other load on
the machine changes less.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from benchmarks.measure import median
from benchmarks.result import NotHereError, Options, Result
from benchmarks.trainer_case import SHAPES, Case, write_case
from benchmarks.turns import Program, program
from contracts.errors import ConfigError

PATIENCE_S = 1800.0
ROOT = Path(__file__).parents[1]
PART = "part_"
TIMED = ("scoring", "forward and loss", "backward", "optimizer")
"""Parts of TRL's iteration that count."""


class TrainerOptions(Options):
    """Options of the `trainer` benchmark."""

    groups: int = Field(64, ge=1, le=4096)
    """Groups of the iteration; `group_size` rows each."""
    group_size: int = Field(8, ge=2, le=64)
    """Rows of a group."""
    optimizer_steps: int = Field(8, ge=2, le=64)
    """Optimizer steps of the iteration; a divisor of `groups`. With 1, TRL would not score old log probabilities."""
    repeats: int = Field(5, ge=1, le=100)
    """Measured iterations of each side, alternating, after one that warms up; results are medians."""
    threads: str = "1 2"
    """Numbers of torch threads, separated by blanks; those above the machine's cores are left out."""
    shapes: str = " ".join(SHAPES)
    """Models, separated by blanks: quickstart, dense."""
    trl_rows: int = Field(16, ge=1)
    """Sequences of a forward pass of TRL; a divisor of the rows of an optimizer step."""
    peers: str = ".venv-peers/bin/python"
    """Python with TRL, which `make test-peers` installs; empty: measure only Triplane."""

    @field_validator("shapes")
    @classmethod
    def _known(cls, value: str) -> str:
        unknown = sorted(set(value.split()) - set(SHAPES))
        if unknown or not value.split():
            raise ValueError(f"expected some of {', '.join(SHAPES)}, not {', '.join(unknown) or 'nothing'}")
        return value

    @field_validator("threads")
    @classmethod
    def _numbers(cls, value: str) -> str:
        if not value.split() or not all(each.isdigit() and int(each) for each in value.split()):
            raise ValueError("expected numbers of threads, such as '1 2'")
        return value


OPTIONS = TrainerOptions


def run(options: TrainerOptions) -> Result:
    """Measure every shape with every number of threads. Raises NotHereError without TRL."""
    if options.groups % options.optimizer_steps:
        raise ConfigError(f"--optimizer-steps={options.optimizer_steps} does not divide --groups={options.groups}")
    if options.peers and not Path(options.peers).exists():
        raise NotHereError(f"{options.peers} does not exist: make test-peers installs TRL; --peers= measures without")
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    ratios: list[float] = []
    errors: list[float] = []
    cores = len(os.sched_getaffinity(0))
    counts = [count for count in map(int, options.threads.split()) if count <= cores]
    if not counts:
        raise ConfigError(f"--threads={options.threads}: this process may use {cores} cores; choose fewer threads")
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as scratch:
        for name in options.shapes.split():
            folder = Path(scratch) / name
            folder.mkdir()
            case = write_case(folder, SHAPES[name], options.groups, options.group_size, options.optimizer_steps)
            for threads in counts:
                found = _measure(folder, case, threads, options)
                metrics |= {f"{name}_{threads}t_{metric}": value for metric, value in found.items() if value}
                if "ratio" in found:
                    ratios.append(found["ratio"])
                    errors.append(found["logprob_error"])
                rows += _rows(f"{name}, {threads} thread{'s' * (threads > 1)}", found)
    if ratios:
        metrics |= {"worst_ratio": min(ratios), "logprob_error": max(errors)}
    return Result(metrics, rows, _notes(options, counts), judged=bool(options.peers))


def _notes(options: TrainerOptions, counts: list[int]) -> list[str]:
    rows = options.groups * options.group_size
    notes = [
        f"{rows} rows, {options.optimizer_steps} optimizer steps, medians of {options.repeats} iterations in turn;"
        f" tokens without padding; threads {counts}",
        "the shares of parts are of one further iteration, measured part by part",
    ]
    return notes if options.peers else [*notes, "goals are not judged: TRL was not measured"]


def _measure(folder: Path, case: Case, threads: int, options: TrainerOptions) -> dict[str, float]:
    """Metrics of one shape and number of threads; parts as `part_<name>`, in seconds."""
    with _ours(folder, threads) as ours:
        if not options.peers:
            own = [ours.do("go") for _ in range(options.repeats + 1)][1:]
            theirs: list[dict[str, Any]] = []
        else:
            with _trl(folder, threads, options) as trl:
                # the first turn warms both up
                turns = [(ours.do("go"), trl.do("go")) for _ in range(options.repeats + 1)][1:]
            own, theirs = [first for first, _ in turns], [second for _, second in turns]
        parts = ours.do("parts")
    found = _rates("triplane", case.tokens, [each["train_seconds"] for each in own], [each["seconds"] for each in own])
    found["scoring_seconds"] = median([each["scoring_seconds"] for each in own])
    if theirs:
        timed = [sum(each["parts"].get(part, 0.0) for part in TIMED) for each in theirs]
        found |= _rates("trl", case.tokens, timed, [each["seconds"] for each in theirs])
        found |= {f"trl_{_word(part)}": median([each["parts"][part] for each in theirs]) for part in TIMED}
        found["whole_cpu_ratio"] = median([each["cpu_seconds"] for each in theirs]) / median(
            [each["cpu_seconds"] for each in own]
        )
        found["logprob_error"] = theirs[0]["logprob_error"]
        found["ratio"] = found["triplane_tokens_per_second"] / found["trl_tokens_per_second"]
        found["whole_ratio"] = found["triplane_whole_tokens_per_second"] / found["trl_whole_tokens_per_second"]
    return found | {PART + _word(name): seconds for name, seconds in parts["parts"].items()}


def _rates(side: str, tokens: int, timed: list[float], whole: list[float]) -> dict[str, float]:
    return {
        f"{side}_tokens_per_second": tokens / median(timed),
        f"{side}_whole_tokens_per_second": tokens / median(whole),
        f"{side}_seconds": median(timed),
        f"{side}_spread_percent": 100 * (max(timed) - min(timed)) / median(timed),
    }


def _rows(where: str, found: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Table rows: both sides, then the parts of our iteration, longest first, with their shares."""
    for side in ("triplane", "trl"):
        if f"{side}_seconds" in found:
            rate = f"{found[f'{side}_tokens_per_second']:,.0f} tokens/s"
            yield {"model": where, "what": side, "seconds": round(found[f"{side}_seconds"], 3), "": rate}
    if "ratio" in found:
        yield {"model": where, "what": "ratio", "seconds": "", "": f"{found['ratio']:.2f}"}
    parts = {name.removeprefix(PART): value for name, value in found.items() if name.startswith(PART)}
    for name, seconds in sorted(parts.items(), key=lambda each: -each[1]):
        share = f"{100 * seconds / sum(parts.values()):.1f}%"
        yield {"model": where, "what": f"triplane: {name}", "seconds": round(seconds, 3), "": share}


@contextmanager
def _ours(folder: Path, threads: int) -> Iterator[Program]:
    command = [sys.executable, "-m", "benchmarks.trainer_ours", str(folder), str(threads)]
    environment = _environment(threads) | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    with program("Triplane's trainer", command, environment, PATIENCE_S) as running:
        yield running


@contextmanager
def _trl(folder: Path, threads: int, options: TrainerOptions) -> Iterator[Program]:
    script = Path(__file__).with_name("trainer_trl.py")
    # -P: the script's folder has modules of ours that are named like packages that TRL imports
    command = [options.peers, "-P", str(script), str(folder), str(threads), str(options.trl_rows)]
    environment = {name: value for name, value in _environment(threads).items() if name != "PYTHONPATH"}
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with program("TRL", command, environment | quiet, PATIENCE_S) as running:
        yield running


def _environment(threads: int) -> dict[str, str]:
    """One side computes while the other waits, so its threads must not spin."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def _word(text: str) -> str:
    return text.replace(" ", "_")
