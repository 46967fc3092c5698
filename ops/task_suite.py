"""Make the task suite, validated in sandboxes."""

from __future__ import annotations

from contracts.artifacts import Artifact, open_artifact
from curation.tasks.build import build_suite
from ops.fork import source_inputs
from ops.step import Step
from resources.loops import run_async
from resources.sandboxes import SandboxesResource


def make_suite(step: Step, sandboxes: SandboxesResource) -> Artifact:
    """Validated task suite of the experiment. That of a fork is its source's."""
    if step.experiment.fork is not None:
        return open_artifact(step.store, source_inputs(step.store, step.experiment.fork).task_suite)

    async def build() -> Artifact:
        async with sandboxes.client(step.experiment.sandboxes) as client:
            return await build_suite(
                step.experiment.tasks,
                step.store,
                client,
                lambda done, total: step.progress.update("validating", done, total),
            )

    return run_async(build())
