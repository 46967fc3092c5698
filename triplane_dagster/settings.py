"""Find steps that were made with other settings than the experiment has now, from the slices that artifacts record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from contracts.artifacts import Artifact, find_artifact, open_artifact
from contracts.digests import digest_of
from contracts.store import Store
from curation.tasks.suite import TaskSuiteConfig
from ops import keys
from ops.evaluation import WHO, readings_of
from resources.experiment import Experiment, SftBase
from resources.refs import read_artifact

Slices = tuple[str, Any, Any]
"""(step, its slice as recorded, the experiment's slice of it)."""


def changed_steps(store: Store, experiment: Experiment, iterations: Sequence[str]) -> list[str]:
    """Steps of the base policy and of these iterations whose recorded slice differs from the experiment's, in graph
    order.
    """
    changed: dict[str, None] = {}
    for step, recorded, current in _slices(store, experiment, iterations):
        if digest_of(recorded) != digest_of(current):
            changed[step] = None
    return list(changed)


def _slices(store: Store, experiment: Experiment, iterations: Sequence[str]) -> Iterator[Slices]:
    suite = read_artifact(store, experiment.name, "task_suite")
    if suite is not None and isinstance(experiment.tasks, TaskSuiteConfig):
        yield "task_suite", suite.manifest.config, experiment.tasks.model_dump(mode="json")
    yield from _base(store, experiment)
    for iteration in iterations:
        yield from _iteration(store, experiment, iteration)


def _base(store: Store, experiment: Experiment) -> Iterator[Slices]:
    base, made = experiment.base, read_artifact(store, experiment.name, "base_policy")
    if made is None or not isinstance(base, SftBase):
        return
    yield "base_policy", made.manifest.config, keys.sft_slice(experiment, base)
    shown = made.manifest.parents.get("demonstrations")
    if shown is not None:
        wanted = {**base.demonstrations.model_dump(), "suite_seed": experiment.demonstrated.seed}
        yield "base_policy", open_artifact(store, shown).manifest.config, wanted


def _iteration(store: Store, experiment: Experiment, iteration: str) -> Iterator[Slices]:
    def made(asset: str) -> Artifact | None:
        return read_artifact(store, experiment.name, asset, iteration)

    prompts, rollouts, evaluation = made("prompts"), made("rollouts"), made("evaluation")
    if prompts is not None:
        recorded = prompts.manifest.config
        yield "prompts", recorded, keys.prompts_slice(experiment, iteration, recorded.get("cursor", 0))
    plan = find_artifact(store, "rollout_plan", rollouts.ref.key) if rollouts else None
    if plan is not None:
        yield "rollouts", plan.manifest.config, keys.rollouts_slice(experiment, iteration)
    for step, slice_ in (
        ("rewards", experiment.rewards.slice()),
        ("dataset", experiment.dataset.model_dump(mode="json")),
        ("checkpoint", keys.training_slice(experiment, iteration)),
    ):
        artifact = made(step)
        if artifact is not None:
            yield step, artifact.manifest.config, slice_
    if evaluation is not None:
        yield from _evaluation(store, experiment, evaluation)
    decision = made("sampler")
    if decision is not None:
        yield "sampler", decision.manifest.config, keys.decision_slice(experiment, iteration)


def _evaluation(store: Store, experiment: Experiment, evaluation: Artifact) -> Iterator[Slices]:
    yield "evaluation", evaluation.manifest.config, {"confidence": experiment.promotion.confidence}
    readings = {each.name: each for each in readings_of(experiment)}
    compared = {f"{who}_{name}": each for name, each in readings.items() for who in WHO}
    # the best policy so far may have been played long ago: how says nothing of this evaluation's settings
    runs = {
        role: ref
        for role, ref in evaluation.manifest.parents.items()
        if ref.kind == "evaluation_run" and role.startswith(tuple(f"{who}_" for who in WHO))
    }
    for role, ref in runs.items():
        wanted = compared[role].slice(experiment) if role in compared else {}
        yield "evaluation", open_artifact(store, ref).manifest.config, wanted
    yield "evaluation", sorted(runs), sorted(compared)
