"""iteration_inputs[i]: inputs of an iteration, written once. They connect iteration i with i-1 through the live
pointer.
"""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from assets.naming import define
from contracts.artifacts import ArtifactRef
from ops.graph import ITERATION_INPUTS
from ops.inputs import pin_inputs
from ops.results import Materialized, link, result
from ops.state import read_inputs
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.registry import Registry
from resources.store import StoreResource


class StartFrom(dg.Config):
    """Run configuration of iteration_inputs."""

    policy: str = Field(
        default="live",
        description=(
            "live, base, or the beginning of a checkpoint's digest. Used only"
            " when the iteration begins: a re-run reads the pinned inputs."
        ),
    )


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        ITERATION_INPUTS,
        kinds={"json"},
        description=(
            "References to acting policy, start of training, suite and base, and the prompt cursor. Written once."
        ),
    )
    def iteration_inputs(
        context: dg.AssetExecutionContext,
        config: StartFrom,
        store: StoreResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        step = begin(context, experiment, ITERATION_INPUTS, store.open(), progress, given)
        pinned = pin_inputs(step, config.policy)
        inputs = read_inputs(step.store, pinned.ref)
        live = Registry(step.store, experiment.name).live()
        metadata = {
            "policy": inputs.policy.digest,
            "acts with": "base policy" if inputs.policy == inputs.base else "a trained policy",
            **_restored(pinned.meta),
            "still live": live.policy == inputs.policy if live else inputs.policy == inputs.base,
            "training starts from": "the acting policy" if inputs.start else "what is live then (sampled ahead)",
            "prompt cursor": inputs.cursor,
            **({"tasks selected by difficulty": inputs.difficulty.digest} if inputs.difficulty else {}),
            **({"continues": inputs.carried_over[0].digest} if inputs.carried_over else {}),
            **_forked(pinned.meta),
            "base": link(experiment.name, "base_policy"),
        }
        return result(pinned, metadata)

    return iteration_inputs


def _forked(meta: Mapping[str, Any]) -> dict[str, str]:
    """Source of an iteration of a fork that repeats one."""
    return {name.replace("_", " "): meta[name] for name in ("forked_from", "sampled_by") if name in meta}


def _restored(meta: Mapping[str, Any]) -> dict[str, str]:
    """Note about the rollback that restored the acting policy, if any."""
    rollback = meta.get("rollback")
    return {"restored by": f"a rollback (change {rollback['number']}): {rollback['reason']}"} if rollback else {}
