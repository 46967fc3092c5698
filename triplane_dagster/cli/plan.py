"""`triplane plan`: the memory that an experiment needs, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triplane_dagster.cli.experiments import find_experiment
from triplane_dagster.cli.options import AsJson, ExperimentName, Overrides
from triplane_dagster.cli.output import console, print_json, print_rows

if TYPE_CHECKING:
    from triplane_dagster.memory import ExperimentPlan

MEANING = {
    "masters": "float32 weights that the optimizer changes",
    "codes": "FP8 weights that are exported, one byte each",
    "scales": "one float32 for each block of 128 x 128 codes",
    "leaves": "codes x scales in float32: what the forward pass reads",
    "gradients": "float32, one for each weight",
    "optimizer moments": "AdamW's mean and mean square, float32",
    "loaded checkpoint": "the parent's weights, held to compare codes with masters",
    "checkpoint as read": "the parent's files in memory",
    "trainer state as read": "the parent's masters and moments, before they are copied",
    "weights of the forward pass": "whole weights, which ZeRO 1 and 2 do not divide",
    "communication buffers": "gradients that wait to be summed over the ranks",
    "gathered weights": "whole layers that are gathered for a pass and freed after it",
    "leaves of a layer": "quantized weights of the layer that computes",
    "activations": "what the forward pass keeps for the backward pass, by tokens of a microbatch",
    "logits": "scored tokens x vocabulary, or tiles of it",
    "gradients in flight": "gradients of one layer before they are added",
    "quantization": "copies of the largest group of matrices while its codes are made",
    "optimizer temporaries": "AdamW's denominator of the largest group",
    "gathered to be written": "whole tensors that a rank writes for all",
    "data": "tokens and log probabilities of the iteration",
}


def plan(experiment: ExperimentName = "quickstart", overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print how much memory training and vLLM need, by kind and moment, beside this machine's limits. Runs nothing.

    Training packs full microbatches here, and every token counts as the policy's: real batches need less.

    Examples:

        triplane plan

        triplane plan -e qwen3-30b-a3b --set trainer.microbatch_tokens=8192
    """
    from triplane_dagster.memory import plan_experiment

    wanted = find_experiment(experiment, overrides)
    found = plan_experiment(wanted)
    if as_json:
        print_json({"experiment": wanted.name, **_as_json(found)})
        return
    _print_training(wanted.name, found)
    _print_limits(found)
    if found.engine is not None:
        _print_engine(found)


def _as_json(found: ExperimentPlan) -> dict[str, Any]:
    training, work, engine = found.training, found.work, found.engine
    return {
        "model": found.model,
        "backend": work.backend,
        "ranks": work.ranks,
        "tokens": work.batch.tokens,
        "peak": training.peak,
        "moment": training.moment,
        "total": training.peak * training.ranks,
        "moments": {name: dict(kinds) for name, kinds in training.moments.items()},
        "limits": [vars(limit) for limit in found.limits],
        "fits": found.fits,
        "engine": None if engine is None else {**vars(engine), "cache": engine.cache},
        "gpus": [{"name": name, "bytes": size} for name, size in found.gpus],
    }


def _print_training(name: str, found: ExperimentPlan) -> None:
    from trainer.plan.limits import in_units
    from trainer.plan.shapes import Shapes

    training, work = found.training, found.work
    kinds = [kind for kind in MEANING if any(kind in held for held in training.moments.values())]
    rows = [
        {"kind": kind, **{moment: in_units(held.get(kind, 0)) for moment, held in training.moments.items()}}
        | {"meaning": MEANING[kind]}
        for kind in kinds
    ]
    totals = {moment: in_units(sum(held.values())) for moment, held in training.moments.items()}
    rows.append({"kind": "sum", **totals, "meaning": "live bytes of one rank at each moment's peak"})
    print_rows(rows, as_json=False, title=f"{name}: memory of one of {work.ranks} rank(s), backend {work.backend}")
    size = Shapes.of(work.config).parameters
    console().print(
        f"{size / 1e9:.3g} billion parameters ({found.model}), microbatches of {work.batch.tokens} tokens. Peak:"
        f" {in_units(training.peak)} in {training.moment}, {training.peak / size:.3g} bytes a parameter"
        + (f"; {in_units(training.peak * work.ranks)} on all ranks." if work.ranks > 1 else ".")
    )


def _print_limits(found: ExperimentPlan) -> None:
    from trainer.plan.limits import in_units

    limits = "; ".join(f"{limit.name} {in_units(limit.free)}" for limit in found.limits) or "none known"
    if found.work.cuda and not found.limits:
        console().print("The plan is that of a GPU's memory; no NVIDIA GPU is here to compare it with.")
        return
    verdict = "fits" if found.fits else "does NOT fit: training would be refused here"
    console().print(f"Free memory: {limits}. All ranks on this machine: {verdict}.")
    for name, size in () if found.work.cuda else found.gpus:
        console().print(f"GPU: {name}, {in_units(size)}.")


def _print_engine(found: ExperimentPlan) -> None:
    from trainer.plan.limits import in_units

    engine = found.engine
    assert engine is not None
    rows: list[dict[str, Any]] = [
        {"vLLM, each of its GPUs": "weights", "bytes": in_units(engine.weights)},
        {"vLLM, each of its GPUs": "keys and values of one token", "bytes": in_units(engine.token)},
        {
            "vLLM, each of its GPUs": f"cache of {engine.sequences} episodes of {engine.context} tokens",
            "bytes": in_units(engine.cache),
        },
    ]
    print_rows(rows, as_json=False, title=f"vLLM on {engine.gpus} GPU(s), without activations and CUDA graphs")
    for name, size in found.gpus[:1] or [("a GPU of 80 GB", 80 * 10**9)]:
        room = engine.room(size)
        console().print(
            f"{name}: {engine.utilization:.0%} of it leaves room for {room} tokens,"
            f" {room // engine.context} whole contexts; more episodes wait or are preempted."
        )
    for problem in engine.problems:
        console().print(f"WILL FAIL: {problem}.")
