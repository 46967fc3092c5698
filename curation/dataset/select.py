"""Select the sequences that train, and record why each other one does not (DuckDB over Parquet).

    episodes + rewards + ratings -> reason per episode --+--> members.parquet (every episode)
    tokens of those without one  -> near-duplicates -----+
    groups of those without one  -> caps ----------------'
    sequences of those without one -----------------------> train.parquet

Joins use columns that are checked to be unique: an episode's id and (group, sample), a sequence's (episode, index). So
members has exactly one row per episode and train one row per kept sequence.

Holds rewards and groups, never advantages: the trainer computes those, from all graded members of a group, so a member
that is left out for its length still counts in its group's mean. An iteration may have nothing to learn from: then
train.parquet is empty, the report shows it, and the trainer takes no step.

A quarantined episode, or one whose judgements disagree, counts as not graded: nobody believes its reward, so it shapes
no mean and no deviation. All other rules read rewards that are believed, so what they leave out counts: the mean
estimates the policy's expected reward, whatever trains, and an episode that trains has the same advantage as without
the rule.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Collection, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.artifacts import Artifact, ArtifactWriter, Frozen
from contracts.digests import digest_of
from contracts.episodes import ROUTED_EXPERTS, SUPPORTS, TokenRole, lacks_variance
from curation.dataset.config import Cap, DatasetConfig, Distinct
from curation.dataset.ratings import RATINGS
from curation.dataset.similarity import near_duplicates, sketch
from curation.errors import DuplicateRows, RewardsMismatch

DATASET_VERSION = "3"
"""Code version of the `dataset` step."""

REASONS = (
    "quarantined",
    "infra_error",
    "aborted",
    "dropped",
    "not_graded",
    "disagreement",
    "tampered",
    "empty",
    "zero_variance",
    "low_deviation",
    "low_reward",
    "unmet",
    "too_short",
    "too_long",
    "truncated",
    "duplicate",
    "over_cap",
)
"""Reasons to leave an episode out; if several apply, the first in this order is recorded.

quarantined: an operator marked it. infra_error: the sandbox or engine failed. aborted, dropped: over-sampled and not
kept. not_graded: no reward (verifier fault). disagreement: its judgements lie too far apart (`agree`). tampered: it
tampered with its verdict. empty: no token sampled. zero_variance: `contracts.episodes.lacks_variance` of its group.
low_deviation: of its group's rewards, below min_deviation. low_reward: below min_reward. unmet: a component is outside
its bounds (`require`). too_short: fewer sampled tokens than min_policy_tokens. too_long: a sequence exceeds max_tokens.
truncated: see DatasetConfig. duplicate: similar to an episode of its group that trains (`distinct`). over_cap: its
group is beyond one of the `caps`.
"""

COUNTED = ("tampered", "empty", "low_reward", "unmet", "too_short", "too_long", "truncated", "duplicate")
"""Reasons of episodes that do not train but whose reward counts in the mean of a group that may."""
COUNTED_IN_BATCH = ("zero_variance", "low_deviation", "over_cap")
"""Further ones, of whole groups, whose rewards count where advantages are normalized over the iteration."""

TRAIN = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("group_index", pa.int32()),
        ("sample", pa.int32()),
        ("sequence", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_role", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.string())),
        ("reward", pa.float32()),
    ]
)
"""One row per kept sequence, ordered by the unique (group, sample, sequence). group_index: dense over kept groups, in
rollouts order. policy_versions: distinct, sorted. The columns ROUTED_EXPERTS and SUPPORTS of `contracts.episodes`
follow where the rollouts recorded them.
"""

MEMBERS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("sample", pa.int32()),
        ("reward", pa.float32()),
        ("kept", pa.bool_()),
        ("reason", pa.string()),
        ("group_reward_mean", pa.float64()),
        ("length", pa.int32()),
    ]
)
"""One row per episode, in rollouts order; (group_id, sample) is unique. `group_reward_mean`: the baseline of the
advantages, over all graded members of the group, kept or not (null: none is graded). reward: null if the episode is not
graded or quarantined, or its judgements disagree. length: tokens of the longest sequence.
"""


class DatasetReport(Frozen):
    """Summary of a dataset, for display and metadata."""

    episodes: int
    groups: int
    kept_episodes: int
    kept_groups: int
    sequences: int
    tokens: int
    policy_tokens: int
    reward_mean: float | None
    """Over all graded episodes."""
    reasons: dict[str, int]
    """Episodes left out, by reason; every reason is present."""

    @property
    def empty(self) -> bool:
        """Whether no row trains, so that the trainer takes no step."""
        return self.sequences == 0


def build_dataset(
    rollouts: Artifact,
    rewards: Artifact,
    config: DatasetConfig,
    out: ArtifactWriter,
    quarantined: Collection[str] = (),
    ratings: pa.Table | None = None,
    families: Mapping[str, str] | None = None,
) -> DatasetReport:
    """Stage train.parquet and members.parquet in `out`; the caller commits them. quarantined, ratings, families: as for
    `select_rows`.

    Raises RewardsMismatch if rewards and rollouts don't belong together, DuplicateRows if an episode or a sequence
    occurs twice.
    """
    train, members = select_rows(
        rollouts.path("episodes.parquet"),
        rollouts.path("sequences.parquet"),
        rewards.path("rewards.parquet"),
        config,
        quarantined,
        ratings,
        families,
    )
    out.add_table("train.parquet", train)
    out.add_table("members.parquet", members)
    return report(train, members)


def select_rows(
    episodes: Path,
    sequences: Path,
    rewards: Path,
    config: DatasetConfig,
    quarantined: Collection[str] = (),
    ratings: pa.Table | None = None,
    families: Mapping[str, str] | None = None,
) -> tuple[pa.Table, pa.Table]:
    """(TRAIN rows, MEMBERS rows) from three Parquet files of EPISODES, SEQUENCES and REWARDS. quarantined: ids of
    episodes. ratings: RATINGS of `config.components`. families: by task, if `config.by_family`.

    Deterministic, row order included.

    Raises as `build_dataset` does.
    """
    with duckdb.connect() as db:
        db.execute("SET threads = 1")  # floating-point sums must not depend on the machine
        # escaped: DuckDB takes * ? [ for patterns
        for name, path in (("episodes", episodes), ("sequences", sequences), ("graded", rewards)):
            db.read_parquet(glob.escape(str(path)), file_row_number=True).create_view(name)
        db.register("quarantined", _column("episode_id", sorted(quarantined)))
        db.register("ratings", RATINGS.empty_table() if ratings is None else ratings)
        db.register("required", pa.Table.from_pylist([vars(each) for each in config.require], schema=_REQUIRED))
        agreed = [
            {"number": number, "component": component, "within": each.within}
            for number, each in enumerate(config.agree)
            for component in each.components
        ]
        db.register("agreed", pa.Table.from_pylist(agreed, schema=_AGREED))
        db.execute(_REWARDS)
        _check_unique(db)
        _check_belong(db)
        db.register("lacking", _groups_without_variance(db, config))
        db.execute(
            _MEMBERS,
            {
                "drop_truncated": config.drop_truncated,
                "max_tokens": config.max_tokens,
                "min_deviation": config.min_deviation,
                "min_policy_tokens": config.min_policy_tokens,
                "min_reward": config.min_reward,
            },
        )
        if config.distinct is not None:
            _leave_out(db, "duplicate", "episode_id", _duplicates(db, config.distinct))
        for cap in config.caps:
            _leave_out(db, "over_cap", "group_id", _beyond(db, cap, families or {}))
        db.execute(_KEPT)
        members = db.sql("SELECT * FROM members ORDER BY position").to_arrow_table()
        recorded = [each for each in (ROUTED_EXPERTS, SUPPORTS) if each.name in db.table("sequences").columns]
        if recorded:  # the routing of one batch of rows may exceed 2 GiB
            db.execute("SET arrow_large_buffer_size = true")
        columns = "".join(f", s.{each.name}" for each in recorded)
        train = db.sql(_TRAIN.format(recorded=columns)).to_arrow_table()
    schema = pa.schema([*TRAIN, *recorded])
    return train.select(schema.names).cast(schema), members.select(MEMBERS.names).cast(MEMBERS)


def report(train: pa.Table, members: pa.Table) -> DatasetReport:
    """Count the rows that were kept and left out."""
    rewards = [value for value in members["reward"].to_pylist() if value is not None]
    reasons = members["reason"].to_pylist()
    roles = pc.list_flatten(train["token_role"])
    return DatasetReport(
        episodes=members.num_rows,
        groups=len(pc.unique(members["group_id"])),
        kept_episodes=sum(members["kept"].to_pylist()),
        kept_groups=len(pc.unique(train["group_id"])),
        sequences=train.num_rows,
        tokens=len(roles),
        policy_tokens=pc.sum(pc.equal(roles, int(TokenRole.POLICY))).as_py() or 0,
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
        reasons={reason: reasons.count(reason) for reason in REASONS},
    )


_REQUIRED = pa.schema([("component", pa.string()), ("at_least", pa.float64()), ("at_most", pa.float64())])
_AGREED = pa.schema([("number", pa.int32()), ("component", pa.string()), ("within", pa.float64())])
_ROUNDING = 1e-9
"""Room for the rounding of values and differences: 0.8 and 0.5 agree within 0.3, and (2.8 - 1) / 9 is at least 0.2."""

_REWARDS = f"""
CREATE VIEW disagreements AS
SELECT episode_id FROM ratings JOIN agreed USING (component) GROUP BY episode_id, number
HAVING if(count(*) > 1, max(value) - min(value), max(spread)) > any_value(within) + {_ROUNDING};
CREATE VIEW rewards AS
SELECT * REPLACE (if(believed, reward, NULL) AS reward, if(believed, solved, NULL) AS solved) FROM (
    SELECT *, NOT quarantined AND NOT disputed AS believed FROM (
        SELECT *, episode_id IN (FROM quarantined) AS quarantined,
            reward IS NOT NULL AND episode_id IN (FROM disagreements) AS disputed
        FROM graded
    )
)
"""

_MEMBERS = f"""
CREATE TABLE reasons AS
WITH lengths AS (
    SELECT
        episode_id,
        max(len(token_ids)) AS length,
        sum(len(list_filter(token_role, lambda role: role = 1))) AS policy_tokens
    FROM sequences GROUP BY episode_id
),
graded_groups AS (
    SELECT
        e.group_id,
        avg(r.reward::DOUBLE ORDER BY e.file_row_number) AS group_reward_mean,
        coalesce(stddev_samp(r.reward::DOUBLE ORDER BY e.file_row_number), 0) AS deviation
    FROM episodes e JOIN rewards r USING (episode_id)
    WHERE r.reward IS NOT NULL
    GROUP BY e.group_id
),
unmet AS (
    SELECT DISTINCT r.episode_id
    FROM graded r CROSS JOIN required q
    LEFT JOIN ratings v ON v.episode_id = r.episode_id AND v.component = q.component
    WHERE v.value IS NULL OR v.value < q.at_least - {_ROUNDING} OR v.value > q.at_most + {_ROUNDING}
)
SELECT
    e.episode_id, e.group_id, e.sample, r.reward, e.file_row_number AS position,
    g.group_reward_mean,
    coalesce(l.length, 0) AS length,
    e.task_id, e.image_digest, r.solved,
    CASE
        WHEN r.quarantined THEN 'quarantined'
        WHEN e.outcome IN ('infra_error', 'aborted', 'dropped') THEN e.outcome
        WHEN r.disputed THEN 'disagreement'
        WHEN r.reward IS NULL THEN 'not_graded'
        WHEN r.verdict = 'tampered' THEN 'tampered'
        WHEN coalesce(l.policy_tokens, 0) = 0 THEN 'empty'
        WHEN e.group_id IN (SELECT group_id FROM lacking) THEN 'zero_variance'
        WHEN g.deviation < $min_deviation THEN 'low_deviation'
        WHEN r.reward < $min_reward::FLOAT THEN 'low_reward'
        WHEN e.episode_id IN (FROM unmet) THEN 'unmet'
        WHEN l.policy_tokens < $min_policy_tokens THEN 'too_short'
        WHEN l.length > $max_tokens THEN 'too_long'
        WHEN e.outcome = 'truncated' AND $drop_truncated THEN 'truncated'
    END AS reason
FROM episodes e
JOIN rewards r USING (episode_id)
LEFT JOIN graded_groups g ON g.group_id = e.group_id
LEFT JOIN lengths l ON l.episode_id = e.episode_id
"""

_KEPT = """
CREATE VIEW members AS
SELECT *, reason IS NULL AS kept, min(position) OVER (PARTITION BY group_id) AS group_position FROM reasons
"""

_SAMPLED = """
SELECT s.episode_id, s.token_ids, s.token_role FROM sequences s JOIN reasons r USING (episode_id) WHERE r.reason IS NULL
"""

_GROUPS = """
SELECT group_id, any_value(task_id) AS task_id, any_value(image_digest) AS template,
    count(*) FILTER (solved) AS solved, count(solved) AS graded
FROM reasons GROUP BY group_id HAVING count(*) > count(reason)
"""

_TRAIN = """
WITH kept AS (
    SELECT *, dense_rank() OVER (ORDER BY group_position) - 1 AS group_index
    FROM members WHERE kept
)
SELECT
    k.episode_id, k.group_id, k.group_index, k.sample, s.index AS sequence, s.token_ids, s.token_role, s.logprobs,
    list_sort(list_distinct(list_transform(s.policy_spans, lambda span: span.version))) AS policy_versions,
    k.reward{recorded}
FROM kept k JOIN sequences s USING (episode_id)
ORDER BY k.group_index, k.position, s.index
"""

_STRANGERS = """
SELECT count(*) FROM (
    (SELECT episode_id, group_id FROM episodes EXCEPT ALL SELECT episode_id, group_id FROM rewards)
    UNION ALL
    (SELECT episode_id, group_id FROM rewards EXCEPT ALL SELECT episode_id, group_id FROM episodes)
    UNION ALL
    (SELECT DISTINCT episode_id, NULL FROM sequences WHERE episode_id NOT IN (SELECT episode_id FROM episodes))
)
"""

_UNIQUE = (
    ("episodes", ("episode_id",)),
    ("episodes", ("group_id", "sample")),
    ("rewards", ("episode_id",)),
    ("sequences", ("episode_id", "index")),
)
"""Columns that identify a row of each table."""
_SHOWN = 3


def _check_unique(db: duckdb.DuckDBPyConnection) -> None:
    for table, columns in _UNIQUE:
        key = ", ".join(f'"{column}"' for column in columns)
        twice = db.sql(
            f"SELECT {key}, count(*) FROM {table} GROUP BY {key} HAVING count(*) > 1 ORDER BY min(file_row_number)"
        ).fetchall()
        if twice:
            words = "; ".join(
                ", ".join(f"{column} {value}" for column, value in zip(columns, row, strict=False))
                + f": {row[-1]} rows"
                for row in twice[:_SHOWN]
            )
            more = f"; and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
            raise DuplicateRows(
                f"{table} repeats ({', '.join(columns)}): {words}{more}: sample the rollouts again; those of versions"
                " before 2 repeat ids where an iteration drew a task twice"
            )


def _groups_without_variance(db: duckdb.DuckDBPyConnection, config: DatasetConfig) -> pa.Table:
    """Groups for which `lacks_variance` holds, as a table of one column, group_id; empty if such groups are kept.

    With `agree`, only members with a reward are compared, so that at least two of a group that trains have one.
    """
    found: dict[str, list[bool | float | None]] = {}
    if config.drop_zero_variance:
        which = "WHERE reward IS NOT NULL" if config.agree else ""  # else as ever: digests stay
        for group, value in db.sql(f"SELECT group_id, {config.variance_of} FROM rewards {which}").fetchall():
            found.setdefault(group, []).append(value)
    lacking = sorted(group for group, values in found.items() if lacks_variance(values))
    return pa.table({"group_id": pa.array(lacking, pa.string())})


def _column(name: str, values: list[str]) -> pa.Table:
    return pa.table({name: pa.array(values, pa.string())})


def _leave_out(db: duckdb.DuckDBPyConnection, reason: str, column: str, values: list[str]) -> None:
    """Give the episodes with one of these values the reason, if they have none yet."""
    db.register("left_out", _column(column, values))
    db.execute(
        f"UPDATE reasons SET reason = $reason WHERE reason IS NULL AND {column} IN (FROM left_out)", {"reason": reason}
    )


def _duplicates(db: duckdb.DuckDBPyConnection, rule: Distinct) -> list[str]:
    """Ids of the episodes without a reason that are similar to another one of their group, which trains."""
    sketches: dict[str, np.ndarray] = {}
    for batch in db.sql(_SAMPLED).to_arrow_reader(256):
        for episode, tokens, roles in zip(*batch.columns, strict=True):
            sampled = tokens.values.to_numpy()[roles.values.to_numpy() == TokenRole.POLICY]
            sketches[episode.as_py()] = sketch(sampled, rule.ngram, sketches.get(episode.as_py()))
    rows = db.sql(
        "SELECT group_id, solved, episode_id FROM reasons WHERE reason IS NULL ORDER BY group_id, solved, sample"
    ).fetchall()
    found = []
    for _, alike in groupby(rows, itemgetter(0, 1)):
        names = [row[2] for row in alike]
        similar = near_duplicates([sketches[name] for name in names], rule.similarity)
        found += [names[number] for number in similar]
    return found


def _beyond(db: duckdb.DuckDBPyConnection, cap: Cap, families: Mapping[str, str]) -> list[str]:
    """Groups beyond the cap of their kind, of those with an episode that has no reason."""
    kinds: dict[str | int | None, list[str]] = {}
    for group, task, template, solved, graded in db.sql(_GROUPS).fetchall():
        kind = {
            "task": task,
            "template": template,
            "family": families.get(task),
            "pass_rate": min(solved * cap.intervals // graded, cap.intervals - 1),
        }[cap.by]
        kinds.setdefault(kind, []).append(group)
    return [
        group
        for groups in kinds.values()
        for group in sorted(groups, key=lambda group: digest_of([cap.seed, group]))[cap.max_groups :]
    ]


def _check_belong(db: duckdb.DuckDBPyConnection) -> None:
    ((strangers,),) = db.execute(_STRANGERS).fetchall()
    if strangers:
        raise RewardsMismatch(
            f"{strangers} episodes are in only one of episodes, sequences and rewards: build the dataset from rewards"
            " whose parent is these rollouts"
        )
