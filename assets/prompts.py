"""prompts[i]: the tasks this iteration samples, and a reserve for groups that show no variance."""

import dagster as dg

from assets.naming import define
from contracts.artifacts import ArtifactRef
from ops.inputs import draw_and_commit
from ops.keys import PROMPTS_VERSION
from ops.results import Materialized, markdown_table, numbers, result
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.store import StoreResource

NAME = "prompts"
SHOWN = 12
"""Groups listed: what the page shows without a click."""


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        NAME,
        kinds={"json"},
        ins=["iteration_inputs"],
        description="Tasks drawn without replacement within an epoch, deterministic by seed and cursor.",
        code_version=PROMPTS_VERSION,
    )
    def prompts(
        context: dg.AssetExecutionContext,
        iteration_inputs: ArtifactRef,
        store: StoreResource,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:
        drawn = draw_and_commit(begin(context, experiment, NAME, store.open(), progress), iteration_inputs)
        groups = drawn.json("prompts.json")["groups"]
        first = [
            {"number": each["index"], "task": each["task_id"], "group": each["group_id"][:12]}
            for each in groups[:SHOWN]
        ]
        return result(drawn, {**numbers(drawn.meta), "first groups": markdown_table(first)})

    return prompts
