"""Refuse a training job that can't fit into memory, before it allocates anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from contracts.artifacts import Artifact, open_artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import SUPPORTS
from contracts.errors import SchemaError
from contracts.store import Store
from trainer.config import RlJob, SftJob
from trainer.plan.activations import Batch
from trainer.plan.forecast import Workload, batch_of, plan_training
from trainer.plan.limits import Limit, machine_limits, require_memory
from trainer.plan.shapes import Shapes
from trainer.plan.tape import Plan
from trainer.plan.torch_backend import plan_warm_start

_BY_BATCH = ("activations", "logits")
UNQUANTIZED = ("fp32", "bf16")
"""Recipes whose weights have no codes, which the forecast assumes."""


def check_memory(job: SftJob | RlJob, store: Store) -> None:
    """Raise TrainingMemoryError if `job` needs more memory than this process may use.

    The forecast is that of the job's own data. What can't be forecast, e.g. adapters, is not refused; of a recipe other
    than `w8`, or of a sharded backend, only weights and optimizer count.
    """
    if _recipe(job) in UNQUANTIZED or _starts_otherwise(job) or (isinstance(job, SftJob) and job.backend != "torch"):
        return
    try:
        plan = _plan_warm_start(job, store) if isinstance(job, SftJob) else _plan_iteration(job, store)
    except SchemaError:
        return
    limits = machine_limits() if job.device == "cpu" else [_gpu_limit()]
    require_memory(plan, _advice(job, plan), _local_ranks(job), limits)


def _plan_iteration(job: RlJob, store: Store) -> Plan:
    config = open_artifact(store, job.checkpoint).json("config.json")
    dataset = open_artifact(store, job.dataset)
    found = batch_of(_rows(dataset), job.config.microbatch_tokens, job.ranks)
    supported = SUPPORTS.name in pq.read_schema(dataset.path("train.parquet")).names
    state = open_artifact(store, job.trainer_state).json("state.json")
    return plan_training(
        Workload(
            config=config,
            batch=_known(job, replace(found, supported=supported)),
            backend=job.backend,
            ranks=job.ranks,
            stage=job.stage,
            expert_ranks=job.expert_ranks,
            recompute=job.activation_checkpointing,
            resumed=state["optimizer"] == "adamw",
            cuda=job.device == "cuda",
        )
    )


def _plan_warm_start(job: SftJob, store: Store) -> Plan:
    chat = ChatTokenizer.from_directory(open_artifact(store, job.tokenizer).directory())
    found = batch_of(_rows(open_artifact(store, job.demonstrations)), 0)
    rows = max(1, -(-job.config.batch_size // job.ranks))
    mean = found.all_tokens // max(found.rows, 1)
    if job.config.batch_tokens is not None:
        rows = -(-max(1, job.config.batch_tokens // max(mean, 1)) // job.ranks)
    tokens = rows * mean
    if job.config.microbatch_tokens is not None:  # of which one longer row is a forward pass of its own
        tokens = min(tokens, max(job.config.microbatch_tokens, found.tokens))
    scored = tokens * found.scored // max(found.tokens, 1)
    batch = Batch(tokens, scored, rows=found.rows, sequences=max(1, round(tokens / max(mean, 1))))
    config = (
        open_artifact(store, job.checkpoint).json("config.json")
        if job.checkpoint is not None
        else job.model.hf_config(chat.vocabulary_size)
    )
    return plan_warm_start(Shapes.of(config), _known(job, batch), cuda=job.device == "cuda").plan(job.ranks)


def _rows(data: Artifact) -> Iterator[pa.RecordBatch]:
    """Rows to train on, a few at a time: the data may be larger than the memory."""
    return data.batches("train.parquet", ["token_role"])


def _known(job: SftJob | RlJob, batch: Batch) -> Batch:
    """The batch, or none if what it takes was not measured for the job's recipe or backend."""
    return batch if _recipe(job) == "w8" and job.backend == "torch" else Batch(0, 0)


def _starts_otherwise(job: SftJob | RlJob) -> bool:
    """Whether the job trains adapters, or supervises a checkpoint: the forecast assumes neither."""
    return bool(job.start or job.lora) if isinstance(job, SftJob) else job.config.lora is not None


def _recipe(job: SftJob | RlJob) -> str:
    """Kind of the job's precision recipe."""
    return job.precision.kind if isinstance(job, SftJob) else job.config.precision.kind


def _gpu_limit() -> Limit:
    """Free memory of this rank's GPU."""
    import torch  # what it takes is only known to a process that trains there

    return Limit(f"GPU {torch.cuda.current_device()}", torch.cuda.mem_get_info()[0], shared=False)


def _local_ranks(job: SftJob | RlJob) -> int:
    """Ranks of the job on this machine; torchrun tells their number."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) else job.ranks


def _advice(job: SftJob | RlJob, plan: Plan) -> str:
    by_batch = sum(plan.at_peak.get(kind, 0) for kind in _BY_BATCH)
    if by_batch * 3 < plan.peak:
        fewer = f"lower trainer.launcher.ranks {job.ranks}, " if job.ranks > 1 else ""
        return f"{fewer}use a machine with more memory, raise its limit, or train a smaller model"
    if isinstance(job, SftJob):
        limit = job.config.microbatch_tokens
        change = "set base.sft.microbatch_tokens" if limit is None else f"lower base.sft.microbatch_tokens {limit}"
        return f"{change}, or use a machine with more memory"
    return f"lower trainer.microbatch_tokens {job.config.microbatch_tokens}, or use a machine with more memory"
