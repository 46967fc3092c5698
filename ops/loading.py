"""Read the tasks of a suite and the tokenizer of a policy from their artifacts."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.chat import ChatTokenizer
from contracts.store import Store
from contracts.tasks import Split, Task, read_tasks
from resources.experiment import Experiment


def load_tasks(store: Store, suite: ArtifactRef) -> dict[str, Task]:
    """All tasks of a suite by id, in its order."""
    return {task.task_id: task for task in read_tasks(open_artifact(store, suite).table("tasks.parquet"))}


def split_tasks(tasks: Mapping[str, Task], split: Split) -> list[Task]:
    """The tasks of one split, in the suite's order."""
    return [task for task in tasks.values() if task.split == split]


def load_tokenizer(experiment: Experiment, policy: Artifact) -> ChatTokenizer:
    """Tokenizer of a checkpoint, which writes tool calls as the experiment's base policy does."""
    return ChatTokenizer.from_directory(policy.directory(), spaced=experiment.base.spaced)
