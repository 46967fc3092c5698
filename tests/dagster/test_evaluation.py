"""An evaluation is committed only when it says something about its policy."""

from __future__ import annotations

import dagster as dg
import pytest
from dagster_world import World

from contracts.artifacts import list_artifacts
from inference.engines.config import OpenAIConfig
from inference.errors import EngineUnreachable
from ops.evaluation import play_splits
from ops.graph import EVALUATION
from ops.step import begin
from resources.errors import EvaluationIncomplete
from resources.progress import no_progress
from resources.refs import require_ref
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from tests.ports import free_port


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


def test_evaluations_are_played_by_their_own_engine(ran: World) -> None:
    address = f"http://127.0.0.1:{free_port()}/v1"
    engine = OpenAIConfig(base_url=address, retries=0)
    evaluation = ran.experiment.evaluation.model_copy(update={"engine": engine, "gate_samples": 3})
    elsewhere = ran.experiment.model_copy(update={"evaluation": evaluation})
    step = begin(dg.build_op_context(), elsewhere, EVALUATION, ran.store, no_progress)
    policy, suite = (require_ref(ran.store, ran.experiment.name, asset) for asset in ("base_policy", "task_suite"))
    sampler, sandboxes = SamplerResource(), SandboxesResource()
    try:
        with pytest.raises(EngineUnreachable, match=address):
            play_splits(step, sampler, sandboxes, policy, suite)
    finally:
        sampler.close()
        sandboxes.close()
