"""base_policy: the policy that iteration 0 acts with: a warm start on scripted experts, or an imported checkpoint."""

import dagster as dg

from assets.naming import check, declared, define
from ops.base_policy import make_base
from ops.checkpoint_check import CHECK, layout_check
from ops.graph import BASE_POLICY
from ops.results import Materialized, result
from ops.step import begin
from ops.training import training_numbers
from resources.experiment import Experiment
from resources.launcher import LocalLauncher
from resources.progress import ProgressSink
from resources.store import StoreResource


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""
    spec = declared(experiment, BASE_POLICY.name)

    @define(
        experiment,
        spec,
        kinds={"pytorch", "huggingface"},
        description=(
            "An FP8 mixture-of-experts checkpoint that knows the tools, with its tokenizer and demonstrations as"
            " artifacts of their own."
        ),
        checks=[check(experiment, spec, CHECK, "Every tensor that its config.json implies, no more.", blocking=True)],
    )
    def base_policy(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        launcher: LocalLauncher,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:
        policy = make_base(begin(context, experiment, spec, store.open(), progress), launcher)
        return result(policy, training_numbers(policy), [layout_check(policy)])

    return base_policy
