"""Keys, partitions and labels shared by all assets of an experiment."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dagster as dg

from ops.graph import graph_of, pool_of
from ops.pod_tags import pod_tags
from ops.retries import bounded, step_retries
from ops.spec import StepSpec
from resources.errors import CheckFailed
from resources.experiment import Experiment
from resources.ref_io import REF

# Each partitioned check, and each reference to source code, would print one whenever definitions are loaded.
warnings.filterwarnings("ignore", "Specifying a partitions_def on an AssetCheckSpec", dg.PreviewWarning)
warnings.filterwarnings("ignore", ".*CodeReference", dg.BetaWarning)

OWNERS = ["team:triplane"]
SETTINGS_DIGITS = 12
"""Digits of the settings' digest in a code version."""


def key_of(experiment: Experiment, asset: str) -> dg.AssetKey:
    """Asset key, e.g. quickstart/rollouts."""
    return dg.AssetKey([experiment.name, asset])


def partitions_of(experiment: Experiment) -> dg.DynamicPartitionsDefinition:
    """Partitions definition of an experiment: 0000, 0001, ..."""
    return dg.DynamicPartitionsDefinition(name=experiment.name)


def inputs_of(experiment: Experiment, spec: StepSpec) -> dict[str, dg.AssetIn]:
    """Asset inputs with the names of the assets they come from."""
    return {asset: dg.AssetIn(key=key_of(experiment, asset), dagster_type=REF) for asset in spec.upstream}


def tags_of(spec: StepSpec) -> dict[str, str]:
    """Tags by which the asset catalog can be filtered."""
    return {"plane": spec.plane} if spec.plane else {}


def declared(experiment: Experiment, name: str) -> StepSpec:
    """Declaration of a step in an experiment, by name."""
    return next(spec for spec in graph_of(experiment) if spec.name == name)


def code_version(experiment: Experiment, spec: StepSpec) -> str:
    """Version of a step's code and settings: Dagster shows the assets as stale whose action keys would change."""
    return f"{spec.version}-{spec.settings_digest(experiment)[:SETTINGS_DIGITS]}"


def source_of(function: Callable[..., Any]) -> dict[str, dg.CodeReferencesMetadataValue]:
    """Metadata by which the UI links an asset to the function that defines it."""
    code = function.__code__
    place = dg.LocalFileCodeReference(file_path=code.co_filename, line_number=code.co_firstlineno)
    return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[place])}


def define(
    experiment: Experiment,
    spec: StepSpec,
    *,
    kinds: set[str],
    description: str,
    checks: Sequence[dg.AssetCheckSpec] = (),
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Decorate the function that makes the asset of a step.

    The function receives the references of the upstream assets as keyword arguments.
    """

    blocking = {each.name for each in checks if each.blocking}

    def decorate(function: Callable[..., Any]) -> dg.AssetsDefinition:
        return dg.asset(
            key=key_of(experiment, spec.name),
            group_name=experiment.name,
            owners=OWNERS,
            kinds=kinds,
            tags=tags_of(spec),
            metadata=source_of(function),
            op_tags=pod_tags(experiment),
            retry_policy=step_retries(),
            description=description,
            code_version=code_version(experiment, spec),
            partitions_def=None if spec.once else partitions_of(experiment),
            ins=inputs_of(experiment, spec),
            check_specs=checks,
            dagster_type=REF,
            pool=pool_of(experiment, spec.name),
        )(bounded(_refusing(function, key_of(experiment, spec.name), blocking) if blocking else function))

    return decorate


def _refusing(function: Callable[..., Any], key: dg.AssetKey, blocking: set[str]) -> Callable[..., Any]:
    """The function, which raises CheckFailed if a blocking check fails. Dagster itself records the asset's reference
    first, so that later steps would use the asset.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Iterator[Any]:
        made = function(*args, **kwargs)
        failed = [each for each in made.check_results if not each.passed and each.check_name in blocking]
        if failed:
            yield from made.check_results  # shown in the UI
            facts = ", ".join(f"{name} {value.value}" for each in failed for name, value in each.metadata.items())
            names = ", ".join(str(each.check_name) for each in failed)
            raise CheckFailed(f"{key.to_user_string()} fails its check {names}: {facts}")
        yield made

    return checked


def check(experiment: Experiment, spec: StepSpec, name: str, description: str, *, blocking: bool) -> dg.AssetCheckSpec:
    """Declaration of a check of an asset, with the asset's partitions.

    blocking: fails the run, so use it for corrupt data only.
    """
    return dg.AssetCheckSpec(
        name,
        asset=key_of(experiment, spec.name),
        description=description,
        blocking=blocking,
        partitions_def=None if spec.once else partitions_of(experiment),
    )
