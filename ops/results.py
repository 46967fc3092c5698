"""Results for Dagster: reference, content digest as data version, and small metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef
from contracts.failpoints import failpoint
from ops.columns import COLUMNS, type_text

if TYPE_CHECKING:
    Materialized = dg.MaterializeResult[ArtifactRef]
else:
    Materialized = dg.MaterializeResult  # Dagster does not recognize the parametrized class as an asset's annotation

Metadata = dict[str, Any]
SHORT = 16
"""Digits of another artifact's digest: enough for `triplane lineage`."""
MAX_MARKDOWN = 30_000
"""Maximum characters of one Markdown entry, to keep a Dagster event below 100 KB."""


def describe(artifact: Artifact) -> Metadata:
    """Location, commit time and parents of an artifact, as metadata."""
    ref, manifest = artifact.ref, artifact.manifest
    rows = [
        dg.TableRecord({"role": role, "kind": parent.kind, "digest": parent.digest[:SHORT]})
        for role, parent in sorted(manifest.parents.items())
    ]
    found: Metadata = {"parents": dg.MetadataValue.table(rows)} if rows else {}
    return found | {
        # earlier than the materialization if the artifact already existed
        "committed": dg.MetadataValue.timestamp(manifest.created_unix),
        "digest": ref.digest,
        "action key": ref.key,
        "size": size_text(sum(entry.size for entry in manifest.files)),
        "config": dg.MetadataValue.json(manifest.config),
        "dagster/uri": f"{artifact.store.url}/{ref.uri}",
    }


def present(metadata: Mapping[str, Any]) -> Metadata:
    """Metadata for display: readable names, floats with four digits. Dagster's own keys stay."""
    return {name if "/" in name else label(name): _rounded(value) for name, value in metadata.items()}


def label(name: str) -> str:
    """Readable name of a column or metric."""
    return name.replace("held_out", "held-out").replace("_", " ")


def size_text(size: int) -> str:
    """Number of bytes as text: 999 B, 1.9 MB."""
    unit, units = float(size), iter(("B", "kB", "MB", "GB", "TB"))
    name = next(units)
    while unit >= 1000 and name != "TB":
        unit, name = unit / 1000, next(units)
    return f"{size} B" if name == "B" else f"{unit:.3g} {name}"


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value, 1) if abs(value) >= 1000 else float(f"{value:.4g}")


def table_facts(table: pa.Table) -> Metadata:
    """Row count and column schema, under the keys that Dagster's asset page reads."""
    columns = [
        dg.TableColumn(field.name, type_text(field.type), description=COLUMNS.get(field.name)) for field in table.schema
    ]
    return {"dagster/row_count": table.num_rows, "dagster/column_schema": dg.TableSchema(columns)}


def link(experiment: str, asset: str) -> dg.DagsterAssetMetadataValue:
    """Link to another asset's page."""
    return dg.MetadataValue.asset(dg.AssetKey([experiment, asset]))


def numbers(values: Mapping[str, Any]) -> Metadata:
    """Finite numbers among `values`, as floats or ints, for the plots tab."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value == value
        and abs(value) != float("inf")
    }


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> dg.MarkdownMetadataValue:
    """Rows with equal keys as a Markdown table, truncated to the size limit of an event."""
    if not rows:
        return dg.MetadataValue.md("nothing to show")
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    size = 0
    for row in rows:
        line = "| " + " | ".join(_cell(row[name]) for name in head) + " |"
        size += len(line)
        if size > MAX_MARKDOWN:
            break
        lines.append(line)
    return dg.MetadataValue.md("\n".join(lines))


def _cell(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


def output(artifact: Artifact, metadata: Mapping[str, Any]) -> dg.Output[ArtifactRef]:
    """Output of the last op of a graph asset."""
    failpoint("artifact-described")
    return dg.Output(
        artifact.ref,
        metadata=present({**metadata, **describe(artifact)}),
        data_version=dg.DataVersion(artifact.ref.digest),
    )


def result(artifact: Artifact, metadata: Mapping[str, Any], checks: Sequence[dg.AssetCheckResult] = ()) -> Materialized:
    """Result of an asset."""
    failpoint("artifact-described")
    return dg.MaterializeResult(
        value=artifact.ref,
        metadata=present({**metadata, **describe(artifact)}),
        data_version=dg.DataVersion(artifact.ref.digest),
        check_results=list(checks),
    )
