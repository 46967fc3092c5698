"""Peak memory of real training jobs, compared with the planner's forecast, over shapes that stress different kinds.

    for each case: a process writes checkpoint, trainer state and dataset -> a fresh one imports the trainer, notes its
    resident bytes, runs the job -> peak above that; trainer.plan for the same job -> difference

Linux only. Each backend trains every case, in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from benchmarks.measure import resident
from benchmarks.result import Options, Result
from contracts.errors import TriplaneError
from trainer.model_config import ModelConfig

if TYPE_CHECKING:
    from trainer.ranks import Ranks

GIB = 2**30
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""Settings of glibc with which resident bytes are live bytes: each tensor is a mapping of its own. The trainer keeps
freed blocks below 1 GiB instead (`trainer.runtime.keep_freed_memory`), which is faster and holds more.
"""


class Case(BaseModel):
    """One training job."""

    name: str
    model: ModelConfig
    vocabulary: int
    length: int
    """Tokens of a sequence."""
    scored: int
    """Scored tokens of a sequence."""
    microbatch: int = 2
    """Sequences of a microbatch."""
    resumed: bool = True
    """Whether the trainer state has AdamW's moments."""
    balance: float = 0.0
    """`router_balance`."""
    backend: dict[str, Any] = {}
    """Fields of a job that name its backend."""


def _case(name: str, vocabulary: int, length: int, scored: int, shape: str, **more: Any) -> Case:
    """shape: hidden, layers, experts, expert width, experts per token, heads, key heads, head_dim."""
    names = ["hidden_size", "layers", "experts", "expert_width", "experts_per_token", "heads", "kv_heads", "head_dim"]
    sides = dict(zip(names, map(int, shape.split()), strict=True))
    own = {name: more.pop(name) for name in tuple(more) if name in ModelConfig.model_fields}
    model = ModelConfig(max_positions=length, **{**sides, **own})
    return Case(name=name, model=model, vocabulary=vocabulary, length=length, scored=scored, **more)


CASES = {
    each.name: each
    for each in (
        _case("experts", 2_000, 256, 64, "256 2 16 512 2 4 4 64"),
        _case("one-layer", 4_000, 256, 128, "512 1 8 768 2 8 8 64"),
        _case("deep", 1_000, 256, 128, "256 12 2 256 1 4 2 64"),
        _case("tokens", 1_000, 1024, 512, "256 4 4 256 2 4 4 64"),
        _case("long", 1_000, 2048, 512, "256 3 4 256 2 4 2 64", microbatch=1),
        _case("vocabulary", 50_000, 256, 200, "256 2 4 256 2 4 4 64"),
        _case("untied", 40_000, 256, 64, "384 2 4 384 2 6 6 64", tie_word_embeddings=False),
        _case("wide-picks", 1_000, 512, 256, "256 4 8 512 4 8 2 64"),
        _case("tiled-head", 120_000, 640, 600, "128 2 4 128 2 2 2 64"),
        _case("fresh", 4_000, 512, 256, "384 2 8 384 2 6 2 64", resumed=False, balance=0.01),
    )
}
BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    "fsdp2": {"backend": "fsdp2"},
    **{f"deepspeed-{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)},
}
SMALL = _case("small", 1_000, 64, 32, "128 1 2 128 1 2 2 64")


class TrainingMemoryOptions(Options):
    """Options of the `training-memory` benchmark."""

    cases: str = Field(",".join(CASES))
    """Names of cases, with commas."""
    backends: str = Field("torch,fsdp2,deepspeed-2,deepspeed-3")
    """Names of backends, with commas; DeepSpeed with its ZeRO stage."""


OPTIONS = TrainingMemoryOptions


def run(options: TrainingMemoryOptions) -> Result:
    """Measure the cases, one after the other. Raises TriplaneError for an unknown case or a process that dies."""
    names = _known("case", options.cases, CASES)
    backends = [BACKENDS[name] for name in _known("backend", options.backends, BACKENDS)]
    rows = [compare(CASES[name].model_copy(update={"backend": each})) for each in backends for name in names]
    worst = max(abs(row["difference %"]) for row in rows)
    notes = ["peak above the resident bytes after imports; one process, one thread"]
    return Result({"plan_error_percent": worst}, rows, notes)


def _known(what: str, names: str, known: Mapping[str, Any]) -> list[str]:
    """The names of a list with commas. Raises TriplaneError for an unknown one."""
    found = names.split(",")
    unknown = [name for name in found if name not in known]
    if unknown:
        raise TriplaneError(f"training-memory: no {what} is called {unknown[0]!r}: choose from {', '.join(known)}")
    return found


def compare(case: Case) -> dict[str, Any]:
    """Forecast and measured peak of a case. Raises TriplaneError if a process dies."""
    from trainer.plan import plan_training

    plan = plan_training(workload_of(case))
    with tempfile.TemporaryDirectory(prefix="bench-training-memory-") as scratch:
        _apart("write", case, scratch)
        measured = _apart("train", case, scratch)["peak"]
    return {
        "backend": _shown(case),
        "case": case.name,
        "plan GiB": plan.peak / GIB,
        "measured GiB": measured / GIB,
        "difference %": 100 * (plan.peak / measured - 1),
        "moment": plan.moment,
        "largest": max(plan.at_peak, key=lambda kind: plan.at_peak[kind]),
    }


def _shown(case: Case) -> str:
    stage = case.backend.get("zero_stage")
    return f"{case.backend.get('backend', 'torch')}{f'-{stage}' if stage else ''}"


def workload_of(case: Case) -> Any:
    """The planner's input for a case."""
    from trainer.plan import Batch, Workload

    return Workload(
        config=case.model.hf_config(case.vocabulary),
        batch=Batch(case.length * case.microbatch, case.scored * case.microbatch, rows=4 * case.microbatch),
        resumed=case.resumed,
        backend=case.backend.get("backend", "torch"),
        stage=case.backend.get("zero_stage") or 2,
    )


def _apart(step: str, case: Case, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.training_memory", step, case.model_dump_json(), folder]
    environment = {**os.environ, **EXACT, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message; the kernel kills a process for lack of memory"])[-1]
        raise TriplaneError(f"training-memory: {step} of {case.name} ended with status {done.returncode}: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write(case: Case, folder: Path) -> dict[str, Any]:
    """Commit the inputs of the case's job: random weights, and a dataset of four microbatches."""
    import numpy as np
    import torch

    from contracts.artifacts import ArtifactWriter
    from contracts.store import open_store
    from trainer.export import TOKENIZER_FILES, publish_checkpoint
    from trainer.optimizers import AdamW
    from trainer.parameters import Parameters, draw_masters
    from trainer.state import capture_state, publish_state

    store = open_store(str(folder / "store"))
    with ArtifactWriter(store, "tokenizer", "0" * 64, parents={}, config={}, code_version="1") as out:
        for name in TOKENIZER_FILES:
            out.add_bytes(name, b"{}")
        tokenizer = out.commit()
    torch.set_num_threads(1)
    config = case.model.hf_config(case.vocabulary)
    parameters = Parameters.from_masters(config, draw_masters(config, 0))
    made: dict[str, Any] = {"parents": {}, "config": {}, "code_version": "1"}
    moments = AdamW(parameters.buffers, 0.9, 0.95).state() if case.resumed else {}
    state = capture_state(parameters, moments, "adamw" if case.resumed else "none", 0, {})
    saved = publish_state(store, "trainer_state", "1" * 64, state, **made)
    checkpoint = publish_checkpoint(store, "1" * 64, parameters, tokenizer, meta={}, metrics=b"", **made)
    random = np.random.default_rng(0)
    roles = [0] * (case.length - case.scored) + [1] * case.scored
    rows = [
        {
            "episode_id": f"e{number:03}",
            "group_id": f"g{number // 2:03}",
            "token_ids": random.integers(0, case.vocabulary, case.length).tolist(),
            "token_role": roles,
            "logprobs": [None if role == 0 else -5.0 for role in roles],
            "reward": float(number % 2),
        }
        for number in range(4 * case.microbatch)
    ]
    dataset = _dataset(store, rows)
    refs = {"dataset": dataset, "checkpoint": checkpoint, "trainer_state": saved}
    (folder / "refs.json").write_text(json.dumps({name: each.ref.model_dump() for name, each in refs.items()}))
    return {}


def _dataset(store: Any, rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    from contracts.artifacts import ArtifactWriter

    types = {"token_ids": pa.list_(pa.int32()), "token_role": pa.list_(pa.uint8()), "logprobs": pa.list_(pa.float32())}
    columns = ("episode_id", "group_id", "token_ids", "token_role", "logprobs")
    schema = pa.schema([(name, types.get(name, pa.string())) for name in columns])
    members = [
        {
            "episode_id": row["episode_id"],
            "group_id": row["group_id"],
            "reward": row["reward"],
            "group_reward_mean": 0.5,
        }
        for row in rows
    ]
    with ArtifactWriter(store, "dataset", "2" * 64, parents={}, config={}, code_version="1") as out:
        out.add_table("train.parquet", pa.Table.from_pylist(rows, schema=schema))
        out.add_table("members.parquet", pa.Table.from_pylist(members))
        return out.commit()


def train(case: Case, folder: Path) -> dict[str, Any]:
    """Run the case's job in this process. Returns its peak above the resident bytes before, in bytes.

    A small job runs first: what libraries allocate once belongs to no tensor.
    """
    from trainer.ranks import join_ranks

    small = folder / "small"
    small.mkdir(exist_ok=True)
    write(SMALL, small)
    # one process group for both jobs: torch keeps meshes of the first
    with join_ranks(1, 60.0, group=bool(case.backend)) as ranks:
        _run(SMALL.model_copy(update={"backend": case.backend}), small, ranks)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: proc(5)
        before = resident("VmRSS")
        _run(case, folder, ranks)
        return {"peak": resident("VmHWM") - before}


def _run(case: Case, folder: Path, ranks: Ranks) -> None:
    from contracts.artifacts import ArtifactRef
    from contracts.store import open_store
    from trainer.config import RlConfig, RlJob
    from trainer.devices import CPU
    from trainer.rl import train_rl
    from trainer.runtime import make_deterministic

    refs: dict[str, Any] = {
        name: ArtifactRef(**each) for name, each in json.loads((folder / "refs.json").read_text()).items()
    }
    config = RlConfig(microbatch_tokens=case.length * case.microbatch, optimizer_steps=2, router_balance=case.balance)
    job = RlJob(
        store=str(folder / "store"),
        key="3" * 64,
        seed=0,
        threads=1,
        dataset=refs["dataset"],
        checkpoint=refs["checkpoint"],
        trainer_state=refs["trainer_state"],
        config=config,
        **case.backend,
    )
    make_deterministic(job.seed, job.threads, CPU)
    train_rl(job, open_store(job.store), (), ranks)


if __name__ == "__main__":
    found = {"write": write, "train": train}[sys.argv[1]](Case.model_validate_json(sys.argv[2]), Path(sys.argv[3]))
    print(json.dumps(found))
