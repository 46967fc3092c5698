"""Rules that leave episodes out: near-duplicates, ratings of components, what enters the key, and wrong settings."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, artifact_exists
from contracts.episodes import EPISODES, SEQUENCES
from contracts.store import LocalStore
from contracts.tasks import TASKS
from contracts.yaml_text import load_yaml
from curation.dataset import REASONS, DatasetConfig, ratings_of, select_rows
from curation.dataset.config import Distinct
from curation.dataset.similarity import SKETCH, near_duplicates, similarity, sketch
from curation.errors import RewardsMismatch
from curation.rewards import EVIDENCE, REWARDS
from ops.dataset_inputs import DatasetInputs
from resources.errors import ExperimentError
from resources.experiment import Experiment, parse_experiment

JUDGE = {"kind": "judge", "weight": 0, "model": "m", "endpoint": {"url": "http://judge:8000/v1"}}
FIRST = JUDGE | {"name": "first", "samples": 3, "lowest": 1, "highest": 5}
SECOND = JUDGE | {"name": "second"}
LIKED = '{"reason": "because", "score": 5}'


def with_rules(**rules: Any) -> Experiment:
    return parse_experiment({"name": "one", "rewards": {"components": [FIRST, SECOND]}, "dataset": rules})


def test_short_episodes_are_compared_exactly() -> None:
    first, second = np.array([5, 6, 7, 8, 9], np.int32), np.array([5, 6, 7, 9], np.int32)
    assert similarity(sketch(first, 2), sketch(second, 2)) == 2 / 5
    assert similarity(sketch(first, 8), sketch(first, 8)) == 1.0
    assert similarity(sketch(first[:1], 2), sketch(np.array([6], np.int32), 2)) == 0.0
    both = sketch(second, 2, sketch(first, 2))
    assert len(both) == 5 and similarity(both, sketch(first, 2)) == 4 / 5


@pytest.mark.parametrize("common", [0, 1_000, 10_000, 19_000, 20_000])
def test_long_episodes_take_bounded_memory_and_are_compared_within_the_stated_error(common: int) -> None:
    tokens = np.random.default_rng(7).permutation(40_000).astype(np.int32)
    first, second = tokens[:20_000], tokens[20_000 - common : 40_000 - common]
    sketches = [sketch(each, 1) for each in (first, second)]
    assert [len(each) for each in sketches] == [SKETCH] * 2
    index = common / (40_000 - common)
    assert similarity(*sketches) == pytest.approx(index, abs=3 * (index * (1 - index) / SKETCH) ** 0.5)


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=6),
    ngram=st.integers(1, 4),
    threshold=st.sampled_from([0.3, 0.5, 1.0]),
)
def test_what_is_left_out_is_similar_to_what_trains_and_the_rest_is_not(
    tokens: list[list[int]], ngram: int, threshold: float
) -> None:
    sketches = [sketch(np.array(each, np.int32), ngram) for each in tokens]
    left_out = near_duplicates(sketches, threshold)
    trains = [number for number in range(len(tokens)) if number not in left_out]
    assert 0 in trains
    for number, each in enumerate(sketches):
        earlier = [similarity(each, sketches[other]) for other in trains if other < number]
        assert (number in left_out) == any(value >= threshold for value in earlier)


def test_near_duplicates_of_many_long_episodes_are_found_in_time(tmp_path: Path) -> None:
    """64 groups of 16 with 2,048 sampled tokens: the second 8 repeat the first 8, with one token changed."""
    draw = np.random.default_rng(3)
    episodes, sequences, rewards = [], [], []
    for group in range(64):
        contexts = [draw.integers(0, 50_000, 2_048).tolist() for _ in range(8)]
        for sample in range(16):
            name, tokens = f"{group:02}-{sample:02}", list(contexts[sample % 8])
            tokens[1_000] = tokens[1_000] if sample < 8 else 50_001
            row = {"episode_id": name, "group_id": f"g{group}"}
            episodes.append(row | {"sample": sample, "outcome": "completed"})
            rewards.append(row | {"reward": float(sample % 2), "solved": bool(sample % 2)})
            sequences.append({"episode_id": name, "index": 0, "token_ids": tokens, "token_role": [1] * 2_048})
    paths = []
    for name, rows, schema in (
        ("episodes", episodes, EPISODES),
        ("sequences", sequences, SEQUENCES),
        ("rewards", rewards, REWARDS),
    ):
        paths.append(tmp_path / f"{name}.parquet")
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), paths[-1])
    began = time.process_time()
    _, members = select_rows(paths[0], paths[1], paths[2], DatasetConfig(distinct=Distinct(similarity=0.9)))
    assert time.process_time() - began < 60
    found = {row["episode_id"]: row["reason"] for row in members.to_pylist()}
    assert found == {name: "duplicate" if name[3:] >= "08" else None for name in found}


def judged(store: LocalStore, scores: list[list[int]], suite: str = "0") -> Artifact:
    """Rewards of one judge's scores of each episode, and a constant second component."""
    rows, evidence = [], []
    for number, each in enumerate(scores):
        name = f"e{number}"
        rows.append({"episode_id": name, "group_id": "g", "task_id": "t", "reward": 1.0, "solved": True})
        answers = [json.dumps({"reason": "because", "score": score}) for score in each]
        value = (sum(each) / len(each) - 1) / 4
        evidence += [
            {"episode_id": name, "component": "first", "raw": value, "value": value, "answers": answers},
            {"episode_id": name, "component": "second", "raw": 0.5, "value": 0.5, "answers": [LIKED]},
        ]
    config = with_rules().rewards.slice()
    parents = {"task_suite": a_suite(store, suite).ref}
    key = f"{len(list((store_path(store)).glob('rewards/*'))):064}"
    with ArtifactWriter(store, "rewards", key, parents=parents, config=config, code_version="1") as out:
        out.add_table("rewards.parquet", pa.Table.from_pylist(rows, schema=REWARDS))
        out.add_table("evidence.parquet", pa.Table.from_pylist(evidence, schema=EVIDENCE), telemetry=True)
        return out.commit()


def a_suite(store: LocalStore, family: str) -> Artifact:
    with ArtifactWriter(store, "task_suite", family * 64, parents={}, config={}, code_version="1") as out:
        out.add_table("tasks.parquet", pa.Table.from_pylist([{"task_id": "t", "family": family}], schema=TASKS))
        return out.commit()


def store_path(store: LocalStore) -> Path:
    return Path(store.url) / "artifacts"


def test_ratings_give_each_value_and_the_spread_of_a_judges_samples(tmp_path: Path) -> None:
    rewards = judged(LocalStore(tmp_path), [[2, 4, 3], [5, 5, 5]])
    assert ratings_of(rewards, {"first"}).to_pylist() == [
        {"episode_id": "e0", "component": "first", "value": 0.5, "spread": 0.5},
        {"episode_id": "e1", "component": "first", "value": 1.0, "spread": 0.0},
    ]
    assert set(ratings_of(rewards, {"first", "second"})["spread"].to_pylist()) == {0.5, 0.0}


def test_rewards_made_without_a_component_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardsMismatch, match=r"without the component third, .*: materialize rewards .* again"):
        ratings_of(judged(LocalStore(tmp_path), [[3, 3, 3]]), {"first", "third"})


def test_ratings_and_families_are_in_the_key_of_datasets_that_read_them_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    one, other = judged(store, [[2, 4, 3]]), judged(store, [[3, 3, 3]])
    shifted, renamed = judged(store, [[2, 4, 4]]), judged(store, [[2, 4, 3]], suite="1")
    assert len({each.ref.digest for each in (one, other, shifted, renamed)}) == 1

    def digests(rewards: Artifact, **rules: Any) -> dict[str, str]:
        rollouts = ArtifactRef(kind="rollouts", key="0" * 64, digest="1" * 64)
        inputs = DatasetInputs(store, with_rules(**rules).dataset, {"rollouts": rollouts, "rewards": rewards.ref})
        refs = inputs.refs
        inputs.commit()
        assert all(artifact_exists(store, ref.kind, ref.key) for role, ref in refs.items() if role != "rollouts")
        return {role: ref.digest for role, ref in refs.items()}

    assert digests(one) == digests(other) == digests(renamed)
    bounded = {"require": [{"component": "first", "at_least": 0.5}]}
    assert digests(one, **bounded) == digests(renamed, **bounded) != digests(shifted, **bounded)
    agreeing = {"agree": [{"components": ["first"], "within": 0.25}]}
    assert digests(one, **agreeing) != digests(other, **agreeing)
    capped = {"caps": [{"by": "family", "max_groups": 1}]}
    assert digests(one, **capped) == digests(other, **capped) != digests(renamed, **capped)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"require": [{"component": "frist", "at_least": 1}]}, r"names frist, which rewards.components lacks: .*first"),
        ({"agree": [{"components": ["first", "x"], "within": 1}]}, "names x, which rewards.components lacks"),
        ({"require": [{"component": "first"}]}, "require of first has no bound: set at_least or at_most"),
        ({"require": [{"component": "first", "at_least": 2, "at_most": 1}]}, "at_least 2.0 exceeds at_most 1.0"),
        ({"require": [{"component": "first", "at_least": float("nan")}]}, "require.0.at_least = nan"),
        ({"agree": [{"components": ["second"], "within": 0.1}]}, "compares second with itself, .* raise its samples"),
        ({"agree": [{"components": ["first", "first"], "within": 1}]}, "name each component once"),
        ({"agree": [{"components": [], "within": 1}]}, "agree.0.components"),
        ({"distinct": {"similarity": 0}}, "distinct.similarity = 0"),
        ({"caps": [{"by": "familiy", "max_groups": 1}]}, "caps.0.by = 'familiy'"),
        ({"caps": [{"by": "task", "max_groups": 0}]}, "caps.0.max_groups = 0"),
        ({"caps": [{"by": "task", "max_groups": 1, "bins": 4}]}, "bins=4: only by pass_rate"),
        ({"min_policy_tokens": 0}, "min_policy_tokens = 0"),
        ({"min_rewrad": 1}, r"min_rewrad is not a field: did you mean min_reward\?"),
    ],
)
def test_a_wrong_rule_is_one_line_with_the_fix(rules: dict[str, Any], says: str) -> None:
    with pytest.raises(ExperimentError, match=says) as refused:
        with_rules(**rules)
    assert "\n" not in str(refused.value)


def test_the_example_of_the_page_is_an_experiment_with_every_new_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dataset.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    rules = parse_experiment({"name": "one", **load_yaml(example)}).dataset
    assert set(rules.model_dump()) == DatasetConfig.model_fields.keys()
    assert all(f"`{each}`" in page for each in ("disagreement", *REASONS[REASONS.index("zero_variance") :]))


def test_judges_that_may_leave_one_graded_episode_need_a_baseline() -> None:
    values = with_rules(agree=[{"components": ["first", "second"], "within": 0.1}], drop_zero_variance=False)
    dumped = values.model_dump(mode="json")
    dumped["trainer"]["algorithm"] = {"kind": "rloo"}
    with pytest.raises(ExperimentError, match=r"leave_one_out: set dataset.drop_zero_variance to true"):
        parse_experiment(dumped)


def test_rules_survive_being_written_and_read_and_unset_ones_are_left_out() -> None:
    experiment = with_rules(
        min_reward=0.5, caps=[{"by": "pass_rate", "max_groups": 3}], distinct={"similarity": 0.9, "ngram": 4}
    )
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment
    assert set(DatasetConfig().model_dump()) == {"drop_zero_variance", "variance_of", "max_tokens", "drop_truncated"}
