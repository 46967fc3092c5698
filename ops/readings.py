"""Readings of an evaluation: the splits, samples per task and temperature with which a policy runs.

Each (policy, reading) is one artifact of kind `evaluation_run`, which every experiment with equal settings shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.artifacts import ArtifactRef, open_artifact
from contracts.chat import CHAT_VERSION
from contracts.digests import action_key
from contracts.store import Store
from contracts.tasks import Split
from curation.errors import TaskError
from curation.rewards import REWARDS_VERSION
from curation.tasks.build import find_built
from curation.tasks.suite import TaskSuiteConfig
from inference.engines.config import EngineConfig
from inference.rollouts import ROLLOUTS_VERSION
from ops.spec import Work
from resources.experiment import Experiment

EVALUATION_RUN = "evaluation_run"
EVALUATION_RUN_VERSION = f"{ROLLOUTS_VERSION}+{REWARDS_VERSION}"
EVALUATION_SLOTS = "evaluation"
"""Replaces the experiment's name in the seeds of evaluations, so that experiments share the runs of an equal policy."""
WHO = ("candidate", "parent")
"""The policies that an evaluation compares."""
_GROUPING = {
    *("group_size", "oversample", "keep", "refill", "concurrency", "profile", "record_routing"),
    *("carry_over", "max_carries"),
}


@dataclass(frozen=True)
class Reading:
    """Settings with which a policy runs on a split."""

    split: Split
    samples: int
    """Episodes per task."""
    greedy: bool
    """Temperature 0 instead of that of the rollouts."""

    @property
    def name(self) -> str:
        """Suffix of the roles, e.g. held_out_greedy."""
        return f"{self.split.value}_greedy" if self.greedy else self.split.value

    def slice(self, experiment: Experiment) -> dict[str, Any]:
        """Settings that affect the run, beyond policy and suite; none of grouping, rewards or training."""
        rollouts = experiment.rollouts.model_dump(mode="json", exclude=_GROUPING)
        return {
            **sampling_slice(experiment, experiment.evaluation_engine),
            "split": self.split.value,
            "samples": self.samples,
            "rollouts": {**rollouts, "temperature": 0.0} if self.greedy else rollouts,
        }

    def work(self, store: Store, experiment: Experiment, policy: ArtifactRef, suite: ArtifactRef) -> Work:
        """The run of a policy."""
        parents, config = {"policy": policy, "task_suite": suite}, self.slice(experiment)
        inputs = {role: ref.digest for role, ref in parents.items()}
        key = action_key(EVALUATION_RUN, inputs, config, EVALUATION_RUN_VERSION)
        return Work(store, EVALUATION_RUN, key, parents, config, EVALUATION_RUN_VERSION)


def gate_reading(experiment: Experiment) -> Reading:
    """Reading of the gate, which decides about promotion."""
    return Reading(Split.GATE, experiment.evaluation.gate_samples, greedy=False)


def readings_of(experiment: Experiment) -> list[Reading]:
    """All readings of a policy: the gate, and the splits for information only, sampled and greedy.

    Imported suites have no unseen tasks.
    """
    config = experiment.evaluation
    reported = {Split.HELD_OUT: config.held_out_samples}
    if isinstance(experiment.tasks, TaskSuiteConfig):
        reported[Split.UNSEEN] = config.unseen_samples
    found = [gate_reading(experiment)]
    for split, samples in reported.items():
        if samples:
            found.append(Reading(split, samples, greedy=False))
        if samples and config.greedy:
            found.append(Reading(split, 1, greedy=True))
    return found


def empty_splits(experiment: Experiment, tasks: Mapping[str, int]) -> list[str]:
    """Splits that an experiment trains on or plays and that hold no task. tasks: their number by split."""
    wanted = dict.fromkeys([Split.TRAIN, *(each.split for each in readings_of(experiment))])
    return [split.value for split in wanted if not tasks.get(split.value)]


def require_splits(store: Store, experiment: Experiment, suite: ArtifactRef | None = None) -> None:
    """Refuse a suite that lacks the tasks of a split, before hours of sampling. suite: None for the experiment's own,
    if it is built.

    Raises TaskError with the fix.
    """
    found = open_artifact(store, suite) if suite else find_built(experiment.tasks, store)
    empty = empty_splits(experiment, found.meta["splits"]) if found else []
    if found is None or not empty:
        return
    unread = [each for each in empty if each in (Split.HELD_OUT.value, Split.UNSEEN.value)]
    settings = ", ".join(f"evaluation.{each}_samples: 0" for each in unread)
    raise TaskError(
        f"task suite {found.ref.short} has no tasks in {' and '.join(empty)}, which {experiment.name} uses: make a"
        f" suite with tasks there{f', or set {settings}' if unread == empty else ''}"
    )


def sampling_slice(experiment: Experiment, engine: EngineConfig) -> dict[str, Any]:
    """Settings that affect an episode that an engine samples, beyond those of the agent loop."""
    return {
        "engine": engine.implementation,
        "sandbox_limits": experiment.sandboxes.limits.model_dump(mode="json"),
        "spaced": experiment.base.spaced,
        "seed": experiment.seed,
        **({"chat_version": CHAT_VERSION} if experiment.base.original else {}),
    }
