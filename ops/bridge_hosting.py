"""Compose what hosted episodes of the bridge are played with: an experiment's tasks, settings and rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef
from contracts.errors import ConfigError, InfraFault
from contracts.store import Store
from contracts.tasks import Task
from curation.errors import GradingIncomplete
from curation.rewards.config import RewardConfig
from curation.rewards.grading import grade_episodes
from curation.verify import Verifier
from inference.bridge.hosted.hosting import Grade, Hosting
from inference.rollouts.workspace import Workspaces
from ops.loading import load_tasks, load_tokenizer
from resources.experiment import Experiment
from resources.sandboxes import SandboxesResource


class EpisodeGrader:
    """Rewards of single episodes, as the rewards step gives them."""

    def __init__(self, verifier: Verifier, config: RewardConfig) -> None:
        """Raises ConfigError for rewards that ask judges or reward models."""
        if config.asked:
            raise ConfigError(
                f"rewards.components[{config.asked[0].name}] asks a model, which hosted episodes do not: leave it out"
            )
        self._verifier, self._config = verifier, config.model_copy(update={"max_ungraded": 0.0})

    async def grade(self, task: Task, episode: pa.Table) -> Grade:
        """See inference.bridge.hosted.hosting.Grader."""
        try:
            rewards = await grade_episodes(
                episode, {task.task_id: task}, self._verifier, self._config, lambda done, total: None
            )
        except GradingIncomplete as error:
            raise InfraFault(str(error)) from error
        (row,) = rewards.to_pylist()
        components = {each["name"]: each["value"] for each in row["components"]}
        return Grade(row["reward"], components, row["verdict"])


@asynccontextmanager
async def open_hosting(
    experiment: Experiment, store: Store, policy: Artifact, suite: ArtifactRef, sandboxes: SandboxesResource
) -> AsyncIterator[Hosting]:
    """Hosting of all tasks of a suite by an experiment's rollouts, sandboxes and rewards sections.

    policy: whose tokenizer is used. Raises ConfigError for what hosted episodes do not do.
    """
    if experiment.rollouts.record_routing:
        raise ConfigError(
            f"experiment {experiment.name} has rollouts.record_routing, but hosted episodes record no routing: leave it"
            " out"
        )
    limits = experiment.sandboxes.limits.limits()
    async with sandboxes.client(experiment.sandboxes) as client:
        yield Hosting(
            load_tasks(store, suite),
            load_tokenizer(experiment, policy),
            experiment.rollouts,
            Workspaces(client, limits, experiment.rollouts.episode_timeout_s, store),
            EpisodeGrader(Verifier(client, store), experiment.rewards),
        )
