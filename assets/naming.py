"""Keys, partitions and labels shared by all assets of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg

from resources.experiment import Experiment
from resources.ref_io import REF

OWNERS = ["team:triplane"]
ONCE = ("task_suite", "base_policy")
"""Unpartitioned assets."""
PER_ITERATION = (
    "iteration_inputs",
    "prompts",
    "rollouts",
    "rewards",
    "dataset",
    "checkpoint",
    "evaluation",
    "sampler",
    "report",
)
"""Assets with one partition an iteration, in graph order."""
PLANES = {
    "task_suite": "curation",
    "base_policy": "trainer",
    "rollouts": "inference",
    "rewards": "curation",
    "dataset": "curation",
    "checkpoint": "trainer",
    "evaluation": "inference",
    "sampler": "inference",
}
"""The plane that does an asset's work; assets that only join planes are absent."""


def key_of(experiment: Experiment, asset: str) -> dg.AssetKey:
    """Asset key, e.g. quickstart/rollouts."""
    return dg.AssetKey([experiment.name, asset])


def partitions_of(experiment: Experiment) -> dg.DynamicPartitionsDefinition:
    """Partitions definition of an experiment: 0000, 0001, ..."""
    return dg.DynamicPartitionsDefinition(name=experiment.name)


def inputs_of(experiment: Experiment, *assets: str) -> dict[str, dg.AssetIn]:
    """Asset inputs with the names of the assets they come from."""
    return {asset: dg.AssetIn(key=key_of(experiment, asset)) for asset in assets}


def tags_of(asset: str) -> dict[str, str]:
    """Tags by which the asset catalog can be filtered."""
    return {"plane": PLANES[asset]} if asset in PLANES else {}


def define(
    experiment: Experiment,
    asset: str,
    *,
    kinds: set[str],
    description: str,
    code_version: str,
    ins: Sequence[str] = (),
    checks: Sequence[dg.AssetCheckSpec] = (),
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Decorate the function that makes an asset.

    ins: the assets whose references it is given, under their names.
    """
    return dg.asset(
        key=key_of(experiment, asset),
        group_name=experiment.name,
        owners=OWNERS,
        kinds=kinds,
        tags=tags_of(asset),
        description=description,
        code_version=code_version,
        partitions_def=partitions_of(experiment) if asset in PER_ITERATION else None,
        ins=inputs_of(experiment, *ins),
        check_specs=checks,
        dagster_type=REF,
    )


def check(experiment: Experiment, asset: str, name: str, description: str, *, blocking: bool) -> dg.AssetCheckSpec:
    """Decorate a check of an asset. blocking: only for corrupt data, since it fails the run."""
    return dg.AssetCheckSpec(name, asset=key_of(experiment, asset), description=description, blocking=blocking)
