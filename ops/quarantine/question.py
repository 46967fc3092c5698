"""What a question or the marks in force concern, from the ledger.

    marked episodes -> datasets that use them -> checkpoints trained on these -> checkpoints trained further from those
                                                                              -> which are live

A dataset uses an episode if it trains on it or if its reward counted in the mean of its group, or in the mean and
deviation of the iteration, where a training on the dataset normalized its advantages over that.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from contracts.artifacts import find_artifact
from contracts.errors import ArtifactMissing
from contracts.store import Store
from curation.dataset import COUNTED, COUNTED_IN_BATCH
from ops.ledger.index import update
from ops.ledger.recall import PLACES, What, asked, live_among, rows, trained_on
from ops.ledger.segments import Ledger
from resources.quarantine import MARKED, Mark, Quarantine

_OVER_ITERATION = ("batch_normalized", "group_mean_batch_std")
"""Values of `trainer.algorithm.advantage` that normalize over all graded episodes of an iteration."""
_MARKED = """
CREATE TEMP TABLE marked AS
SELECT episode_id, home AS rollouts, NULL::VARCHAR AS rewards FROM found WHERE home LIKE 'artifacts/rollouts/%'
"""
_MARKED_BY_RULE = """
CREATE TEMP TABLE marked AS
SELECT episode_id, f.home AS rollouts, g.home AS rewards FROM found f JOIN grades g USING (episode_id)
WHERE f.home LIKE 'artifacts/rollouts/%' AND g.home IN (FROM graders)
"""
_TRAININGS = """
SELECT DISTINCT home, child FROM members JOIN edges ON home = parent
WHERE list_contains($in_batch, reason) AND episode_id IN (SELECT episode_id FROM marked)
    AND child LIKE 'artifacts/checkpoint/%'
"""
_USED = """
WITH uses AS (
    SELECT home, episode_id, kept, reason FROM members
    WHERE episode_id IN (SELECT episode_id FROM marked WHERE rewards IS NULL)
    UNION
    SELECT home, episode_id, kept, reason FROM members
    WHERE episode_id IN (SELECT episode_id FROM marked WHERE rewards IS NOT NULL)
        AND home IN (SELECT child FROM edges WHERE parent IN (SELECT rewards FROM marked))
)
SELECT home AS uri, any_value(a.digest) AS digest, any_value(p.experiment) AS experiment,
    any_value(p.iteration) AS iteration, count(*) FILTER (kept) AS trains,
    count(*) FILTER (
        list_contains($counted, reason) OR list_contains($in_batch, reason) AND list_contains($normalized, home)
    ) AS counted
FROM uses JOIN artifacts a ON home = a.uri LEFT JOIN places p ON p.uri = home
GROUP BY home HAVING trains + counted > 0 ORDER BY experiment, iteration, digest
"""
_ITERATIONS = """
SELECT experiment, iteration FROM places WHERE experiment IS NOT NULL AND uri IN (SELECT rollouts FROM marked)
UNION
SELECT experiment, iteration FROM edges JOIN artifacts ON child = uri
WHERE kind = 'iteration_inputs' AND parent IN (SELECT rollouts FROM marked)
ORDER BY ALL
"""


@dataclass(frozen=True)
class Reach:
    """What marked episodes concern. Lists are sorted."""

    episodes: int
    """Marked episodes."""
    datasets: list[dict[str, Any]]
    """Datasets that use them: trains (rows), counted (rows left out, but part of a mean)."""
    checkpoints: dict[str, dict[str, Any]]
    """By URI: checkpoints trained on these datasets (distance 0), and those trained further from them."""
    live: list[dict[str, Any]]
    """Experiments whose live policy is among `checkpoints`."""
    iterations: list[tuple[str, str]]
    """(experiment, iteration) that sampled them, or repeats that in a fork."""


def reach_of(store: Store, what: What, value: str, *, only_count: bool = False) -> tuple[Reach, pa.Table]:
    """What a question concerns, and its episodes as MARKED. only_count: leave that table empty.

    Raises ArtifactMissing if nothing matches that a dataset could train on, or if a beginning of an id or a digest
    matches several.
    """
    with asked(store, what, value) as (db, _):
        if what in ("episode", "image"):
            _require_one(db, what, value)
        db.execute(_MARKED_BY_RULE if what == "rule" else _MARKED)
        found = _reach(store, db)
        if not found.episodes:
            raise ArtifactMissing(
                f"no rollouts have episodes with the {what} {value!r}, only evaluations or files of chats: evaluations"
                " are never filtered, and rows of a file (`triplane recall` names it) are removed by hand"
            )
        some = "LIMIT 0" if only_count else "ORDER BY rollouts, episode_id, rewards"
        return found, db.sql(f"FROM marked {some}").to_arrow_table().cast(MARKED)


def reach_of_marks(store: Store, marks: Sequence[Mark]) -> Reach:
    """What marks concern."""
    update(store)
    quarantine = Quarantine(store)
    with Ledger(store).opened() as (db, _):
        db.execute(PLACES)
        if marks:
            db.read_parquet([glob.escape(str(quarantine.path(mark))) for mark in marks]).create_view("marked")
        else:
            db.register("marked", MARKED.empty_table())
        return _reach(store, db)


def _reach(store: Store, db: duckdb.DuckDBPyConnection) -> Reach:
    in_batch = {"in_batch": COUNTED_IN_BATCH}
    trainings = db.execute(_TRAININGS, in_batch).fetchall()
    normalized = sorted({dataset for dataset, checkpoint in trainings if _over_iteration(store, checkpoint)})
    used = rows(db, _USED, {"counted": COUNTED, **in_batch, "normalized": normalized})
    trained = {row.pop("uri"): row for row in trained_on(db, [row.pop("uri") for row in used])}
    ((count,),) = db.sql("SELECT count(DISTINCT episode_id) FROM marked").fetchall()
    return Reach(count, used, trained, live_among(store, trained), db.sql(_ITERATIONS).fetchall())


def _over_iteration(store: Store, uri: str) -> bool:
    """Whether a checkpoint's training normalized its advantages over the iteration, or that is unknown."""
    made = find_artifact(store, "checkpoint", uri.removeprefix("artifacts/checkpoint/"))
    return made is None or made.manifest.config.get("rl", {}).get("algorithm", {}).get("advantage") in _OVER_ITERATION


def _require_one(db: duckdb.DuckDBPyConnection, what: What, value: str) -> None:
    column = {"episode": "lower(hex(episode_id))", "image": "image_digest"}[what]
    found = [row[0] for row in db.sql(f"SELECT DISTINCT {column} FROM found ORDER BY 1 LIMIT 3").fetchall()]
    if len(found) > 1:
        some = ", ".join(each[:16] for each in found)
        raise ArtifactMissing(f"several {what}s begin with {value!r} ({some}, ...): give more digits")
