"""base_policy: the policy that iteration 0 acts with: a warm start on scripted experts, or an imported checkpoint."""

import dagster as dg

from assets.naming import check, define
from ops.base import make_base
from ops.checkpoint_check import CHECK, layout_check
from ops.keys import base_version
from ops.results import Materialized, result
from ops.step import begin
from ops.training import training_numbers
from resources.experiment import Experiment
from resources.launcher import LocalLauncher
from resources.progress import ProgressSink
from resources.store import StoreResource

NAME = "base_policy"


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        NAME,
        kinds={"pytorch", "huggingface"},
        description=(
            "An FP8 mixture-of-experts checkpoint that knows the tools, with its tokenizer and demonstrations as"
            " artifacts of their own."
        ),
        code_version=base_version(experiment),
        checks=[check(experiment, NAME, CHECK, "Every tensor that its config.json implies, no more.", blocking=True)],
    )
    def base_policy(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        launcher: LocalLauncher,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Materialized:
        policy = make_base(begin(context, experiment, NAME, store.open(), progress), launcher)
        return result(policy, training_numbers(policy), [layout_check(policy)])

    return base_policy
