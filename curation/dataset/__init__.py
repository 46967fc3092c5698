"""The dataset: which sequences of an iteration train, and why each other episode does not.

    episodes, sequences, rewards ---------------> select --> train.parquet, members.parquet
    evidence of rewards --> ratings --------------^ ^
    tokens of one group --> similarity --> duplicates

In: tables of rollouts and rewards. Out: rows of TRAIN and of MEMBERS. `config` is the experiment's section.
"""

from curation.dataset.config import DatasetConfig
from curation.dataset.ratings import RATINGS, ratings_of
from curation.dataset.select import (
    COUNTED,
    COUNTED_IN_BATCH,
    DATASET_VERSION,
    MEMBERS,
    REASONS,
    TRAIN,
    DatasetReport,
    build_dataset,
    report,
    select_rows,
)

__all__ = [
    "COUNTED",
    "COUNTED_IN_BATCH",
    "DATASET_VERSION",
    "MEMBERS",
    "RATINGS",
    "REASONS",
    "TRAIN",
    "DatasetConfig",
    "DatasetReport",
    "build_dataset",
    "ratings_of",
    "report",
    "select_rows",
]
