"""Rows that one artifact adds to the ledger."""

from __future__ import annotations

import duckdb
import pyarrow as pa

from contracts.artifacts import Artifact, Manifest
from contracts.digests import digest_of
from ops.ledger.segments import TABLES, Rows

_EPISODES = """
SELECT unhex(e.episode_id) AS episode_id, $home AS home, group_id, task_id, image_digest, outcome,
    policy_version AS policy, list_sort(list_distinct(list_transform(tool_calls, lambda call: call.name))) AS tools,
    policy_tokens, engine_tokens, seconds, sampling_seconds, tool_seconds
FROM episodes e LEFT JOIN telemetry t USING (episode_id) ORDER BY e.file_row_number
"""
_GRADES = """
SELECT unhex(episode_id) AS episode_id, $home AS home, reward, solved, verdict FROM rewards ORDER BY file_row_number
"""
_MEMBERS = """
SELECT unhex(episode_id) AS episode_id, $home AS home, kept, reason FROM members ORDER BY file_row_number
"""
_FILES = {
    "episodes": ("episodes", _EPISODES),
    "rewards": ("grades", _GRADES),
    "members": ("members", _MEMBERS),
}
"""Parquet file of an artifact -> the ledger's table and the query over the file."""
_NO_TELEMETRY = """
CREATE VIEW telemetry AS SELECT NULL::VARCHAR AS episode_id, NULL::BIGINT AS engine_tokens, NULL::DOUBLE AS seconds,
    NULL::DOUBLE AS sampling_seconds, NULL::DOUBLE AS tool_seconds WHERE false
"""


def rows_of(artifact: Artifact) -> Rows:
    """Rows of an artifact of any kind. Raises ArtifactCorrupt for a damaged file."""
    uri, manifest = artifact.ref.uri, artifact.manifest
    config = manifest.config
    one = {
        "uri": uri,
        "kind": manifest.kind,
        "digest": manifest.content_digest,
        "experiment": _text(config.get("experiment")),
        "iteration": _text(config.get("iteration")),
        "rule": rule_of(manifest) if manifest.kind == "rewards" else None,
        "created_unix": manifest.created_unix,
    }
    edges = [{"child": uri, "parent": ref.uri, "role": role} for role, ref in sorted(manifest.parents.items())]
    found = {name: schema.empty_table() for name, schema in TABLES.items()}
    found["artifacts"] = pa.Table.from_pylist([one], schema=TABLES["artifacts"])
    found["edges"] = pa.Table.from_pylist(edges, schema=TABLES["edges"])
    names = [name for name in _FILES if f"{name}.parquet" in artifact.names()]
    if names:
        with duckdb.connect() as db:
            if "telemetry.parquet" in artifact.names():
                db.read_parquet(str(artifact.path("telemetry.parquet"))).create_view("telemetry")
            else:
                db.execute(_NO_TELEMETRY)
            for name in names:
                table, query = _FILES[name]
                db.read_parquet(str(artifact.path(f"{name}.parquet")), file_row_number=True).create_view(name)
                found[table] = db.sql(query, params={"home": uri}).to_arrow_table().cast(TABLES[table])
    return found


def rule_of(rewards: Manifest) -> str:
    """Version of the grading code and digest of its settings."""
    return f"{rewards.code_version}-{digest_of(rewards.config)[:12]}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
