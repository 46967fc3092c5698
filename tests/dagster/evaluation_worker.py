"""Evaluate the base policy of the tiny experiment on all splits: `python evaluation_worker.py STORE ASKED`.

ASKED: file that gets a line for every verdict that is made and not found.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import dagster as dg
import pytest

from contracts.artifacts import Artifact
from contracts.store import Store, open_store
from contracts.tasks import Task
from curation.verdicts import Verdict, verdict_key
from curation.verify import Verifier
from ops.evaluation import play_splits
from ops.graph import EVALUATION
from ops.step import begin
from resources.experiment import Experiment, load_experiment
from resources.progress import no_progress
from resources.refs import require_ref
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource

TINY = Path(__file__).parent / "tiny.yaml"
ONE_AT_A_TIME = ["rollouts.concurrency=1"]
"""Changes no key: where content depended on it, digests would tell."""


def play_base(experiment: Experiment, store: Store) -> dict[str, Artifact]:
    policy, suite = (require_ref(store, experiment.name, asset) for asset in ("base_policy", "task_suite"))
    sampler, sandboxes = SamplerResource(), SandboxesResource()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ops.step.OBSERVE_EVERY_S", float("inf"))  # outside a run nothing can be observed
        step = begin(dg.build_op_context(), experiment, EVALUATION, store, no_progress)
        try:
            return play_splits(step, sampler, sandboxes, policy, suite)
        finally:
            sampler.close()
            sandboxes.close()


def unplayed(store: Store, folder: Path) -> Store:
    """Copy of a local store without what evaluations and verifiers made."""
    left_out = shutil.ignore_patterns("evaluation", "evaluation_run", "verdicts", "tmp")
    shutil.copytree(store.url, folder, ignore=left_out)
    return open_store(str(folder))


def record_verdicts(asked: Path) -> None:
    verify = Verifier._verify

    async def recorded(self: Verifier, task: Task, diff: bytes) -> Verdict:
        with asked.open("a") as file:
            file.write(f"{verdict_key(task, diff)}\n")
        return await verify(self, task, diff)

    Verifier._verify = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    record_verdicts(Path(sys.argv[2]))
    os.environ["TRIPLANE_STORE"] = sys.argv[1]
    play_base(load_experiment(TINY, ONE_AT_A_TIME), StoreResource().open())
