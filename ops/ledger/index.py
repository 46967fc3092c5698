"""Keep the ledger current: index what was materialized since, or everything anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

import duckdb
import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef, artifact_kinds, find_artifact, list_artifacts
from contracts.errors import TriplaneError
from contracts.store import Store
from inference.rollouts.carry_over import UNFINISHED
from ops.ledger.rows import rows_of
from ops.ledger.segments import KIND, Ledger, batched
from resources.refs import note, noted, unnote

LEFT_OUT = frozenset({"group", "rollout_plan", "report", KIND})
"""Kinds that no question needs: parts of rollouts, and pages."""
SIBLINGS = {"checkpoint": ("trainer_state", ""), "rollouts": (UNFINISHED, "groups_carried_over")}
"""Kind -> kind of the artifact of the same key, which is no parent of it, and the fact in its manifest's meta that says
there is one; empty: there always is.
"""
ATTEMPTS = 20
"""Attempts to append while other writers do."""
BATCH = 64
"""Artifacts whose rows a rebuild reads at once."""


def update(store: Store, progress: Callable[[int], None] = lambda done: None) -> int:
    """Index the artifacts noted since the last update, with their parents. Returns their number.

    Builds the whole ledger if there is none, or if an artifact in it was deleted and made again with other content.
    Safe to kill at any point and to run concurrently. progress: receives the number of artifacts that a rebuild has
    read.
    """
    ledger = Ledger(store)
    for _ in range(ATTEMPTS):
        pending = noted(store)
        with ledger.opened() as (db, segments):
            if not segments or _is_replaced(db, pending):
                break
            fresh = sorted(_unknown(store, db, pending), key=lambda each: each.ref.uri)
        if fresh and not ledger.append(segments, rows_of(fresh)):
            continue
        for ref in pending:
            unnote(store, ref)
        if not pending or ledger.is_current(segments):
            return len(fresh)
        for ref in pending:  # a rebuild began a generation that may lack them
            note(store, ref)
    return rebuild(store, progress)


def update_fault(store: Store) -> str:
    """Update, for a step that must not fail with the index; returns what went wrong, or nothing."""
    try:
        update(store)
    except (TriplaneError, duckdb.Error, pa.ArrowException, OSError) as error:
        return f"the ledger was not updated ({error}); `triplane recall` updates it, too"
    return ""


def rebuild(store: Store, progress: Callable[[int], None] = lambda done: None) -> int:
    """Index every artifact of the store anew. Returns their number.

    The next update indexes artifacts that concurrent updates added to the ledger that this one replaces.
    """
    done, pending = 0, noted(store)

    def write(folder: Path) -> None:
        nonlocal done
        with batched(folder) as add:
            every = _all(store)
            while some := list(islice(every, BATCH)):
                add(rows_of(some))
                done += len(some)
                progress(done)

    missed = Ledger(store).replace(write)
    if missed is None:
        return rebuild(store, progress)
    for ref in missed:
        note(store, ref)
    for ref in pending:  # noted before, so the listing had them
        unnote(store, ref)
    return done


def discard(store: Store) -> None:
    """Remove the ledger, after an artifact was removed; the next update builds it anew."""
    store.discard(f"artifacts/{KIND}/")


def _all(store: Store) -> Iterator[Artifact]:
    for kind in artifact_kinds(store):
        if kind not in LEFT_OUT:
            yield from list_artifacts(store, kind)


def _known(db: duckdb.DuckDBPyConnection, uris: Iterable[str]) -> dict[str, str]:
    """Digests of those of these artifacts that the ledger has, by URI."""
    query = "SELECT uri, digest FROM artifacts WHERE list_contains($uris, uri)"
    return dict(db.sql(query, params={"uris": [*uris]}).fetchall())


def _is_replaced(db: duckdb.DuckDBPyConnection, refs: Collection[ArtifactRef]) -> bool:
    """Whether the ledger has one of these artifacts with other content."""
    known = _known(db, [ref.uri for ref in refs])
    return any(known.get(ref.uri, ref.digest) != ref.digest for ref in refs)


def _unknown(store: Store, db: duckdb.DuckDBPyConnection, refs: Iterable[ArtifactRef]) -> Iterator[Artifact]:
    """Artifacts that the ledger lacks: these and all that they were made from."""
    wanted = list(refs)
    seen: set[str] = set()
    while wanted:
        level = {ref.uri: ref for ref in wanted if ref.uri not in seen and ref.kind not in LEFT_OUT}
        seen |= level.keys()
        wanted = []
        for uri in level.keys() - _known(db, level).keys():
            artifact = find_artifact(store, level[uri].kind, level[uri].key)
            if artifact is None:  # deleted
                continue
            yield artifact
            wanted += artifact.manifest.parents.values()
            sibling, told_by = SIBLINGS.get(artifact.ref.kind, ("", ""))
            if sibling and (not told_by or told_by in artifact.meta):
                wanted.append(artifact.ref.model_copy(update={"kind": sibling}))
