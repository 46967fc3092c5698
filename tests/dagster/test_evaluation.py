"""An evaluation is committed only when it says something about its policy."""

from __future__ import annotations

import dagster as dg
import pytest
from dagster_world import World

from contracts.artifacts import list_artifacts
from ops.evaluation import play_splits
from ops.graph import EVALUATION
from ops.step import begin
from resources.errors import EvaluationIncomplete
from resources.progress import no_progress
from resources.refs import require_ref
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource


def test_evaluation_without_episodes_fails_and_commits_nothing(ran: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ops.step.OBSERVE_EVERY_S", float("inf")
    )  # outside a run nothing can be observed, however long it takes
    # no turn fits into a millisecond, which the deterministic profile calls a fault of the infrastructure
    rollouts = ran.experiment.rollouts.model_copy(update={"episode_timeout_s": 0.001, "max_attempts": 1})
    hurried = ran.experiment.model_copy(update={"rollouts": rollouts})
    step = begin(dg.build_op_context(), hurried, EVALUATION, ran.store, no_progress)
    policy, suite = (require_ref(ran.store, ran.experiment.name, asset) for asset in ("base_policy", "task_suite"))
    before = len(list(list_artifacts(ran.store, "evaluation_run")))
    sampler, sandboxes = SamplerResource(), SandboxesResource()
    try:
        with pytest.raises(EvaluationIncomplete, match=r"lost (\d+) of \1 episodes"):
            play_splits(step, sampler, sandboxes, policy, suite)
    finally:
        sampler.close()
        sandboxes.close()
    assert len(list(list_artifacts(ran.store, "evaluation_run"))) == before
