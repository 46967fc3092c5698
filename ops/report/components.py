"""Read the evidence for each reward component of an episode."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from contracts.artifacts import Artifact
from curation.rewards.tables import EVIDENCE_FILE
from ops.report.history import finite

MAX_REASON, MAX_ANSWER = 600, 1_200
"""Maximum characters of one reason and of one answer of a judge."""
MAX_ANSWERS = 4
"""Maximum answers per component."""


def read_evidence(rewards: Artifact | None, episodes: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Evidence of these episodes by episode id; empty without components."""
    if rewards is None or EVIDENCE_FILE not in rewards.names():
        return {}
    table = rewards.table(EVIDENCE_FILE)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in table.filter(pc.is_in(table["episode_id"], pa.array(sorted(episodes), pa.string()))).to_pylist():
        shown = {
            "name": row["component"],
            "value": finite(row["value"]),
            "reason": row["reason"][:MAX_REASON],
            "answers": [answer[:MAX_ANSWER] for answer in row["answers"][:MAX_ANSWERS]],
        }
        found.setdefault(row["episode_id"], []).append(shown)
    return found
