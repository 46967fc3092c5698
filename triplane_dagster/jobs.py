"""The two jobs of an experiment: what is made once, and one iteration."""

from __future__ import annotations

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from assets.naming import ONCE, PER_ITERATION, key_of
from resources.experiment import Experiment

EXPERIMENT_TAG = "triplane/experiment"
REMAINING_TAG = "triplane/remaining"
"""How many iterations follow the one that carries it; see `sensors`."""


def base_job_name(experiment: Experiment) -> str:
    """E.g. quickstart_base."""
    return f"{experiment.name}_base"


def iteration_job_name(experiment: Experiment) -> str:
    """E.g. quickstart_iteration."""
    return f"{experiment.name}_iteration"


def _tags(experiment: Experiment) -> dict[str, str]:
    # re-execution from the failed step can end in success with mapped steps missing; committed work is skipped anyway
    return {"dagster/retry_strategy": "ALL_STEPS", EXPERIMENT_TAG: experiment.name}


def base_job(experiment: Experiment) -> UnresolvedAssetJobDefinition:
    """Task suite and base policy."""
    return dg.define_asset_job(
        base_job_name(experiment),
        selection=dg.AssetSelection.assets(*(key_of(experiment, asset) for asset in ONCE)),
        description=f"{experiment.name}: task suite and base policy.",
        tags=_tags(experiment),
    )


def iteration_job(experiment: Experiment) -> UnresolvedAssetJobDefinition:
    """One iteration, from pinned inputs to the decision."""
    return dg.define_asset_job(
        iteration_job_name(experiment),
        selection=dg.AssetSelection.assets(*(key_of(experiment, asset) for asset in PER_ITERATION)),
        description=f"{experiment.name}: one iteration, from pinned inputs to the decision.",
        tags=_tags(experiment),
    )
