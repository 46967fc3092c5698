"""prompts[i]: the tasks that this iteration samples, and a reserve that replaces groups without variance."""

import dagster as dg

from assets.naming import define
from contracts.artifacts import ArtifactRef
from ops.graph import PROMPTS
from ops.inputs import draw_and_commit
from ops.results import Materialized, markdown_table, numbers, result
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.store import StoreResource

SHOWN = 12
"""Number of listed groups: as many as the page shows without a click."""


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        PROMPTS,
        kinds={"json"},
        description="Tasks drawn without replacement within an epoch; seed and cursor determine the draw.",
    )
    def prompts(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        step = begin(context, experiment, PROMPTS, store.open(), progress, given)
        drawn = draw_and_commit(step)
        groups = drawn.json("prompts.json")["groups"]
        first = [
            {"number": each["index"], "task": each["task_id"], "group": each["group_id"][:12]}
            for each in groups[:SHOWN]
        ]
        metadata = {**numbers(drawn.meta), "first groups": markdown_table(first)}
        return result(drawn, metadata | ({"drawn by": str(step.inputs.replayed)} if step.inputs.replayed else {}))

    return prompts
