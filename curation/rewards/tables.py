"""Schemas of rewards and evidence, and the difference between two gradings."""

from __future__ import annotations

import duckdb
import pyarrow as pa

_COMPONENT = pa.struct([("name", pa.string()), ("value", pa.float32())])

REWARDS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("reward", pa.float32()),
        ("solved", pa.bool_()),
        ("components", pa.list_(_COMPONENT)),
        ("verdict", pa.string()),
        ("tests_passed", pa.int32()),
        ("tests_total", pa.int32()),
        ("findings", pa.list_(pa.string())),
    ]
)
"""One row per episode, in the order of `episodes`. reward and solved are null if the episode must not train (see
UNSCORED, `not_graded`); only reward is null if the tests ran but a component has no value.

`components` holds the weighted contribution of each component; their sum is the reward. `verdict` is the exit of the
hidden tests' run (completed, crashed, timed_out, apply_failed, ungradable), tampered if the state tampered with its
verdict, sandbox_broken if the agent left no final state to test, the outcome of an unscored episode (infra_error,
aborted, dropped), or not_graded if the verifier's infrastructure failed. `findings` are names of findings
(docs/threat-model.md), usually none; tables of earlier versions lack the column.
"""

EVIDENCE_FILE = "evidence.parquet"
"""File of an artifact `rewards` with EVIDENCE, outside its digest; absent without components."""
EVIDENCE = pa.schema(
    [
        ("episode_id", pa.string()),
        ("component", pa.string()),
        ("raw", pa.float64()),
        ("value", pa.float64()),
        ("reason", pa.string()),
        ("answers", pa.list_(pa.string())),
    ]
)
"""One row per scored episode and composed component, in that order. raw: the component's value; value: the clipped raw,
unweighted; both null if there is none. reason: explanation for readers. answers: unchanged replies of the endpoint.
"""

FLIPS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("task_id", pa.string()),
        ("old_reward", pa.float32()),
        ("new_reward", pa.float32()),
        ("old_verdict", pa.string()),
        ("new_verdict", pa.string()),
        ("old_solved", pa.bool_()),
        ("new_solved", pa.bool_()),
        ("new_findings", pa.list_(pa.string())),
    ]
)
"""Columns of `flips`."""

_FLIPS = """
SELECT
    coalesce(o.episode_id, n.episode_id) AS episode_id,
    coalesce(o.task_id, n.task_id) AS task_id,
    o.reward AS old_reward, n.reward AS new_reward,
    o.verdict AS old_verdict, n.verdict AS new_verdict, o.solved AS old_solved, n.solved AS new_solved,
    {findings} AS new_findings
FROM old_rewards o FULL JOIN new_rewards n ON o.episode_id = n.episode_id
WHERE o.reward IS DISTINCT FROM n.reward OR o.solved IS DISTINCT FROM n.solved
    OR o.verdict IS DISTINCT FROM n.verdict
ORDER BY 1
"""


def flips(old: pa.Table, new: pa.Table) -> pa.Table:
    """Episodes whose reward or verdict differs between two gradings, by episode_id; null if a grading lacks the
    episode.
    """
    findings = "n.findings" if "findings" in new.column_names else "NULL"
    with duckdb.connect() as db:
        db.register("old_rewards", old)
        db.register("new_rewards", new)
        return db.sql(_FLIPS.format(findings=findings)).to_arrow_table().cast(FLIPS)
