"""base_policy: the acting policy of iteration 0, an imported checkpoint or one that supervised training made."""

import dagster as dg

from assets.naming import check, declared, define
from ops.base_graph import BASE_POLICY
from ops.base_policy import make_base
from ops.checkpoint_check import CHECK, layout_check
from ops.mixture import mixture_numbers
from ops.results import Materialized, result
from ops.step import begin
from ops.training import training_logs, training_numbers
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.store import StoreResource
from resources.training_launcher import TrainingLauncher


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""
    spec = declared(experiment, BASE_POLICY.name)

    @define(
        experiment,
        spec,
        kinds={"pytorch", "huggingface"},
        description=(
            "An FP8 mixture-of-experts checkpoint that calls tools; tokenizer and demonstrations are"
            " separate artifacts."
        ),
        checks=[
            check(
                experiment,
                spec,
                CHECK,
                "The checkpoint has exactly the tensors that its config.json implies.",
                blocking=True,
            )
        ],
    )
    def base_policy(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        launcher: TrainingLauncher,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:
        step = begin(context, experiment, spec, store.open(), progress)
        policy = make_base(step, launcher)
        source = {"forked from": str(experiment.fork)} if experiment.fork else {}
        return result(
            policy,
            {
                **training_numbers(policy),
                **mixture_numbers(step.store, policy),
                **training_logs(step.store, policy.ref),
                **source,
            },
            [layout_check(policy)],
        )

    return base_policy
