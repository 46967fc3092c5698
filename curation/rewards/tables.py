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
"""One row an episode, in the order of `episodes`. reward and solved are null where nothing may be learned (see
UNSCORED, `not_graded`); the reward alone is null where the tests ran but a component has no value.

`components` holds what each one contributed, weight included: their sum is the reward. `verdict` is how the hidden
tests' run ended (completed, crashed, timed_out, apply_failed, ungradable), `tampered` for a state that tampered with
its verdict, sandbox_broken when the agent left none to run them on, the outcome of an unscored episode (infra_error,
aborted, dropped), or not_graded when the verifier's infrastructure failed. `findings` are the names of what was found
(docs/threat-model.md), empty for nearly all; tables of earlier versions lack the column.
"""

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
"""One row a scored episode and composed component, in that order. raw: what the component found; value: that within its
clip bounds, before the weight; both null when it found nothing. reason: for people. answers: what an endpoint said, as
it said it.
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
"""What `flips` returns."""

_FLIPS = """
SELECT
    coalesce(o.episode_id, n.episode_id) AS episode_id,
    coalesce(o.task_id, n.task_id) AS task_id,
    o.reward AS old_reward, n.reward AS new_reward,
    o.verdict AS old_verdict, n.verdict AS new_verdict, o.solved AS old_solved, n.solved AS new_solved,
    {findings} AS new_findings
FROM old_rewards o FULL JOIN new_rewards n ON o.episode_id = n.episode_id
WHERE o.reward IS DISTINCT FROM n.reward OR o.solved IS DISTINCT FROM n.solved
ORDER BY 1
"""


def flips(old: pa.Table, new: pa.Table) -> pa.Table:
    """Episodes whose reward or verdict differs between two gradings, by episode_id; null where a grading has none for
    one.
    """
    findings = "n.findings" if "findings" in new.column_names else "NULL"
    with duckdb.connect() as db:
        db.register("old_rewards", old)
        db.register("new_rewards", new)
        return db.sql(_FLIPS.format(findings=findings)).to_arrow_table().cast(FLIPS)
