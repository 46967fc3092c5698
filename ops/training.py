"""Training jobs (warm start and one iteration of policy gradient), each in a process of the launcher."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef, find_artifact, open_artifact
from contracts.retries import backoff_s
from contracts.store import Store
from ops.mixture import shares_of
from ops.results import numbers
from ops.step import Step
from resources.base_config import SftBase
from resources.errors import LaunchFailed, LaunchKilled
from resources.launch import Launch, Launcher
from resources.training_logs import kept_logs
from trainer.config import MixtureSource, RlJob, SftJob
from trainer.leftovers import drop_snapshots

METRIC_NAMES = {"lr": "learning_rate", "old_kl": "KL to the acting policy", "tis_mean": "importance_weight_mean"}
"""Names on the asset page of the trainer's metrics, if they differ."""
LAUNCHES = 3
"""Launches of a training that somebody kills, such as the system for lack of memory."""
OF_ONE_STEP = ("rows", "tokens", "seconds")
"""Metrics that are meaningful for a single optimizer step only."""


def warm_start(
    step: Step,
    launcher: Launcher,
    base: SftBase,
    tokenizer: ArtifactRef,
    sources: Mapping[str, ArtifactRef],
    start: Mapping[str, ArtifactRef],
) -> Artifact:
    """Checkpoint of the base policy, trained if it does not exist. sources: artifacts of `sources_of`, by role. start:
    checkpoint and trainer_state of an imported model, or nothing.
    """
    experiment, shares = step.experiment, shares_of(base)
    work = step.spec.work_on(step.state, {"tokenizer": tokenizer, **sources, **start})
    first, *others = sources.values()
    weights = list(shares.values())[1:]
    job = SftJob(
        store=step.store.url,
        key=work.key,
        seed=experiment.seed,
        **experiment.trainer.launcher.job_fields,
        tokenizer=tokenizer,
        demonstrations=first,
        mixture=tuple(
            MixtureSource(demonstrations=ref, weight=weight) for ref, weight in zip(others, weights, strict=True)
        ),
        sources=tuple(shares),
        model=base.model,
        checkpoint=start.get("checkpoint"),
        trainer_state=start.get("trainer_state"),
        lora=base.lora,
        config=base.sft,
        precision=experiment.trainer.precision,
    )
    return _train(step, launcher, job, "base", base.sft.max_steps, 0)


def train_iteration(step: Step, launcher: Launcher) -> Artifact:
    """Checkpoint trained on this iteration's dataset, trained if it does not exist."""
    trainer, start = step.experiment.trainer, step.parent("checkpoint")
    job = RlJob(
        store=step.store.url,
        key=step.work.key,
        seed=step.work.config["seed"],
        **trainer.launcher.job_fields,
        dataset=step.parent("dataset"),
        checkpoint=start,
        trainer_state=step.parent("trainer_state"),
        config=trainer.rl,
        min_effective_sample_size=step.experiment.off_policy.min_effective_sample_size,
    )
    taken = int(open_artifact(step.store, start).meta.get("step") or 0)
    return _train(step, launcher, job, step.iteration, trainer.optimizer_steps, taken)


def training_records(checkpoint: Artifact) -> list[dict[str, Any]]:
    """The trainer's records, in order; none for an imported checkpoint."""
    if "metrics.jsonl" not in checkpoint.names():
        return []
    return [json.loads(line) for line in checkpoint.path("metrics.jsonl").read_text().splitlines()]


def training_numbers(checkpoint: Artifact) -> dict[str, Any]:
    """The last optimizer step's metrics, and totals of the training that made the checkpoint, for plots."""
    rows = training_records(checkpoint)
    if not rows:
        return {}
    steps = [row for row in rows if "loss" in row]
    last: dict[str, Any] = {}
    for row in rows:
        last.update(row)
    tokens, seconds = (sum(row.get(name, 0) for row in steps) for name in ("tokens", "seconds"))
    totals = {"optimizer_steps": len(steps), "trained_tokens": tokens, "training_seconds": seconds}
    if seconds:
        totals["tokens_per_second"] = tokens / seconds
    shown = {METRIC_NAMES.get(name, name): value for name, value in last.items() if name not in OF_ONE_STEP}
    return numbers(shown) | totals


def training_logs(store: Store, checkpoint: ArtifactRef) -> dict[str, str]:
    """Where the logs of the pods that trained a checkpoint are, for display; empty: it was trained otherwise."""
    where = kept_logs(store, checkpoint.key)
    return {"training_logs": where} if where else {}


def _train(step: Step, launcher: Launcher, job: SftJob | RlJob, name: str, steps: int, taken: int) -> Artifact:
    """Run `job` unless its result exists. name: `base` or the iteration. steps: maximum number of optimizer steps;
    taken: steps that its start has taken.
    """
    found = _result(step.store, job)
    if found is not None:
        drop_snapshots(step.store, job.key)
        return found
    where = step.experiment.trainer.launcher

    def on_message(message: Mapping[str, Any]) -> None:
        metrics = message.get("metrics", message)
        if "step" in metrics:
            step.progress.update("training", metrics["step"] - taken, steps, **numbers(metrics))

    watched = step.experiment.trainer.watch.run(step.experiment.name, name)
    launch = Launch(
        [
            *(sys.executable, "-m", "trainer", "--job", job.model_dump_json()),
            *(["--watch", watched.model_dump_json()] if watched else []),
        ],
        nodes=where.nodes,
        gpus=where.gpus,
        timeout_s=where.timeout_s,
        kind=where.kind,
        key=job.key,
        experiment=step.experiment.name,
        store=step.store,
        placement=step.experiment.placement.trainer,
        is_done=lambda: _result(step.store, job) is not None,
    )
    for number in range(1, LAUNCHES + 1):
        try:
            launcher.run(step.context, launch, on_message)
            break
        except LaunchKilled as error:
            if number == LAUNCHES:
                raise
            step.context.log.warning(f"{error}; launching it again: it continues from its last snapshot")
            time.sleep(backoff_s(number, 1.0))
    found = _result(step.store, job)
    if found is None:
        raise LaunchFailed(
            f"training {job.key[:12]} ended without a checkpoint in {step.store.url}: read the run's log"
        )
    return open_artifact(step.store, found.ref)


def _result(store: Store, job: SftJob | RlJob) -> Artifact | None:
    """The checkpoint, if it and its trainer state are committed."""
    found = find_artifact(store, "checkpoint", job.key)
    return found if find_artifact(store, "trainer_state", job.key) is not None else None
