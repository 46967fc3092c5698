"""Action keys: what is in them, what is not, and that this version still finds the work of earlier ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.artifacts import ArtifactRef
from contracts.tasks import Split
from curation.tasks.build import suite_key
from curation.tasks.suite import TaskSuiteConfig
from ops import keys
from ops.report.build import report_key
from resources.experiment import Experiment, SftBase, load_experiment, parse_experiment

TINY = Path(__file__).parent / "tiny.yaml"
GOLDEN = {
    "task_suite": "86377004392d6513d64218075b8172738b3506ec90b4e57d6385f51c383a6b1e",
    "tokenizer": "640c5ee26e5449c44d33df2bfcdc28a03a7fc8125c92d9a29dcf99b531a6a7c2",
    "demonstrations": "f1fb122fe8fc5db0a25ec417a661bb7f9be6a5f38cc22f7e084271ff5387baaa",
    "base_policy": "ea2c17e5dce03900cfeaebcaf2d4ca5d6e62629f5db121d7f745207d659a6c5c",
    "iteration_inputs": "ec83717b3b9178b7a7916aa35d5e5cc749104ddeb74c344a9f406f2405f88df0",
    "prompts": "e1bd1459a11c692db0a964089ea7b8bf58dd27879800aa5b5f10e25d038e37de",
    "rollouts": "aade00a696a08c881ad146d58ea997c03e1b96eb0b919e62a09ec4b6407aa69a",
    "rewards": "0909a8ab5a896bf48dd88cf7274ef06f228068de8393d2eee01bbf7941a05012",
    "dataset": "140e71e38c869d2249ae3c4016f1603a4078f70d1d14ee07c6fffe2b0984d534",
    "checkpoint": "c00859b82d069803db52bef030b079a0f3121f046ce615c478321051c0ac8e19",
    "evaluation_run": "1befaec3d586fd40a80ad3fbbbb290625f684765a8fc6ee776e886b78192b3bf",
    "evaluation_run greedy": "92c4f98f2bf00efcf13060d9f11c46ec8dd904508cdc5d4f0226536807276531",
    "evaluation": "77526a8afd2c07c7f1486a75cda6a39270def7a5a38c6353bd7b2e1b00049463",
    "sampler": "02347b1bae3a37a85af5e3bffec001472deec4db8f717046ad0c790742d9331b",
    "report": "12f4aa6082cc13ff09935f0d85486aec8a2e4ec9171ea5e4044ade81e850bd84",
}
"""Keys of the tiny experiment. One may change only together with its step's code version, or work is made twice."""
RUNS = {"evaluation_run", "evaluation_run greedy"}


def ref(kind: str) -> ArtifactRef:
    return ArtifactRef(kind=kind, key="0" * 64, digest=(kind.encode().hex() + "0" * 64)[:64])


def all_keys(experiment: Experiment) -> dict[str, str]:
    """Every step's key, given the same inputs."""
    base = experiment.base
    assert isinstance(base, SftBase) and isinstance(experiment.tasks, TaskSuiteConfig)
    policy, suite, start = ref("policy"), ref("task_suite"), ref("start")
    shown = {"experiment": experiment.name, "iteration": "0001", "history": "0"}
    return {
        "task_suite": suite_key(experiment.tasks),
        "tokenizer": keys.tokenizer_key(experiment),
        "demonstrations": keys.demonstrations_key(experiment, base, ref("tokenizer")),
        "base_policy": keys.sft_key(experiment, base, ref("tokenizer"), ref("demonstrations")),
        "iteration_inputs": keys.inputs_key(experiment, "0001"),
        "prompts": keys.prompts_key(experiment, "0001", suite, 5),
        "rollouts": keys.rollouts_key(experiment, "0001", policy, ref("prompts"), suite),
        "rewards": keys.rewards_key(experiment, ref("rollouts"), suite),
        "dataset": keys.dataset_key(experiment, ref("rollouts"), ref("rewards")),
        "checkpoint": keys.checkpoint_key(experiment, "0001", ref("dataset"), start, ref("state")),
        "evaluation_run": keys.evaluation_run_key(experiment, policy, suite, Split.GATE, 2),
        "evaluation_run greedy": keys.evaluation_run_key(experiment, policy, suite, Split.HELD_OUT, 1, greedy=True),
        "evaluation": keys.evaluation_key(experiment, {"candidate_gate": ref("run")}),
        "sampler": keys.decision_key(experiment, "0001", ref("checkpoint"), start, ref("evaluation")),
        "report": report_key({"rollouts": ref("rollouts")}, shown),
    }


def test_the_keys_of_work_that_stores_hold_do_not_change() -> None:
    assert all_keys(load_experiment(TINY)) == GOLDEN


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
        ({"rollouts": {"max_turns": 4}}, {"rollouts", *RUNS}),
        ({"prompts": {"groups": 32}}, {"prompts"}),
        ({"prompts": {"workers": 2}}, {"rollouts"}),
        ({"engine": {"threads": 1}}, set()),
        ({"rollouts": {"tool_prompt": True}}, {"rollouts", *RUNS}),
        # both profiles share evaluations, though only throughput lets an episode end by the clock
        ({"rollouts": {"profile": "throughput"}}, {"rollouts"}),
        # no episode depends on how many are in flight, yet the whole of its section is in the rollouts' key
        ({"rollouts": {"concurrency": 7}}, {"rollouts"}),
        ({"sandboxes": {"limits": {"memory_mb": 256}}}, {"rollouts", *RUNS}),
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
def test_settings_change_only_the_keys_of_their_own_step(change: dict[str, Any], moved: set[str]) -> None:
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
