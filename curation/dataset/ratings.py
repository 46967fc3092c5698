"""What the dataset's rules read of judgements: the value of each component, and how far a judge's samples lie apart.

They come from the evidence of rewards, which is outside the rewards' digest: a judge may find other words for the same
score. A dataset whose rules read them has them in its own key (`ops.dataset_inputs`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from contracts.artifacts import Artifact
from curation.errors import RewardsMismatch
from curation.rewards.answers import Answer
from curation.rewards.config import JudgeComponent
from curation.rewards.judges import judge_value, read_judgement
from curation.rewards.tables import EVIDENCE_FILE

RATINGS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("component", pa.string()),
        ("value", pa.float64()),
        ("spread", pa.float64()),
    ]
)
"""One row per scored episode and component. value: clipped, unweighted; null if there is none. spread: largest minus
smallest of a judge's samples, on the scale 0 to 1; null for other components and without a value.
"""


def ratings_of(rewards: Artifact, names: Collection[str]) -> pa.Table:
    """RATINGS of these components, in the order of the evidence.

    Raises RewardsMismatch if the rewards were made without one of them.
    """
    components = {each["name"]: each for each in rewards.manifest.config.get("components", ())}
    for lost in sorted(set(names) - components.keys()):
        raise RewardsMismatch(
            f"{rewards.ref.uri} was made without the component {lost}, which a rule of the dataset names: materialize"
            " rewards of this iteration again"
        )
    rows = [
        {**row, "spread": _spread(components[row["component"]], row)}
        for batch in rewards.batches(EVIDENCE_FILE, ["episode_id", "component", "value", "answers"])
        for row in batch.to_pylist()
        if row["component"] in names
    ]
    return pa.Table.from_pylist(rows, schema=RATINGS)


def _spread(component: dict[str, Any], row: dict[str, Any]) -> float | None:
    if component["kind"] != "judge" or row["value"] is None:
        return None
    judge = JudgeComponent.model_construct(**component)  # recorded without its endpoint, which is in no key
    read = (read_judgement(judge, Answer(text=text, served=""))[0] for text in row["answers"])
    values = [judge_value(judge, [score]) for score in read if score is not None]
    return max(values) - min(values) if values else None
