"""Episodes to rewards to dataset: the curation plane, given sandboxes."""

from __future__ import annotations

import asyncio
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact, open_artifact
from curation.dataset import DATASET_VERSION, build_dataset
from curation.rewards import REWARDS_VERSION, grade_rollouts
from curation.statistics import pass_rate
from curation.verify import Verifier
from ops import keys
from ops.inputs import IterationInputs, load_tasks
from ops.step import Step
from resources.sandboxes import SandboxesResource


def grade(step: Step, sandboxes: SandboxesResource, inputs: IterationInputs, rollouts: ArtifactRef) -> Artifact:
    """The `rewards` artifact of an iteration's rollouts."""
    key = keys.rewards_key(step.experiment, rollouts, inputs.task_suite)
    found = find_artifact(step.store, "rewards", key)
    return found or asyncio.run(_grade(step, sandboxes, inputs, rollouts, key))


async def _grade(
    step: Step, sandboxes: SandboxesResource, inputs: IterationInputs, rollouts: ArtifactRef, key: str
) -> Artifact:
    config = step.experiment.rewards
    async with sandboxes.client(step.experiment.sandboxes) as client:
        table = await grade_rollouts(
            open_artifact(step.store, rollouts),
            load_tasks(step.store, inputs.task_suite),
            Verifier(client, step.store),
            config,
            lambda done, total: step.progress.update("grading", done, total),
        )
    with ArtifactWriter(
        step.store, "rewards", key, parents={"rollouts": rollouts, "task_suite": inputs.task_suite},
        config=config.model_dump(mode="json"), code_version=REWARDS_VERSION,
    ) as out:  # fmt: skip
        out.add_table("rewards.parquet", table)
        rewards = [value for value in table["reward"].to_pylist() if value is not None]
        rate = pass_rate(table)
        return out.commit(
            meta={
                "graded": len(rewards), "ungraded": table.num_rows - len(rewards), "solved": rate.solved,
                "reward_mean": sum(rewards) / len(rewards) if rewards else None, "pass_rate": rate.rate,
            }
        )  # fmt: skip


def make_dataset(step: Step, rollouts: ArtifactRef, rewards: ArtifactRef) -> Artifact:
    """The `dataset` artifact of an iteration."""
    config = step.experiment.dataset
    key = keys.dataset_key(step.experiment, rollouts, rewards)
    found = find_artifact(step.store, "dataset", key)
    if found is not None:
        return found
    with ArtifactWriter(
        step.store, "dataset", key, parents={"rollouts": rollouts, "rewards": rewards},
        config=config.model_dump(mode="json"), code_version=DATASET_VERSION,
    ) as out:  # fmt: skip
        report = build_dataset(open_artifact(step.store, rollouts), open_artifact(step.store, rewards), config, out)
        meta: dict[str, Any] = report.model_dump(mode="json")
        return out.commit(meta=meta)
