"""Rows that artifacts add to the ledger."""

from __future__ import annotations

import glob
from collections.abc import Sequence

import duckdb
import pyarrow as pa

from contracts.artifacts import Artifact, Manifest
from contracts.digests import digest_of
from ops.ledger.segments import TABLES, Rows

_EPISODES = """
SELECT unhex(e.episode_id) AS episode_id, e.home AS home, group_id, task_id, image_digest, outcome,
    policy_version AS policy, list_sort(list_distinct(list_transform(tool_calls, lambda call: call.name))) AS tools,
    policy_tokens, engine_tokens, seconds, sampling_seconds, tool_seconds
FROM episodes e LEFT JOIN telemetry t ON t.home = e.home AND t.episode_id = e.episode_id ORDER BY e.number, e.row
"""
_GRADES = """
SELECT unhex(episode_id) AS episode_id, home, reward, solved, verdict FROM rewards ORDER BY number, row
"""
_MEMBERS = "SELECT unhex(episode_id) AS episode_id, home, kept, reason FROM members ORDER BY number, row"
_FILES = {
    "episodes": ("episodes", _EPISODES),
    "rewards": ("grades", _GRADES),
    "members": ("members", _MEMBERS),
}
"""Parquet file of an artifact -> the ledger's table and the query over the files."""
_NO_TELEMETRY = """
CREATE VIEW telemetry AS SELECT NULL::VARCHAR AS home, NULL::VARCHAR AS episode_id, NULL::BIGINT AS engine_tokens,
    NULL::DOUBLE AS seconds, NULL::DOUBLE AS sampling_seconds, NULL::DOUBLE AS tool_seconds WHERE false
"""
_EMPTY = {name: schema.empty_table() for name, schema in TABLES.items()}
_HOMES = pa.schema([("file", pa.string()), ("home", pa.string()), ("number", pa.int64())])


def rows_of(artifacts: Sequence[Artifact]) -> Rows:
    """Rows of artifacts of any kinds, in order. Raises ArtifactCorrupt for a damaged file."""
    found = dict(_EMPTY)
    found["artifacts"] = _table("artifacts", [_artifact(each) for each in artifacts])
    found["edges"] = _table("edges", [edge for each in artifacts for edge in _edges(each)])
    held: dict[str, list[Artifact]] = {"telemetry": [], **{name: [] for name in _FILES}}
    for each in artifacts:
        for name in _tables(each):
            held[name].append(each)
    if any(held[name] for name in _FILES):
        with duckdb.connect() as db:
            if not held["telemetry"]:
                db.execute(_NO_TELEMETRY)
            for name in ("telemetry", *_FILES):
                if held[name]:
                    _view(db, name, held[name])
            for name, (table, query) in _FILES.items():
                if held[name]:
                    found[table] = db.sql(query).to_arrow_table().cast(TABLES[table])
    return found


def _artifact(artifact: Artifact) -> tuple[object, ...]:
    manifest = artifact.manifest
    config = manifest.config
    return (
        artifact.uri,
        manifest.kind,
        manifest.content_digest,
        _text(config.get("experiment")),
        _text(config.get("iteration")),
        rule_of(manifest) if manifest.kind == "rewards" else None,
        manifest.created_unix,
    )


def _edges(artifact: Artifact) -> list[tuple[object, ...]]:
    child, parents = artifact.uri, artifact.manifest.parents
    return [(child, parents[role].uri, role) for role in sorted(parents)]


def _table(name: str, rows: Sequence[tuple[object, ...]]) -> pa.Table:
    schema = TABLES[name]
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema)


def _tables(artifact: Artifact) -> list[str]:
    """Names of its tables that the ledger reads."""
    stems = {entry.path.removesuffix(".parquet") for entry in artifact.manifest.files if ".parquet" in entry.path}
    return [name for name in ("telemetry", *_FILES) if name in stems]


def _view(db: duckdb.DuckDBPyConnection, name: str, artifacts: Sequence[Artifact]) -> None:
    """View of one file of each artifact, with `home`, `number` (of the artifact) and `row`.

    Rows whose episode id is not hexadecimal are left out: no question finds them, and one would fail all updates.
    """
    files = [str(each.path(f"{name}.parquet")) for each in artifacts]
    homes = [each.uri for each in artifacts]
    db.register(f"homes_of_{name}", pa.table([files, homes, range(len(files))], schema=_HOMES))
    # by name: older files lack columns that were added later
    paths = list(map(glob.escape, files))  # DuckDB takes * ? [ for patterns
    db.read_parquet(paths, file_row_number=True, filename=True, union_by_name=True).create_view(f"files_of_{name}")
    db.execute(
        f"CREATE VIEW {name} AS SELECT f.*, file_row_number AS row, home, number"
        f" FROM files_of_{name} f JOIN homes_of_{name} ON file = filename WHERE try(unhex(episode_id)) IS NOT NULL"
    )


def rule_of(rewards: Manifest) -> str:
    """Version of the grading code and digest of its settings."""
    return f"{rewards.code_version}-{digest_of(rewards.config)[:12]}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
