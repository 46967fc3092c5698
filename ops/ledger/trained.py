"""The tasks that policies were trained on, themselves or through the policies that their training started from."""

from __future__ import annotations

from collections.abc import Iterable

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
        AND regexp_matches(parent, '^artifacts/(checkpoint|dataset|accepted_episodes|chats)/')
)
SELECT DISTINCT task_id, image_digest FROM members m JOIN episodes USING (episode_id)
WHERE kept AND m.home IN (SELECT uri FROM made)
"""


def trained_tasks(store: Store, policies: Iterable[ArtifactRef]) -> dict[str, set[tuple[str, str | None]]]:
    """By digest of the policy, (task id, digest of the files that it starts from) of every task with an episode that
    trained it, or a policy of equal weights. Rows of files of chats name a task without files: None.

    Demonstrations of a warm start are not among them. Updates the ledger first.
    """
    wanted = {policy.digest: policy for policy in policies}
    for policy in wanted.values():
        note(store, policy)  # a training without Dagster notes nothing
    update(store)
    with Ledger(store).opened() as (db, _):
        return {digest: set(db.sql(_TRAINED, params={"policy": digest}).fetchall()) for digest in wanted}
