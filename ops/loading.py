"""Read the tasks of a suite and the tokenizer of a policy from their artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.chat import ChatTokenizer
from contracts.store import Store
from contracts.suites import read_suite
from contracts.tasks import Split, Task
from resources.evaluation import PlaySettings

_FILE = "tasks.parquet"
_CONFIG = "config.json"
_parsed: dict[str, Mapping[str, Task]] = {}
"""Tasks of the suite that this process read last, by its content digest: nearly every step of an iteration needs them.
"""


def load_tasks(store: Store, suite: ArtifactRef) -> Mapping[str, Task]:
    """All tasks of a suite by id, in its order. Parsed once; the file is checked at every call."""
    artifact = open_artifact(store, suite)
    artifact.path(_FILE)
    found = _parsed.get(suite.digest)
    if found is None:
        found = MappingProxyType({task.task_id: task for task in read_suite(artifact)})
        _parsed.clear()
        _parsed[suite.digest] = found
    return found


def split_tasks(tasks: Mapping[str, Task], split: Split) -> list[Task]:
    """The tasks of one split, in the suite's order."""
    return [task for task in tasks.values() if task.split == split]


def vocabulary_of(policy: Artifact) -> int:
    """Token ids of a policy are below it; 0: unknown, of a policy at a server."""
    return int(policy.json(_CONFIG)["vocab_size"]) if _CONFIG in policy.names() else 0


def load_tokenizer(settings: PlaySettings, policy: Artifact) -> ChatTokenizer:
    """Tokenizer of a policy, which writes tool calls as these settings say."""
    return ChatTokenizer.from_directory(policy.directory(), spaced=settings.spaced)
