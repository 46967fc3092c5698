"""The forecast of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from contracts.episodes import TokenRole
from trainer.config import require_divisor
from trainer.errors import TrainingConfigError
from trainer.plan.activations import Batch
from trainer.plan.shapes import Shapes
from trainer.plan.sharded import plan_sharded
from trainer.plan.tape import Plan
from trainer.plan.torch_backend import plan_torch

BackendKind = Literal["torch", "fsdp2", "deepspeed"]
ADAMW = 2
"""Numbers for each parameter that AdamW keeps."""


@dataclass(frozen=True)
class Workload:
    """What decides the memory of one iteration's training."""

    config: Mapping[str, Any]
    """Content of the model's config.json."""
    batch: Batch
    backend: BackendKind = "torch"
    ranks: int = 1
    stage: int = 2
    """ZeRO stage; DeepSpeed only."""
    expert_ranks: int = 1
    """Ranks that divide each layer's experts; FSDP2 only."""
    recompute: bool = False
    """Whether the backward pass computes each layer again (activation checkpointing)."""
    resumed: bool = True
    """Whether the trainer state has the optimizer's moments, as after the first iteration."""
    cuda: bool = False


def plan_training(work: Workload) -> Plan:
    """Memory of one rank. Raises SchemaError for a config.json of another model family, TrainingConfigError."""
    shapes = Shapes.of(work.config)
    require_divisor(shapes.model.experts, work.expert_ranks)
    if work.backend == "torch":
        tape = plan_torch(shapes, work.batch, moments=ADAMW, resumed=work.resumed, cuda=work.cuda)
    elif work.backend in ("fsdp2", "deepspeed"):
        tape = plan_sharded(
            shapes,
            work.batch,
            ranks=work.ranks,
            stage=3 if work.backend == "fsdp2" else work.stage,
            moments=ADAMW,
            recompute=work.recompute,
            cuda=work.cuda,
            deepspeed=work.backend == "deepspeed",
            expert_ranks=work.expert_ranks,
        )
    else:
        raise TrainingConfigError(f"backend {work.backend} has no memory plan: use torch, fsdp2 or deepspeed")
    return tape.plan(work.ranks)


def batch_of(batches: Iterable[pa.RecordBatch], microbatch_tokens: int, ranks: int = 1) -> Batch:
    """Largest forward pass over rows with `token_role`, if each rank packs `microbatch_tokens`."""
    rows = total = longest = scored = 0
    for batch in batches:
        roles = batch.column("token_role")
        lengths = pc.list_value_length(roles)
        rows, total = rows + batch.num_rows, total + (pc.sum(lengths).as_py() or 0)
        longest = max(longest, pc.max(lengths).as_py() or 0)
        scored += pc.sum(pc.equal(pc.list_flatten(roles), int(TokenRole.POLICY))).as_py() or 0
    if not total:
        return Batch(0, 0)
    tokens = min(max(microbatch_tokens, longest), -(-total // ranks) if rows > ranks else longest)
    sequences = max(1, round(tokens * rows / total))
    return Batch(tokens, -(-tokens * scored // total), rows=rows, sequences=sequences)
