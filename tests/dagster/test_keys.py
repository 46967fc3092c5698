from __future__ import annotations

from typing import Any

import pytest

from contracts.artifacts import ArtifactRef
from contracts.tasks import Split
from ops import keys
from resources.experiment import Experiment, SftBase, parse_experiment


def ref(kind: str) -> ArtifactRef:
    return ArtifactRef(kind=kind, key="0" * 64, digest=(kind.encode().hex() + "0" * 64)[:64])


def all_keys(experiment: Experiment) -> dict[str, str]:
    """Every step's key, given the same inputs."""
    base = experiment.base
    assert isinstance(base, SftBase)
    policy, suite = ref("policy"), ref("task_suite")
    return {
        "base_policy": keys.sft_key(experiment, base, ref("tokenizer"), ref("demonstrations")),
        "prompts": keys.prompts_key(experiment, "0001", suite, 5),
        "rollouts": keys.rollouts_key(experiment, "0001", policy, ref("prompts"), suite),
        "rewards": keys.rewards_key(experiment, ref("rollouts"), suite),
        "dataset": keys.dataset_key(experiment, ref("rollouts"), ref("rewards")),
        "checkpoint": keys.checkpoint_key(experiment, "0001", ref("dataset"), policy, ref("state")),
        "evaluation_run": keys.evaluation_run_key(experiment, policy, suite, Split.GATE, 2),
        "evaluation": keys.evaluation_key(experiment, {"candidate_gate": ref("run")}),
        "sampler": keys.decision_key(experiment, "0001", policy, ref("parent"), ref("evaluation")),
    }


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"trainer": {"grpo": {"learning_rate": 1e-3}}}, {"checkpoint"}),
        # threads, device and ranks decide the bits of a training; when it is stopped does not
        ({"trainer": {"launcher": {"threads": 3}}}, {"base_policy", "checkpoint"}),
        ({"trainer": {"launcher": {"gpus": 1}}}, {"base_policy", "checkpoint"}),
        ({"trainer": {"launcher": {"nodes": 2}}}, {"base_policy", "checkpoint"}),
        ({"trainer": {"launcher": {"timeout_s": 60}}}, set()),
        ({"rewards": {"valid": 0.2}}, {"rewards"}),
        ({"dataset": {"drop_truncated": True}}, {"dataset"}),
        ({"rollouts": {"group_size": 4}}, {"rollouts"}),
        ({"rollouts": {"max_turns": 4}}, {"rollouts", "evaluation_run"}),
        ({"prompts": {"groups": 32}}, {"prompts"}),
        ({"prompts": {"workers": 2}}, {"rollouts"}),
        ({"engine": {"threads": 1}}, set()),
        ({"rollouts": {"tool_prompt": True}}, {"rollouts", "evaluation_run"}),
        # both profiles share evaluations, though only throughput lets an episode end by the clock
        ({"rollouts": {"profile": "throughput"}}, {"rollouts"}),
        # no episode depends on how many are in flight, yet the whole of its section is in the rollouts' key
        ({"rollouts": {"concurrency": 7}}, {"rollouts"}),
        ({"sandboxes": {"limits": {"memory_mb": 256}}}, {"rollouts", "evaluation_run"}),
        # where a thing runs: backends are to give the same bytes
        ({"sandboxes": {"backend": "plain"}}, set()),
        ({"sandboxes": {"address": "unix:/run/envd.sock"}}, set()),
        ({"base": {"sft": {"max_steps": 10}}}, {"base_policy"}),
        ({"promotion": {"margin": 0.3}}, {"sampler"}),
        ({"promotion": {"on_refusal": "stop"}}, set()),
        ({"evaluation": {"gate_samples": 5}}, set()),
        ({"iterations": 3, "description": "other"}, set()),
    ],
)
def test_a_slice_moves_the_keys_of_its_own_step_only(change: dict[str, Any], moved: set[str]) -> None:
    before = all_keys(parse_experiment({"name": "one"}))
    after = all_keys(parse_experiment({"name": "one", **change}))
    assert {step for step in before if before[step] != after[step]} == moved


def test_an_equal_policy_plays_an_evaluation_once_across_experiments() -> None:
    one, two = (all_keys(parse_experiment({"name": name})) for name in ("one", "two"))
    assert one["evaluation_run"] == two["evaluation_run"]
    assert one["rollouts"] != two["rollouts"]


def test_iteration_inputs_are_named_by_their_place_alone() -> None:
    one = keys.inputs_key(parse_experiment({"name": "one"}), "0001")
    assert one == keys.inputs_key(parse_experiment({"name": "one", "seed": 5}), "0001")
    assert one != keys.inputs_key(parse_experiment({"name": "one"}), "0002")
    assert one != keys.inputs_key(parse_experiment({"name": "two"}), "0001")
