"""Allocations of backends that divide the model among ranks: FSDP2 and DeepSpeed's ZeRO.

Sources: torch.distributed.fsdp.fully_shard's documentation; "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (arXiv:1910.02054), sections 5 and 7; DeepSpeed's stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from trainer.plan.activations import F32, Batch, experts_backward, experts_bytes, head_bytes, layer_bytes, saved_bytes
from trainer.plan.shapes import Shapes
from trainer.plan.tape import Tape
from trainer.plan.torch_backend import DEQUANTIZING, QUANTIZING, hold_data

REDUCE_BUCKET = 500_000_000
"""Elements of DeepSpeed's buffer, in which gradients wait to be summed over the ranks."""


def plan_sharded(
    shapes: Shapes,
    batch: Batch,
    *,
    ranks: int,
    stage: int,
    moments: int,
    recompute: bool,
    cuda: bool,
    deepspeed: bool,
    expert_ranks: int = 1,
) -> Tape:
    """stage: what is divided. 1: moments and masters, 2: gradients too, 3: weights too (as FSDP2 does).

    recompute: whether each layer is computed again in backward. deepspeed: whether DeepSpeed divides, else FSDP2.
    expert_ranks: among how many ranks the experts of a layer are divided; tokens are assumed to be spread evenly.
    """
    bucket = F32 * (REDUCE_BUCKET if cuda else min(REDUCE_BUCKET, shapes.parameters)) if deepspeed else 0
    tape, share = Tape(cuda=cuda), F32 * shapes.parameters / ranks
    tape.enter("load")
    tape.touch("trainer state as read", F32 * shapes.largest)
    tape.hold("masters", share)
    # with expert parallelism DeepSpeed's ranks train their experts in place
    whole = F32 * (shapes.parameters - (shapes.experts * shapes.model.layers if expert_ranks > 1 else 0))
    if stage < 3:
        tape.hold("weights of the forward pass", whole)
    elif deepspeed:  # its parts of the weights stand beside the masters
        tape.hold("weights of the forward pass", share)
        tape.hold("communication buffers", bucket)
    if not deepspeed or stage == 3:
        tape.hold("gradients", share)
    tape.hold("optimizer moments", moments * share)
    hold_data(tape, batch, numbers=2)
    tape.enter("backward")
    with tape.brief("communication buffers", bucket if stage < 3 else 0):
        # of a single rank ZeRO 3 uses the parts in place, and FSDP2 copies a layer only when it computes
        gathered = min(2, shapes.model.layers) if ranks > 1 else int(not deepspeed)
        gathered = gathered if stage == 3 else 0
        _backward(tape, shapes, batch, gathered, expert_ranks, recompute=recompute, cuda=cuda)
    tape.enter("step")
    if deepspeed and stage < 3:
        tape.hold("gradients", share if stage > 1 else whole + (F32 * shapes.parameters - whole) / ranks)
    with tape.brief("gradients", share if deepspeed and stage == 3 else 0):  # a copy in the optimizer's layout
        tape.touch("optimizer temporaries", F32 * shapes.largest / ranks)
    if deepspeed and stage < 3:
        tape.drop("gradients")
    tape.enter("publish")
    # each rank gathers its share of the whole tensors: masters and moments; with DeepSpeed and tied embeddings the
    # measured peak is one of these larger
    tied = F32 * shapes.model.vocabulary * shapes.model.hidden if deepspeed and shapes.model.tied else 0
    tape.touch("gathered to be written", share * (1 + moments) + tied)
    return tape


def _backward(
    tape: Tape, shapes: Shapes, batch: Batch, gathered: int, expert_ranks: int, *, recompute: bool, cuda: bool
) -> None:
    """gathered: layers of which whole weights exist at a time, beside the embeddings."""
    model, layer = shapes.model, F32 * (shapes.layer - shapes.experts + shapes.experts // expert_ranks)
    head, _, head_back = head_bytes(model, batch, cuda=cuda)
    # results of other ranks' experts, which a layer keeps to weight them
    sent = F32 * batch.tokens * model.experts_per_token * model.hidden if expert_ranks > 1 else 0
    one = layer_bytes(model, batch) + sent
    if recompute:
        saved = F32 * batch.tokens * model.hidden * model.layers + one
    else:
        saved = saved_bytes(model, batch) + sent * model.layers
    own = replace(model, experts=model.experts // expert_ranks)
    stack = (own.experts or 1) * model.hidden * model.width

    @contextmanager
    def one_layer() -> Iterator[None]:
        with tape.brief("gathered weights", gathered * layer), tape.brief("leaves of a layer", layer):
            yield

    with tape.brief("gathered weights", F32 * shapes.outside if gathered else 0):
        with one_layer():
            tape.touch("quantization", max(QUANTIZING + 1, DEQUANTIZING) * stack)
        with tape.brief("activations", saved):
            tape.touch("logits", max(head, head_back))
        left = saved if recompute else saved - experts_bytes(model, batch.scored)
        with one_layer(), tape.brief("activations", left):
            tape.touch("gradients in flight", layer + experts_backward(own, batch.tokens))
    tape.touch("gradients in flight", F32 * shapes.outside)
