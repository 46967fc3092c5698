"""iteration_inputs[i]: inputs of an iteration, written once. They connect iteration i with i-1 through the live
pointer.
"""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from assets.naming import define
from contracts.artifacts import ArtifactRef
from ops.inputs import pin_inputs, read_inputs
from ops.keys import INPUTS_VERSION
from ops.results import Materialized, link, result
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.registry import Registry
from resources.store import StoreResource

NAME = "iteration_inputs"


class StartFrom(dg.Config):
    """Run configuration of iteration_inputs."""

    policy: str = Field(
        default="live",
        description=(
            "live, base, or the beginning of a checkpoint's digest. Counts only when the iteration begins: a re-run"
            " reads what was pinned."
        ),
    )


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        NAME,
        kinds={"json"},
        ins=["task_suite", "base_policy"],
        description=(
            "By digest: the acting policy, what training starts from, suite, base and prompt cursor. Written once, then"
            " only read."
        ),
        code_version=INPUTS_VERSION,
    )
    def iteration_inputs(
        context: dg.AssetExecutionContext,
        config: StartFrom,
        task_suite: ArtifactRef,
        base_policy: ArtifactRef,
        store: StoreResource,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:
        step = begin(context, experiment, NAME, store.open(), progress)
        pinned = pin_inputs(step, base_policy, task_suite, config.policy)
        inputs = read_inputs(step.store, pinned.ref)
        live = Registry(step.store, experiment.name).live()
        metadata = {
            "policy": inputs.policy.digest,
            "acts with": "base policy" if inputs.policy == inputs.base else "a trained policy",
            **_restored(pinned.meta),
            "still live": live.policy == inputs.policy if live else inputs.policy == inputs.base,
            "prompt cursor": inputs.cursor,
            "base": link(experiment.name, "base_policy"),
        }
        return result(pinned, metadata)

    return iteration_inputs


def _restored(meta: Mapping[str, Any]) -> dict[str, str]:
    """Note that the acting policy was restored by a rollback, if it was."""
    rollback = meta.get("rollback")
    return {"restored by": f"a rollback (change {rollback['number']}): {rollback['reason']}"} if rollback else {}
