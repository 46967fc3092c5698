"""Action keys: what is in them, what is not, and that this version still finds the work of earlier ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.artifacts import ArtifactRef
from contracts.store import Store, open_store
from contracts.tasks import Split
from curation.tasks.build import planned_key
from curation.tasks.demonstrations import demonstrations_key
from curation.tokenizer import tokenizer_key
from ops.graph import ITERATION_INPUTS, ONCE, PER_ITERATION, REPORT, TASK_SUITE, graph_of
from ops.readings import Reading, sampling_slice
from ops.spec import Refs
from ops.state import IterationInputs, IterationState, Start
from resources.base_config import SftBase
from resources.experiment import Experiment, load_experiment, parse_experiment

TINY = Path(__file__).parents[1] / "old_stores" / "c813e3a.yaml"
GOLDEN = {
    "task_suite": "86377004392d6513d64218075b8172738b3506ec90b4e57d6385f51c383a6b1e",
    "tokenizer": "640c5ee26e5449c44d33df2bfcdc28a03a7fc8125c92d9a29dcf99b531a6a7c2",
    "demonstrations": "f1fb122fe8fc5db0a25ec417a661bb7f9be6a5f38cc22f7e084271ff5387baaa",
    "base_policy": "1810f10249b6b0db79481be7f530318514a8e981f24a374c30df0dd51ad9027c",
    "iteration_inputs": "ec83717b3b9178b7a7916aa35d5e5cc749104ddeb74c344a9f406f2405f88df0",
    "prompts": "e1bd1459a11c692db0a964089ea7b8bf58dd27879800aa5b5f10e25d038e37de",
    "rollouts": "aade00a696a08c881ad146d58ea997c03e1b96eb0b919e62a09ec4b6407aa69a",
    "rewards": "4e01b577f37cc5496c6e2da09fed2f5d8c4de1330dd64dda8bbae4392a3c6f94",
    "dataset": "140e71e38c869d2249ae3c4016f1603a4078f70d1d14ee07c6fffe2b0984d534",
    "checkpoint": "cf4555b83961c33a8e9a71ef4c746adeb707057f60bb2195cad77b7917fe06a4",
    "evaluation_run": "46f0f7c3449fcd4d2955a849f4c7ce1538a6c4a9816b2751d593cccf1d061a97",
    "evaluation_run greedy": "1914d2a465d6d47bd158d268072e3d7ea56e3081a2240ca742977baaf218badb",
    "evaluation": "77526a8afd2c07c7f1486a75cda6a39270def7a5a38c6353bd7b2e1b00049463",
    "sampler": "964426c1132e78a4a3e69e439cb6a2aa2412c0f3045eb09b90c5b9cadd0321b5",
    "reward_flips": "062597f92c87827294473db42a337bf162802e1cf59390a0757748dbbd9585a2",
    "report": "12f4aa6082cc13ff09935f0d85486aec8a2e4ec9171ea5e4044ade81e850bd84",
}
"""Keys of TINY. One may change only together with its step's code version, or work is made twice."""
RUNS = {"evaluation_run", "evaluation_run greedy"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def ref(kind: str) -> ArtifactRef:
    return ArtifactRef(kind=kind, key="0" * 64, digest=(kind.encode().hex() + "0" * 64)[:64])


def all_keys(experiment: Experiment, store: Store) -> dict[str, str | None]:
    """Every step's key, given the same inputs."""
    assert isinstance(experiment.base, SftBase)
    policy, suite = ref("policy"), ref("task_suite")
    pinned = IterationInputs(
        experiment=experiment.name,
        iteration="0001",
        policy=policy,
        start=Start(checkpoint=ref("start"), trainer_state=ref("state")),
        task_suite=suite,
        base=ref("base"),
        cursor=5,
    )
    made = {name: ref(name) for name in (*ONCE, *PER_ITERATION)}
    state = IterationState(experiment, store, "0001", made, pinned)
    parts: dict[str, Refs] = {
        "base_policy": {"tokenizer": ref("tokenizer"), "demonstrations": ref("demonstrations")},
        "evaluation": {"candidate_gate": ref("run")},
    }
    works = {
        spec.name: spec.work_on(state, parts[spec.name]) if spec.name in parts else spec.work(state)
        for spec in graph_of(experiment)
    }
    works |= {
        "evaluation_run": Reading(Split.GATE, 2, greedy=False).work(store, experiment, policy, suite),
        "evaluation_run greedy": Reading(Split.HELD_OUT, 1, greedy=True).work(store, experiment, policy, suite),
        "report": REPORT.work_with(
            store,
            {"rollouts": ref("rollouts")},
            {"experiment": experiment.name, "iteration": "0001", "history": "0"},
        ),
    }
    seed = experiment.demonstrated.seed
    return {
        **{name: work.key if work else None for name, work in works.items()},
        "tokenizer": tokenizer_key(seed),
        "demonstrations": demonstrations_key(experiment.base.demonstrations, seed, ref("tokenizer")),
    }


def test_the_keys_of_work_that_stores_hold_do_not_change(store: Store) -> None:
    assert all_keys(load_experiment(TINY), store) == GOLDEN


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"trainer": {"learning_rate": 1e-3}}, {"checkpoint"}),
        # threads, device and ranks decide the bits of a training; when it is stopped does not
        ({"trainer": {"launcher": {"threads": 3}}}, {"base_policy", "checkpoint"}),
        ({"trainer": {"launcher": {"gpus": 1}}}, {"base_policy", "checkpoint"}),
        ({"trainer": {"launcher": {"nodes": 2}}}, {"base_policy", "checkpoint"}),
        ({"trainer": {"launcher": {"timeout_s": 60}}}, set()),
        ({"rewards": {"valid": 0.2}}, {"rewards"}),
        ({"dataset": {"drop_truncated": True}}, {"dataset"}),
        ({"dataset": {"min_reward": 0.5, "min_deviation": 0.1}}, {"dataset"}),
        ({"dataset": {"distinct": {"similarity": 0.9}, "caps": [{"by": "task", "max_groups": 2}]}}, {"dataset"}),
        ({"dataset": {"require": [], "agree": [], "min_policy_tokens": 1, "distinct": None}}, set()),
        ({"rollouts": {"group_size": 4}}, {"rollouts"}),
        ({"rollouts": {"max_turns": 4}}, {"rollouts", *RUNS}),
        ({"prompts": {"groups": 32}}, {"prompts"}),
        # the suite stays, and an iteration that began without estimates draws from all tasks
        ({"tasks": {"difficulty": {"low": 0.1}}}, set()),
        ({"prompts": {"workers": 2}}, {"rollouts"}),
        ({"engine": {"threads": 1}}, set()),
        ({"rollouts": {"tool_prompt": True}}, {"rollouts", *RUNS}),
        ({"rollouts": {"oversample": 2, "keep": "spread"}}, {"rollouts"}),
        ({"rollouts": {"grammar": True}}, {"rollouts", *RUNS}),
        ({"rollouts": {"top_p": 0.9}}, {"rollouts", *RUNS}),
        # evaluations record no routing
        ({"rollouts": {"record_routing": True}}, {"rollouts"}),
        (
            {"rollouts": {"record_routing": True}, "trainer": {"routing_replay": True}},
            {"rollouts", "checkpoint"},
        ),
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
def test_settings_change_only_the_keys_of_their_own_step(change: dict[str, Any], moved: set[str], store: Store) -> None:
    before = all_keys(parse_experiment({"name": "one"}), store)
    after = all_keys(parse_experiment({"name": "one", **change}), store)
    assert {step for step in before if before[step] != after[step]} == moved


def test_an_equal_policy_plays_an_evaluation_once_across_experiments(store: Store) -> None:
    one, two = (all_keys(parse_experiment({"name": name}), store) for name in ("one", "two"))
    assert one["evaluation_run"] == two["evaluation_run"]
    assert one["rollouts"] != two["rollouts"]


def test_the_engine_of_evaluations_is_part_of_their_keys_alone(store: Store) -> None:
    server = {"kind": "openai", "base_url": "http://h/v1"}
    one, two = (
        all_keys(parse_experiment({"name": "one", "evaluation": {"engine": engine}}), store)
        for engine in (None, server)
    )
    assert {name for name in one if one[name] != two[name]} == {"evaluation_run", "evaluation_run greedy"}


def test_the_version_of_the_chat_is_part_of_what_imported_policies_sample_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bases = ({"kind": "sft"}, {"kind": "import", "path": "/models/one"})
    made, imported = (parse_experiment({"name": "one", "base": base}) for base in bases)
    before = sampling_slice(made, made.engine), sampling_slice(imported, imported.engine)
    monkeypatch.setattr("ops.readings.CHAT_VERSION", "another")
    assert sampling_slice(made, made.engine) == before[0]
    assert sampling_slice(imported, imported.engine) == before[1] | {"chat_version": "another"}


def test_iteration_inputs_are_named_by_their_place_alone(store: Store) -> None:
    def key(iteration: str, **values: Any) -> str | None:
        return ITERATION_INPUTS.work_on(IterationState(parse_experiment(values), store, iteration), {}).key

    one = key("0001", name="one")
    assert one == key("0001", name="one", seed=5)
    assert one != key("0002", name="one")
    assert one != key("0001", name="two")


def test_the_slice_of_a_generated_suite_is_what_builds_it(store: Store) -> None:
    experiment = load_experiment(TINY)
    assert TASK_SUITE.key(IterationState(experiment, store)) == planned_key(experiment.tasks, store)
