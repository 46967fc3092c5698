"""Build the `task_suite` artifact: draw tasks, prove them in sandboxes, publish them."""

from __future__ import annotations

from collections import Counter

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import action_key
from contracts.store import Store
from contracts.suites import add_tasks
from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.tasks.importing.find import find_suite, suites_of
from curation.tasks.suite import SUITE_VERSION, ImportedSuiteConfig, SuiteConfig, TaskSuiteConfig, generate_tasks
from curation.tasks.validate import Progress, ValidationReport, validate_tasks
from envd.client import SandboxClient

MAX_BROKEN_SHARE = 0.02


def suite_key(config: TaskSuiteConfig) -> str:
    """Action key of the suite of this configuration."""
    return action_key("task_suite", {}, config.made_from, SUITE_VERSION)


def planned_key(config: SuiteConfig, store: Store) -> str | None:
    """Action key of the suite of this configuration; None if it is imported and the store lacks it."""
    if isinstance(config, TaskSuiteConfig):
        return suite_key(config)
    found = suites_of(store, config.suite)
    return found[0].ref.key if len(found) == 1 else None


def find_built(config: SuiteConfig, store: Store) -> Artifact | None:
    """Suite of this configuration, or None if it is not built.

    Raises ArtifactMissing if it is imported and the store lacks it.
    """
    if isinstance(config, ImportedSuiteConfig):
        return find_suite(store, config.suite)
    return find_artifact(store, "task_suite", suite_key(config))


async def build_suite(
    config: SuiteConfig, store: Store, client: SandboxClient, progress: Progress | None = None
) -> Artifact:
    """Build and validate the suite, or return the existing one; an imported suite must exist.

    Broken tasks are left out and named in validation.json.

    Raises TaskError if more than 2% of the tasks are broken or a cheat passes. An interrupted build resumes.
    """
    found = find_built(config, store)
    if found is not None:
        return found
    assert isinstance(config, TaskSuiteConfig), "an imported suite is found or missing"
    tasks = generate_tasks(config)
    report, sound = await validate_tasks(tasks, client, progress, store=store)
    _accept(report)
    return _publish(config, store, sound, report)


def _accept(report: ValidationReport) -> None:
    passed = [cheat for cheat in report.cheats if cheat.solved]
    if passed:
        raise TaskError(
            f"the cheat {passed[0].cheat} passes task {passed[0].task_id} ({len(passed)} of {len(report.cheats)} cheats"
            " pass): repair the verifier before training with it"
        )
    if len(report.broken) > MAX_BROKEN_SHARE * report.tasks:
        first = report.broken[0]
        raise TaskError(
            f"{len(report.broken)} of {report.tasks} tasks are broken (at most {MAX_BROKEN_SHARE:.0%} may be), "
            f"first {first.task_id}: {first.reason}; see whether pytest runs in the sandbox, or repair the generator"
        )


def _publish(config: TaskSuiteConfig, store: Store, tasks: list[Task], report: ValidationReport) -> Artifact:
    splits = Counter(task.split.value for task in tasks)
    meta = {
        "tasks": len(tasks),
        "families": report.families,
        "splits": {split.value: splits[split.value] for split in Split},
    }
    with ArtifactWriter(
        store, "task_suite", suite_key(config), parents={}, config=config.made_from, code_version=SUITE_VERSION
    ) as out:
        add_tasks(out, tasks)
        out.add_json("validation.json", report.model_dump())
        return out.commit(meta=meta)
