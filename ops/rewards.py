"""Grade the episodes of an iteration in sandboxes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from contracts.artifacts import Artifact, open_artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import STRAGGLERS
from curation.rewards import RewardConfig, grade_rollouts
from curation.rewards.grading import Graded
from curation.rewards.tables import EVIDENCE_FILE
from curation.statistics import pass_rate
from curation.verify import Verifier
from ops.loading import load_tasks, load_tokenizer
from ops.step import Step
from resources.loops import run_async
from resources.sandboxes import SandboxesResource


def grade(step: Step, sandboxes: SandboxesResource) -> Artifact:
    """Make the `rewards` artifact of an iteration's rollouts."""
    found = step.work.find()
    if found is not None:
        return found
    config, graded = step.experiment.rewards, run_async(_grade(step, sandboxes))
    with step.work.writer() as out:
        out.add_table("rewards.parquet", graded.rewards)
        if config.components:
            # why, not what: a judge's other words for the same score change nothing that comes after
            out.add_table(EVIDENCE_FILE, graded.evidence, telemetry=True)
        return out.commit(meta=_facts(graded.rewards, config))


async def _grade(step: Step, sandboxes: SandboxesResource) -> Graded:
    experiment = step.experiment

    def tokenizer() -> ChatTokenizer:
        return load_tokenizer(experiment, open_artifact(step.store, step.inputs.policy))

    async with sandboxes.client(experiment.sandboxes) as client:
        return await grade_rollouts(
            open_artifact(step.store, step.parent("rollouts")),
            load_tasks(step.store, step.parent("task_suite")),
            Verifier(client, step.store),
            experiment.rewards.model_copy(update={"max_ungraded": experiment.ungraded_allowed}),
            lambda done, total: step.progress.update("grading", done, total),
            store=step.store,
            tokenizer=tokenizer,
        )


def _facts(table: pa.Table, config: RewardConfig) -> dict[str, Any]:
    rewards = [value for value in table["reward"].to_pylist() if value is not None]
    rate = pass_rate(table)
    stragglers = sum(verdict in STRAGGLERS for verdict in table["verdict"].to_pylist())
    facts = {
        "graded": len(rewards),
        "ungraded": table.num_rows - len(rewards) - stragglers,
        "stragglers": stragglers,
        "solved": rate.solved,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "pass_rate": rate.rate,
        "tampered": table["verdict"].to_pylist().count("tampered"),
        "ungradable": table["verdict"].to_pylist().count("ungradable"),
    }
    return facts | ({"recomputation": recomputation(config)} if config.components else {})


def recomputation(config: RewardConfig) -> str:
    """Whether grading the same rollouts again in another store gives identical or equivalent rewards."""
    if not config.asked:
        return "identical"
    names = ", ".join(f"{each.name} (model {each.model})" for each in config.asked)
    return f"equivalent: what {names} answered is kept in this store; asked elsewhere, a model may answer otherwise"
