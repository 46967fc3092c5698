"""The tasks that a policy was trained on, itself or through the policies that its training started from."""

from __future__ import annotations

from contracts.artifacts import ArtifactRef
from contracts.store import Store
from ops.ledger.index import update
from ops.ledger.segments import Ledger
from resources.refs import note

_TRAINED = """
WITH RECURSIVE made AS (
    SELECT uri FROM artifacts WHERE digest = $policy AND kind = 'checkpoint' UNION
    SELECT parent FROM edges JOIN made ON child = uri
    WHERE uri LIKE 'artifacts/checkpoint/%'
        AND (parent LIKE 'artifacts/checkpoint/%' OR parent LIKE 'artifacts/dataset/%')
)
SELECT DISTINCT task_id, image_digest FROM members m JOIN episodes USING (episode_id)
WHERE kept AND m.home IN (SELECT uri FROM made)
"""


def trained_tasks(store: Store, policy: ArtifactRef) -> set[tuple[str, str]]:
    """(task id, digest of the files that it starts from) of every task with an episode that trained the policy, or one
    of equal weights.

    Demonstrations of a warm start are not among them. Updates the ledger first.
    """
    note(store, policy)  # a training without Dagster notes nothing
    update(store)
    with Ledger(store).opened() as (db, _):
        return set(db.sql(_TRAINED, params={"policy": policy.digest}).fetchall())
