"""Keys, partitions and labels that all assets of an experiment share."""

from __future__ import annotations

from typing import Any

import dagster as dg

from resources.experiment import Experiment
from resources.refs import REF

OWNERS = ["team:triplane"]
ONCE = ("task_suite", "base_policy")
"""Unpartitioned assets."""
PER_ITERATION = (
    "iteration_inputs", "prompts", "rollouts", "rewards", "dataset", "checkpoint", "evaluation", "sampler",
)  # fmt: skip
"""Assets with one partition an iteration, in graph order."""


def key_of(experiment: Experiment, asset: str) -> dg.AssetKey:
    """E.g. quickstart/rollouts."""
    return dg.AssetKey([experiment.name, asset])


def partitions_of(experiment: Experiment) -> dg.DynamicPartitionsDefinition:
    """The iterations of an experiment: 0000, 0001, ..."""
    return dg.DynamicPartitionsDefinition(name=experiment.name)


def inputs_of(experiment: Experiment, *assets: str) -> dict[str, dg.AssetIn]:
    """Inputs called like the assets they come from."""
    return {asset: dg.AssetIn(key=key_of(experiment, asset)) for asset in assets}


def common(experiment: Experiment, asset: str, *kinds: str) -> dict[str, Any]:
    """What every asset definition of an experiment is given."""
    given: dict[str, Any] = {
        "key": key_of(experiment, asset),
        "group_name": experiment.name,
        "owners": OWNERS,
        "kinds": set(kinds),
    }
    return given | ({"partitions_def": partitions_of(experiment)} if asset in PER_ITERATION else {})


def common_asset(experiment: Experiment, asset: str, *kinds: str) -> dict[str, Any]:
    """Like `common`, for assets that are one op."""
    return common(experiment, asset, *kinds) | {"dagster_type": REF}


def check(experiment: Experiment, asset: str, name: str, description: str, *, blocking: bool) -> dg.AssetCheckSpec:
    """A check of an asset. blocking: for corrupt data only, since it fails the run."""
    return dg.AssetCheckSpec(name, asset=key_of(experiment, asset), description=description, blocking=blocking)
