import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.digests import digest_of, table_digest
from contracts.episodes import EPISODES, ROUTED_EXPERTS, SEQUENCES
from contracts.store import LocalStore
from curation.dataset import (
    COUNTED,
    MEMBERS,
    RATINGS,
    REASONS,
    TRAIN,
    DatasetConfig,
    build_dataset,
    report,
    select_rows,
)
from curation.dataset.config import Agreement, Cap, Distinct, Requirement
from curation.errors import DuplicateRows, RewardsMismatch
from curation.rewards import REWARDS
from trainer.algorithms.base import Advantage
from trainer.experience import member_advantages, member_rewards

OUTCOMES = ["completed", "truncated", "format_error", "failed", "infra_error", "aborted", "dropped"]
UNSCORED = ("infra_error", "aborted", "dropped")
Rows = dict[str, list[dict[str, Any]]]


@st.composite
def rollouts(draw: st.DrawFn, *, plain: bool = False) -> Rows:
    """plain: every episode is graded and has sampled tokens."""
    episodes, sequences, rewards, ratings = [], [], [], []
    for group in draw(st.permutations(range(draw(st.integers(2 * plain, 4))))):
        for sample in range(draw(st.integers(1 + plain, 4))):
            name = f"e{group}-{sample}"
            outcome = "completed" if plain else draw(st.sampled_from(OUTCOMES))
            known = [0.0, 0.7, 1.1] if plain else [None, 0.0, 0.7, 1.1]
            reward = None if outcome in UNSCORED else draw(st.sampled_from(known))
            solved = None if reward is None else reward > 1
            episodes.append(
                {
                    "episode_id": name,
                    "group_id": f"g{group}",
                    "task_id": f"t{group}",
                    "image_digest": f"i{group // 2}",
                    "sample": sample,
                    "outcome": outcome,
                }
            )
            verdict = "completed" if plain else draw(st.sampled_from(["completed", "completed", "tampered"]))
            rewards.append(
                {
                    "episode_id": name,
                    "group_id": f"g{group}",
                    "task_id": f"t{group}",
                    "reward": reward,
                    "verdict": verdict,
                    "solved": solved,
                }
            )
            for component in ("one", "two") if reward is not None and draw(st.integers(0, 4)) else ():
                value = draw(st.sampled_from([0.0, 0.3, 0.5, 0.8]))
                spread = draw(st.sampled_from([0.0, 0.3, 0.6])) if component == "one" else None
                ratings.append({"episode_id": name, "component": component, "value": value, "spread": spread})
            for index in range(draw(st.integers(int(plain), 2))):
                roles = draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6)) + [1] * plain
                token = st.integers(0, draw(st.integers(0, 2)))
                versions = draw(st.lists(st.sampled_from(["v2", "v1"]), max_size=3))
                sequences.append(
                    {
                        "episode_id": name,
                        "index": index,
                        "token_ids": draw(st.lists(token, min_size=len(roles), max_size=len(roles))),
                        "token_role": roles,
                        "logprobs": [-0.5 if role == 1 else None for role in roles],
                        "policy_spans": [{"version": version, "start": 0, "end": 1} for version in versions],
                    }
                )
    return {
        "episodes": episodes,
        "sequences": draw(st.permutations(sequences)),
        "rewards": draw(st.permutations(rewards)),
        "ratings": draw(st.permutations(ratings)),
    }


SHAPING: dict[str, st.SearchStrategy[Any]] = {
    "distinct": st.none() | st.builds(Distinct, similarity=st.sampled_from([0.4, 1.0]), ngram=st.integers(1, 3)),
    "caps": st.lists(
        st.builds(
            Cap,
            by=st.sampled_from(["task", "template", "family", "pass_rate"]),
            max_groups=st.integers(1, 2),
            seed=st.integers(0, 3),
        ),
        max_size=2,
    ).map(tuple),
}
configs = st.builds(
    DatasetConfig,
    drop_zero_variance=st.booleans(),
    variance_of=st.sampled_from(["solved", "reward"]),
    max_tokens=st.none() | st.integers(1, 6),
    drop_truncated=st.booleans(),
    min_deviation=st.sampled_from([0.0, 0.0, 0.05, 0.6]),
    min_reward=st.sampled_from([None, None, 0.7, 1.1]),
    require=st.lists(
        st.sampled_from(
            [
                Requirement(component="one", at_least=0.3),
                Requirement(component="two", at_most=0.5),
                Requirement(component="two", at_least=0.5, at_most=0.8),
            ]
        ),
        max_size=2,
    ).map(tuple),
    agree=st.lists(
        st.sampled_from(
            [
                Agreement(components=("one",), within=0.3),
                Agreement(components=("one", "two"), within=0.3),
                Agreement(components=("two", "one"), within=0.0),
            ]
        ),
        max_size=2,
    ).map(tuple),
    min_policy_tokens=st.integers(1, 2),
    **SHAPING,
)
shaping = st.builds(DatasetConfig, drop_zero_variance=st.just(False), **SHAPING)
FAMILIES = {f"t{group}": f"f{group % 2}" for group in range(4)}


def tables(rows: dict[str, list[dict[str, Any]]], folder: Path, *, routed: bool = False) -> tuple[Path, Path, Path]:
    """Files of the tables. routed: with a record of routing that names its sequence."""
    paths, sequences = [], SEQUENCES.append(ROUTED_EXPERTS) if routed else SEQUENCES
    for name, schema in (("episodes", EPISODES), ("sequences", sequences), ("rewards", REWARDS)):
        path, found = folder / f"{name}.parquet", rows[name]
        if schema is sequences:
            found = [{**row, ROUTED_EXPERTS.name: record_of(row["episode_id"], row["index"])} for row in found]
        pq.write_table(pa.Table.from_pylist(found, schema=schema), path)
        paths.append(path)
    return paths[0], paths[1], paths[2]


def select(
    rows: Rows, config: DatasetConfig, marked: set[str], folder: Path, *, routed: bool = False
) -> tuple[pa.Table, pa.Table]:
    rated = [row for row in rows["ratings"] if row["component"] in config.components]
    ratings = pa.Table.from_pylist(rated, schema=RATINGS)
    return select_rows(*tables(rows, folder, routed=routed), config, marked, ratings, FAMILIES)


def record_of(episode: str, index: int) -> bytes:
    return f"{episode}/{index}".encode()


def believed(rows: Rows, config: DatasetConfig, marked: set[str]) -> dict[str, float | None]:
    """Reward of each episode that counts in a mean, else None."""
    rated = {(row["episode_id"], row["component"]): row for row in rows["ratings"]}
    found = {}
    for row in rows["rewards"]:
        name, disputed = row["episode_id"], False
        for rule in config.agree:
            mine = [rated[name, each] for each in rule.components if (name, each) in rated]
            values = [each["value"] for each in mine]
            apart = max(values) - min(values) if len(values) > 1 else mine[0]["spread"] if mine else 0.0
            disputed |= apart > rule.within + 1e-9
        found[name] = None if name in marked or disputed else row["reward"]
    return found


def reasons_of(rows: Rows, config: DatasetConfig, marked: set[str]) -> dict[str, str | None]:
    """Reason of each episode, in order: rules on episodes, then duplicates, then caps."""
    reward = believed(rows, config, marked)
    found = {row["episode_id"]: first_reason(row, rows, config, marked, reward) for row in rows["episodes"]}
    group_of = {row["episode_id"]: row["group_id"] for row in rows["episodes"]}
    if config.distinct is not None:
        size, trains = config.distinct.ngram, list[str]()
        for row in sorted(rows["episodes"], key=lambda row: int(row["sample"])):
            name = row["episode_id"]
            if found[name] is None:
                same = [
                    other
                    for other in trains
                    if group_of[other] == group_of[name] and solved(reward[other]) == solved(reward[name])
                ]
                sets = [ngrams(other, rows, size) for other in (name, *same)]
                if any(len(sets[0] & each) / len(sets[0] | each) >= config.distinct.similarity for each in sets[1:]):
                    found[name] = "duplicate"
                else:
                    trains.append(name)
    for cap in config.caps:
        kinds: dict[Any, set[str]] = {}
        for row in rows["episodes"]:
            group = row["group_id"]
            if found[row["episode_id"]] is None:
                graded = [reward[name] for name in group_of if group_of[name] == group and reward[name] is not None]
                rate = statistics.fmean(solved(value) for value in graded)
                kind = {
                    "task": row["task_id"],
                    "template": row["image_digest"],
                    "family": FAMILIES[row["task_id"]],
                    "pass_rate": min(3, math.floor(4 * rate)),
                }[cap.by]
                kinds.setdefault(kind, set()).add(group)
        for groups in kinds.values():
            for group in sorted(groups, key=lambda group: digest_of([cap.seed, group]))[cap.max_groups :]:
                found |= {name: "over_cap" for name in found if found[name] is None and group_of[name] == group}
    return found


def solved(reward: float | None) -> bool:
    return reward is not None and reward > 1


def ngrams(name: str, rows: Rows, size: int) -> set[tuple[int, ...]]:
    found = set()
    for row in rows["sequences"]:
        if row["episode_id"] == name:
            pairs = zip(row["token_ids"], row["token_role"], strict=True)
            sampled = tuple(token for token, role in pairs if role == 1)
            for start in range(max(1, len(sampled) - size + 1)) if sampled else ():
                found.add(sampled[start : start + size])
    return found


def first_reason(
    episode: dict[str, Any], rows: Rows, config: DatasetConfig, marked: set[str], reward: dict[str, float | None]
) -> str | None:
    name = episode["episode_id"]
    (row,) = [row for row in rows["rewards"] if row["episode_id"] == name]
    group = [reward[other["episode_id"]] for other in rows["episodes"] if other["group_id"] == episode["group_id"]]
    graded = [value for value in group if value is not None]
    compared = [value if config.variance_of == "reward" else value > 1 for value in graded]
    mine = [row for row in rows["sequences"] if row["episode_id"] == name]
    roles = Counter(role for row in mine for role in row["token_role"])
    values = {row["component"]: row["value"] for row in rows["ratings"] if row["episode_id"] == name}
    holds = {
        "quarantined": name in marked,
        **{outcome: episode["outcome"] == outcome for outcome in UNSCORED},
        "not_graded": row["reward"] is None,
        "disagreement": reward[name] is None,
        "tampered": row["verdict"] == "tampered",
        "empty": not roles[1],
        "zero_variance": config.drop_zero_variance and len(set(compared)) == 1,
        "low_deviation": (statistics.stdev(graded) if len(graded) > 1 else 0.0) < config.min_deviation,
        "low_reward": config.min_reward is not None and (reward[name] or 0.0) < config.min_reward,
        "unmet": any(
            each.component not in values
            or values[each.component] < (-math.inf if each.at_least is None else each.at_least)
            or values[each.component] > (math.inf if each.at_most is None else each.at_most)
            for each in config.require
        ),
        "too_short": roles[1] < config.min_policy_tokens,
        "too_long": config.max_tokens is not None and any(len(row["token_ids"]) > config.max_tokens for row in mine),
        "truncated": config.drop_truncated and episode["outcome"] == "truncated",
        "duplicate": False,
        "over_cap": False,
    }
    return next((reason for reason in REASONS if holds[reason]), None)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rollouts(), config=configs, routed=st.booleans(), data=st.data())
def test_kept_rows_reasons_and_group_statistics_equal_a_naive_reference(
    rows: Rows, config: DatasetConfig, routed: bool, tmp_path: Path, data: st.DataObject
) -> None:
    names = [row["episode_id"] for row in rows["episodes"]]
    marked = data.draw(st.sets(st.sampled_from(names), max_size=3)) if names else set()
    train, members = select(rows, config, marked, tmp_path, routed=routed)
    assert train.schema == (TRAIN.append(ROUTED_EXPERTS) if routed else TRAIN) and members.schema == MEMBERS
    for row in train.to_pylist() if routed else []:
        assert row[ROUTED_EXPERTS.name] == record_of(row["episode_id"], row["sequence"])
    reward, expected = believed(rows, config, marked), reasons_of(rows, config, marked)
    assert [(row["episode_id"], row["reason"]) for row in members.to_pylist()] == list(expected.items())
    kept_groups: list[str] = []
    for row in rows["episodes"]:
        if expected[row["episode_id"]] is None and row["group_id"] not in kept_groups:
            kept_groups.append(row["group_id"])
    for row in members.to_pylist():
        assert row["kept"] == (row["reason"] is None)
        assert row["reward"] is not None or row["reason"] not in (None, *COUNTED)
        graded = [
            pa.scalar(reward[other["episode_id"]], pa.float32()).as_py()
            for other in rows["episodes"]
            if other["group_id"] == row["group_id"] and reward[other["episode_id"]] is not None
        ]
        if graded:
            assert row["group_reward_mean"] == pytest.approx(statistics.fmean(graded), abs=1e-12)
        else:
            assert row["group_reward_mean"] is None
    wanted = [
        (row["episode_id"], kept_groups.index(row["group_id"]), sequence["token_ids"])
        for row in sorted(
            rows["episodes"], key=lambda row: row["group_id"] in kept_groups and kept_groups.index(row["group_id"])
        )
        if expected[row["episode_id"]] is None
        for sequence in sorted(rows["sequences"], key=lambda row: int(row["index"]))
        if sequence["episode_id"] == row["episode_id"]
    ]
    assert [(row["episode_id"], row["group_index"], row["token_ids"]) for row in train.to_pylist()] == wanted
    counted = report(train, members)
    assert sum(counted.reasons.values()) + counted.kept_episodes == counted.episodes == len(rows["episodes"])
    assert counted.kept_groups == len(kept_groups) and counted.empty == (not wanted)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rollouts(plain=True), config=shaping)
def test_duplicates_and_groups_beyond_a_cap_are_those_of_a_naive_reference(
    rows: Rows, config: DatasetConfig, tmp_path: Path
) -> None:
    _, members = select(rows, config, set(), tmp_path)
    found = dict(zip(members["episode_id"].to_pylist(), members["reason"].to_pylist(), strict=True))
    assert found == reasons_of(rows, config, set())


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rollouts(), config=configs, data=st.data())
@pytest.mark.parametrize("kind", ["group_mean", "group_mean_std", "leave_one_out"])
def test_advantages_are_those_over_all_believed_rewards_of_the_group(
    kind: Advantage, rows: Rows, config: DatasetConfig, tmp_path: Path, data: st.DataObject
) -> None:
    """A float64 reference over what rollouts sampled, without the dataset's own means."""
    names = [row["episode_id"] for row in rows["episodes"]]
    marked = data.draw(st.sets(st.sampled_from(names), max_size=2)) if names else set()
    _, members = select(rows, config, marked, tmp_path)
    reward = believed(rows, config, marked)
    graded = members.filter(pc.is_valid(members["reward"])).sort_by(
        [("group_id", "ascending"), ("episode_id", "ascending")]
    )
    advantages = member_advantages(graded, member_rewards(graded, None), kind)
    assert set(graded["episode_id"].to_pylist()) >= {row["episode_id"] for row in members.to_pylist() if row["kept"]}
    for row, advantage in zip(graded.to_pylist(), advantages, strict=True):
        group = [reward[each["episode_id"]] for each in rows["episodes"] if each["group_id"] == row["group_id"]]
        values = [float(np.float32(value)) for value in group if value is not None]
        mine, mean = float(np.float32(reward[row["episode_id"]])), math.fsum(values) / len(values)
        if kind == "group_mean":
            expected = mine - mean
        elif kind == "group_mean_std":
            expected = (mine - mean) / ((statistics.stdev(values) if len(values) > 1 else 0.0) + 1e-6)
        else:
            expected = mine - (math.fsum(values) - mine) / (len(values) - 1) if len(values) > 1 else math.nan
        assert advantage == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_the_same_files_give_the_same_rows_whatever_their_layout(tmp_path: Path) -> None:
    rows = two_groups()
    paths = tables(rows, tmp_path)
    first = select_rows(*paths, DatasetConfig())
    pq.write_table(pq.read_table(paths[1]), paths[1], row_group_size=1, compression="none")
    second = select_rows(*paths, DatasetConfig())
    assert [table_digest(table) for table in first] == [table_digest(table) for table in second]


def test_files_beside_a_folder_whose_name_is_a_pattern_are_not_read(tmp_path: Path) -> None:
    for name in ("runs1", "runs[1]"):
        (tmp_path / name).mkdir()
        rows = two_groups()
        rows["rewards"] = [{**row, "reward": row["reward"] + len(name)} for row in rows["rewards"]]
        paths = tables(rows, tmp_path / name)
    _, members = select_rows(*paths, DatasetConfig())
    assert members["reward"].to_pylist() == [row["reward"] for row in rows["rewards"]]


def test_tokens_roles_logprobs_and_versions_come_through_unchanged(tmp_path: Path) -> None:
    train, members = select_rows(*tables(two_groups(), tmp_path), DatasetConfig())
    assert train.to_pylist()[0] == {
        "episode_id": "a0",
        "group_id": "a",
        "group_index": 0,
        "sample": 0,
        "sequence": 0,
        "token_ids": [5, 6, 7],
        "token_role": [0, 1, 2],
        "logprobs": [None, -0.25, None],
        "policy_versions": ["v1", "v2"],
        "reward": 1.0,
    }
    assert members["length"].to_pylist() == [3, 3, 3, 3]


def test_a_member_left_out_for_its_length_still_counts_in_its_groups_mean(tmp_path: Path) -> None:
    rows = two_groups()
    rows["sequences"][1] |= {"token_ids": [5] * 9, "token_role": [1] * 9, "logprobs": [0.0] * 9}
    train, members = select_rows(*tables(rows, tmp_path), DatasetConfig(max_tokens=8))
    assert train["episode_id"].to_pylist() == ["a0"]
    assert members["group_reward_mean"].to_pylist()[:2] == [0.5, 0.5]
    assert members["reason"].to_pylist() == [None, "too_long", "zero_variance", "zero_variance"]
    at_the_limit, _ = select_rows(*tables(rows, tmp_path), DatasetConfig(max_tokens=9))
    assert at_the_limit["episode_id"].to_pylist() == ["a0", "a1"]


@pytest.mark.parametrize(
    ("rules", "reasons"),
    [
        ({}, [None] * 4),
        # rewards are float32: 0.7 is not below 0.7
        ({"min_reward": 0.7}, [None, None, "low_reward", "low_reward"]),
        # standard deviation 0.4397 with divisor n - 1, 0.3808 with n
        ({"min_deviation": 0.43}, [None] * 4),
        ({"min_deviation": 0.45}, ["low_deviation"] * 4),
        # the last episode broke its sandbox, so that it has no value
        ({"require": [{"component": "one", "at_most": 0.8}]}, [None, None, None, "unmet"]),
        ({"require": [{"component": "one", "at_least": 0.5, "at_most": 0.7}]}, ["unmet", None, "unmet", "unmet"]),
        # 0.1 + 0.2 is the first float64 above 0.3, and (2.8 - 1) / 9 the last below 0.2
        ({"require": [{"component": "three", "at_least": 0.2, "at_most": 0.3}]}, [None, None, "unmet", "unmet"]),
        ({"agree": [{"components": ["one", "two"], "within": 0.3}]}, [None, None, "disagreement", None]),
        ({"agree": [{"components": ["one"], "within": 0.1}]}, [None, "disagreement", None, None]),
        ({"min_policy_tokens": 3}, [None, None, None, "too_short"]),
        # the first episode has the same tokens, and another test result
        ({"distinct": {"similarity": 1}}, [None, None, "duplicate", None]),
        ({"distinct": {"similarity": 1}, "min_reward": 0.5}, [None, None, "low_reward", "low_reward"]),
    ],
)
def test_a_rule_leaves_out_what_it_says(rules: dict[str, Any], reasons: list[str | None], tmp_path: Path) -> None:
    rewards, tokens = (1.0, 0.7, 0.3, 0.0), ([5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6])
    values = {("one", 0): (0.8, 0.0), ("two", 0): (0.5, None), ("one", 1): (0.5, 0.2), ("two", 1): (0.6, None)}
    values |= {("one", 2): (0.2, 0.1), ("two", 2): (0.6, None)}
    values |= {("three", 0): (0.1 + 0.2, None), ("three", 1): ((2.8 - 1) / 9, None), ("three", 2): (0.301, None)}
    names = [{"episode_id": f"e{number}", "group_id": "g"} for number in range(4)]
    rows: Rows = {
        "episodes": [
            row | {"task_id": "t0", "sample": number, "outcome": "completed"} for number, row in enumerate(names)
        ],
        "rewards": [
            row | {"reward": reward, "solved": reward == 1.0} for row, reward in zip(names, rewards, strict=True)
        ],
        "sequences": [
            row | {"index": 0, "token_ids": each, "token_role": [1] * len(each)}
            for row, each in zip(names, tokens, strict=True)
        ],
        "ratings": [
            {"episode_id": f"e{number}", "component": component, "value": value, "spread": spread}
            for (component, number), (value, spread) in values.items()
        ],
    }
    _, members = select(rows, DatasetConfig.model_validate(rules), set(), tmp_path)
    assert members["reason"].to_pylist() == reasons


def test_with_agree_a_member_without_a_reward_gives_its_group_no_variance(tmp_path: Path) -> None:
    rows = two_groups() | {"ratings": []}
    rows["rewards"][1]["reward"] = None  # a judge gave no answer; the hidden tests failed
    for agree, reason in ([], None), ([{"components": ["one"], "within": 0.1}], "zero_variance"):
        _, members = select(rows, DatasetConfig.model_validate({"agree": agree}), set(), tmp_path)
        assert members["reason"].to_pylist()[:2] == [reason, "not_graded"]


def test_groups_without_variance_give_an_empty_dataset_with_reasons(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    rows = two_groups()
    for row in rows["rewards"]:
        row |= {"reward": 0.0, "solved": False}
    parts = {name: pa.Table.from_pylist(rows[name], schema=schema) for name, schema in SCHEMAS.items()}
    rollout = commit(
        store, "rollouts", {"episodes.parquet": parts["episodes"], "sequences.parquet": parts["sequences"]}
    )
    rewards = commit(store, "rewards", {"rewards.parquet": parts["rewards"]})
    with ArtifactWriter(store, "dataset", "0" * 64, parents={}, config={}, code_version="1") as out:
        counted = build_dataset(rollout, rewards, DatasetConfig(), out)
        made = out.commit()
    assert counted.empty and counted.reasons["zero_variance"] == 4 and counted.reward_mean == 0.0
    assert made.table("train.parquet").num_rows == 0 and made.table("train.parquet").schema == TRAIN
    assert made.table("members.parquet").num_rows == 4


def test_rewards_of_other_rollouts_are_refused(tmp_path: Path) -> None:
    rows = two_groups()
    rows["rewards"].pop()
    with pytest.raises(RewardsMismatch, match="1 episodes"):
        select_rows(*tables(rows, tmp_path), DatasetConfig())


@pytest.mark.parametrize(
    ("table", "change", "words"),
    [
        ("episodes", {"episode_id": "a0"}, r"episodes repeats \(episode_id\): episode_id a0: 2 rows: sample"),
        ("episodes", {"sample": 0}, r"episodes repeats \(group_id, sample\): group_id a, sample 0: 2 rows"),
        ("rewards", {"episode_id": "a0"}, r"rewards repeats \(episode_id\): episode_id a0: 2 rows"),
        ("sequences", {"episode_id": "a0"}, r"sequences repeats \(episode_id, index\): episode_id a0, index 0: 2 rows"),
    ],
)
def test_repeated_rows_are_named_and_never_joined(
    table: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    rows = two_groups()
    rows[table][1] |= change
    with pytest.raises(DuplicateRows, match=words):
        select_rows(*tables(rows, tmp_path), DatasetConfig())


def test_an_episode_in_another_group_than_its_reward_is_refused(tmp_path: Path) -> None:
    rows = two_groups()
    rows["rewards"][1]["group_id"] = "b"
    with pytest.raises(RewardsMismatch, match="2 episodes"):
        select_rows(*tables(rows, tmp_path), DatasetConfig())


SCHEMAS = {"episodes": EPISODES, "sequences": SEQUENCES, "rewards": REWARDS}


def two_groups() -> dict[str, list[dict[str, Any]]]:
    """Group a: rewards 1 and 0. Group b: no variance."""
    names = [("a0", "a", 1.0), ("a1", "a", 0.0), ("b0", "b", 1.0), ("b1", "b", 1.0)]
    spans = [{"version": "v2", "start": 1, "end": 2}, {"version": "v1", "start": 1, "end": 2}]
    return {
        "episodes": [
            {"episode_id": name, "group_id": group, "sample": int(name[1]), "outcome": "completed"}
            for name, group, _ in names
        ],
        "rewards": [
            {"episode_id": name, "group_id": group, "reward": reward, "solved": reward == 1.0}
            for name, group, reward in names
        ],
        "sequences": [
            {
                "episode_id": name,
                "index": 0,
                "token_ids": [5, 6, 7],
                "token_role": [0, 1, 2],
                "logprobs": [None, -0.25, None],
                "policy_spans": spans * 2,
            }
            for name, _, _ in names
        ],
    }


def commit(store: LocalStore, kind: str, files: dict[str, pa.Table]) -> Artifact:
    with ArtifactWriter(store, kind, "0" * 64, parents={}, config={}, code_version="1") as out:
        for name, table in files.items():
            out.add_table(name, table)
        return out.commit()
