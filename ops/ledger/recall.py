"""Recall: what saw an episode, a task, an image, a tool or a reward rule, what was trained on it, what of that is live.

episodes that match -> rollouts and evaluations that sampled them
                    -> datasets that kept them -> checkpoints trained on these -> checkpoints descended from those
                    -> which of them are live
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import duckdb
import pyarrow as pa

from contracts.errors import ArtifactMissing
from contracts.store import Store
from ops.ledger.index import update
from ops.ledger.segments import Ledger
from resources.refs import experiments_in
from resources.registry import Registry

_TAINTED = pa.schema([("uri", pa.string()), ("distance", pa.int64())])
What = Literal["episode", "task", "image", "tool", "rule"]

_MATCH: Mapping[str, str] = {
    "episode": "episode_id BETWEEN unhex(rpad($value, 32, '0')) AND unhex(rpad($value, 32, 'f'))",
    "task": "task_id = $value",
    "image": "starts_with(image_digest, $value)",
    "tool": "list_contains(tools, $value)",
    "rule": "episode_id IN (SELECT episode_id FROM grades WHERE home IN (FROM graders))",
}
"""Condition on `episodes`."""

_FOUND = "CREATE TEMP TABLE found AS SELECT * FROM episodes WHERE {match}"
_GRADERS = "CREATE TEMP TABLE graders AS SELECT uri FROM artifacts WHERE starts_with(rule, $value)"
PLACES = """
CREATE TEMP TABLE places AS
WITH pinned AS (SELECT uri, experiment, iteration FROM artifacts WHERE kind = 'iteration_inputs'),
sampled AS (
    SELECT child AS uri, experiment, iteration FROM edges JOIN pinned ON parent = pinned.uri
    WHERE child LIKE 'artifacts/rollouts/%'
),
kept AS (
    SELECT child AS uri, experiment, iteration FROM edges JOIN sampled ON parent = sampled.uri
    WHERE child LIKE 'artifacts/dataset/%'
)
FROM sampled UNION ALL FROM kept UNION ALL
SELECT child, experiment, iteration FROM edges JOIN kept ON parent = kept.uri WHERE child LIKE 'artifacts/checkpoint/%'
"""
"""Experiment and iteration of rollouts, datasets and checkpoints, by URI."""

_SEEN = """
SELECT a.kind, any_value(p.experiment) AS experiment, any_value(p.iteration) AS iteration, a.digest,
    min(f.policy) AS policy, count(DISTINCT f.episode_id) AS episodes,
    count(*) FILTER (WHERE g.solved) AS solved, avg(g.reward) AS reward,
    sum(policy_tokens)::BIGINT AS policy_tokens, sum(engine_tokens)::BIGINT AS engine_tokens,
    sum(sampling_seconds) AS sampling_seconds, sum(tool_seconds) AS tool_seconds
FROM found f JOIN artifacts a ON f.home = a.uri LEFT JOIN places p ON p.uri = a.uri
LEFT JOIN (
    SELECT episode_id, arg_max_null(solved, created_unix) AS solved, arg_max_null(reward, created_unix) AS reward
    FROM grades JOIN artifacts ON home = uri WHERE episode_id IN (SELECT episode_id FROM found) GROUP BY episode_id
) g ON g.episode_id = f.episode_id
GROUP BY a.uri, a.kind, a.digest ORDER BY experiment NULLS LAST, iteration, a.kind, a.digest
"""
_USED = """
SELECT m.home AS uri, any_value(a.digest) AS digest, any_value(p.experiment) AS experiment,
    any_value(p.iteration) AS iteration, count(*) FILTER (WHERE kept) AS kept,
    histogram(reason) FILTER (WHERE NOT kept) AS left_out
FROM members m JOIN artifacts a ON m.home = a.uri LEFT JOIN places p ON p.uri = m.home
WHERE episode_id IN (SELECT episode_id FROM found) {graded}
GROUP BY m.home ORDER BY experiment, iteration, digest
"""
_GRADED = "AND m.home IN (SELECT child FROM edges WHERE parent IN (FROM graders))"
"""Condition on datasets for a rule: another grading of the same episodes did not use it."""
_DESCENT = """
SELECT parent, child FROM edges WHERE child LIKE 'artifacts/checkpoint/%'
    AND (list_contains($datasets, parent) OR parent LIKE 'artifacts/checkpoint/%')
"""
_CHECKPOINTS = """
SELECT a.uri, any_value(a.digest) AS digest, any_value(p.experiment) AS experiment,
    any_value(p.iteration) AS iteration, t.distance
FROM tainted t JOIN artifacts a USING (uri) LEFT JOIN places p USING (uri)
GROUP BY a.uri, t.distance ORDER BY distance, experiment, iteration, digest
"""


@dataclass(frozen=True)
class Recall:
    """Answer to a question. All lists are sorted and hold JSON-like rows."""

    episodes: int
    """Distinct episodes that match."""
    seen: list[dict[str, Any]]
    """Rollouts and evaluation runs that sampled them, with counts, mean reward by the latest grading, and costs."""
    used: list[dict[str, Any]]
    """Datasets that considered them: how many train, and why the others don't."""
    trained: list[dict[str, Any]]
    """Checkpoints trained on them (distance 0), and those trained further from these."""
    live: list[dict[str, Any]]
    """Experiments whose live policy is among `trained`."""


def recall(store: Store, what: What, value: str) -> Recall:
    """Answer for one episode id (or a prefix), task id, image digest, tool name, or reward rule (or a prefix).

    Updates the ledger first. Raises ArtifactMissing if nothing matches.
    """
    with asked(store, what, value) as (db, count):
        used = rows(db, _USED.format(graded=_GRADED if what == "rule" else ""))
        datasets = [row.pop("uri") for row in used]
        trained = trained_on(db, [uri for uri, row in zip(datasets, used, strict=True) if row["kept"]])
        return Recall(
            count, rows(db, _SEEN), used, trained, live_among(store, {row.pop("uri"): row for row in trained})
        )


@contextmanager
def asked(store: Store, what: What, value: str) -> Iterator[tuple[duckdb.DuckDBPyConnection, int]]:
    """The ledger with the tables `found` (rows of `episodes` that match), `graders` (URIs of the rewards made by a
    rule) and `places`; and the number of episodes. Raises as `recall` does.
    """
    if what == "episode" and not re.fullmatch("[0-9a-f]{1,32}", value):
        raise ArtifactMissing(f"{value!r} is no episode id: give up to 32 of its digits, 0-9 and a-f")
    update(store)
    with Ledger(store).opened() as (db, _):
        if what == "rule":
            db.execute(_GRADERS, {"value": value})
        db.execute(_FOUND.format(match=_MATCH[what]), {} if what == "rule" else {"value": value})
        count = db.sql("SELECT count(DISTINCT episode_id) FROM found").fetchall()[0][0]
        if not count:
            raise ArtifactMissing(_nothing(db, what, value, store.url))
        db.execute(PLACES)
        yield db, count


def trained_on(db: duckdb.DuckDBPyConnection, datasets: Sequence[str]) -> list[dict[str, Any]]:
    """Checkpoints trained on these datasets (URIs) and those trained further from them, the former first. Reads
    `places`.
    """
    edges = db.sql(_DESCENT, params={"datasets": [*datasets]}).fetchall()
    distances = _distances(datasets, edges)
    db.register("tainted", pa.table({"uri": [*distances], "distance": [*distances.values()]}, schema=_TAINTED))
    return rows(db, _CHECKPOINTS)


def _distances(datasets: Iterable[str], edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Checkpoints trained on the datasets (0), and those trained further from these, with their distance."""
    children: dict[str, list[str]] = {}
    for parent, child in edges:
        children.setdefault(parent, []).append(child)
    found: dict[str, int] = {}
    queue = deque((child, 0) for dataset in datasets for child in children.get(dataset, ()))
    while queue:
        uri, distance = queue.popleft()
        if uri not in found:
            found[uri] = distance
            queue.extend((child, distance + 1) for child in children.get(uri, ()))
    return found


def live_among(store: Store, tainted: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Experiments whose live policy is among these rows of `trained_on`, by URI."""
    found = []
    for experiment in experiments_in(store):
        live = Registry(store, experiment).live()
        row = tainted.get(live.policy.uri) if live else None
        if live is not None and row is not None:
            found.append(
                {
                    "experiment": experiment,
                    "digest": live.policy.digest,
                    "change": live.number,
                    "distance": row["distance"],
                }
            )
    return found


def rows(db: duckdb.DuckDBPyConnection, query: str, values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Rows of a query."""
    found = db.sql(query, params=dict(values)) if values else db.sql(query)
    answer: list[dict[str, Any]] = found.to_arrow_table().to_pylist(maps_as_pydicts="strict")
    return answer


_KNOWN = {
    "task": "SELECT DISTINCT task_id FROM episodes ORDER BY 1 LIMIT 4",
    "image": "SELECT DISTINCT image_digest[:12] FROM episodes ORDER BY 1 LIMIT 4",
    "tool": "SELECT DISTINCT unnest(tools) FROM episodes ORDER BY 1 LIMIT 12",
    "rule": "SELECT DISTINCT rule FROM artifacts WHERE rule IS NOT NULL ORDER BY 1 LIMIT 12",
}


def _nothing(db: duckdb.DuckDBPyConnection, what: What, value: str, url: str) -> str:
    known = [row[0] for row in db.sql(_KNOWN[what]).fetchall()] if what in _KNOWN else []
    some = f": some that have are {', '.join(known)}" if known else ": `triplane episodes list` lists episodes"
    return f"no episode in {url} has the {what} {value!r}{some}"
