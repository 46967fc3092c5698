import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.digests import table_digest
from contracts.episodes import EPISODES, ROUTED_EXPERTS, SEQUENCES
from contracts.store import LocalStore
from curation.dataset import MEMBERS, REASONS, TRAIN, DatasetConfig, build_dataset, report, select_rows
from curation.errors import DuplicateRows, RewardsMismatch
from curation.rewards import REWARDS

OUTCOMES = ["completed", "truncated", "format_error", "failed", "infra_error", "aborted", "dropped"]
UNSCORED = ("infra_error", "aborted", "dropped")


@st.composite
def rollouts(draw: st.DrawFn) -> dict[str, list[dict[str, Any]]]:
    episodes, sequences, rewards = [], [], []
    for group in draw(st.permutations(range(draw(st.integers(0, 4))))):
        for sample in range(draw(st.integers(1, 4))):
            name = f"e{group}-{sample}"
            outcome = draw(st.sampled_from(OUTCOMES))
            reward = None if outcome in UNSCORED else draw(st.sampled_from([None, 0.0, 0.1, 1.1]))
            solved = None if reward is None else reward > 1
            episodes.append({"episode_id": name, "group_id": f"g{group}", "sample": sample, "outcome": outcome})
            verdict = draw(st.sampled_from(["completed", "completed", "tampered"]))
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
            for index in range(draw(st.integers(0, 2))):
                roles = draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6))
                versions = draw(st.lists(st.sampled_from(["v2", "v1"]), max_size=3))
                sequences.append(
                    {
                        "episode_id": name,
                        "index": index,
                        "token_ids": [100 * group + 10 * sample + index] * len(roles),
                        "token_role": roles,
                        "logprobs": [-0.5 if role == 1 else None for role in roles],
                        "policy_spans": [{"version": version, "start": 0, "end": 1} for version in versions],
                    }
                )
    return {
        "episodes": episodes,
        "sequences": draw(st.permutations(sequences)),
        "rewards": draw(st.permutations(rewards)),
    }


configs = st.builds(
    DatasetConfig,
    drop_zero_variance=st.booleans(),
    variance_of=st.sampled_from(["solved", "reward"]),
    max_tokens=st.none() | st.integers(1, 6),
    drop_truncated=st.booleans(),
)


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


def record_of(episode: str, index: int) -> bytes:
    return f"{episode}/{index}".encode()


def reason_of(
    episode: dict[str, Any], rows: dict[str, list[dict[str, Any]]], config: DatasetConfig, marked: set[str]
) -> str | None:
    reward = {row["episode_id"]: None if row["episode_id"] in marked else row["reward"] for row in rows["rewards"]}
    group = [reward[other["episode_id"]] for other in rows["episodes"] if other["group_id"] == episode["group_id"]]
    graded = [value if config.variance_of == "reward" else value > 1 for value in group if value is not None]
    mine = [row for row in rows["sequences"] if row["episode_id"] == episode["episode_id"]]
    holds = {
        "quarantined": episode["episode_id"] in marked,
        **{outcome: episode["outcome"] == outcome for outcome in UNSCORED},
        "not_graded": reward[episode["episode_id"]] is None,
        "tampered": any(
            row["verdict"] == "tampered" for row in rows["rewards"] if row["episode_id"] == episode["episode_id"]
        ),
        "empty": not any(role == 1 for row in mine for role in row["token_role"]),
        "zero_variance": config.drop_zero_variance and len(set(graded)) == 1,
        "too_long": config.max_tokens is not None and any(len(row["token_ids"]) > config.max_tokens for row in mine),
        "truncated": config.drop_truncated and episode["outcome"] == "truncated",
    }
    return next((reason for reason in REASONS if holds[reason]), None)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rollouts(), config=configs, routed=st.booleans(), data=st.data())
def test_kept_rows_reasons_and_group_statistics_equal_a_naive_reference(
    rows: dict[str, list[dict[str, Any]]], config: DatasetConfig, routed: bool, tmp_path: Path, data: st.DataObject
) -> None:
    names = [row["episode_id"] for row in rows["episodes"]]
    marked = data.draw(st.sets(st.sampled_from(names), max_size=3)) if names else set()
    train, members = select_rows(*tables(rows, tmp_path, routed=routed), config, marked)
    assert train.schema == (TRAIN.append(ROUTED_EXPERTS) if routed else TRAIN) and members.schema == MEMBERS
    for row in train.to_pylist() if routed else []:
        assert row[ROUTED_EXPERTS.name] == record_of(row["episode_id"], row["sequence"])
    reward = {row["episode_id"]: None if row["episode_id"] in marked else row["reward"] for row in rows["rewards"]}
    expected = {row["episode_id"]: reason_of(row, rows, config, marked) for row in rows["episodes"]}
    assert [(row["episode_id"], row["reason"]) for row in members.to_pylist()] == list(expected.items())
    kept_groups: list[str] = []
    for row in rows["episodes"]:
        if expected[row["episode_id"]] is None and row["group_id"] not in kept_groups:
            kept_groups.append(row["group_id"])
    for row in members.to_pylist():
        assert row["kept"] == (row["reason"] is None)
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


def test_the_same_files_give_the_same_rows_whatever_their_layout(tmp_path: Path) -> None:
    rows = two_groups()
    paths = tables(rows, tmp_path)
    first = select_rows(*paths, DatasetConfig())
    pq.write_table(pq.read_table(paths[1]), paths[1], row_group_size=1, compression="none")
    second = select_rows(*paths, DatasetConfig())
    assert [table_digest(table) for table in first] == [table_digest(table) for table in second]


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
