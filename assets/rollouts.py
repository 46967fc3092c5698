"""rollouts[i]: plan -> map(shard) -> merge. Every sampled group is kept, with the sampled token ids."""

from typing import Any

import dagster as dg

from assets.naming import OWNERS, check, code_version, inputs_of, key_of, partitions_of, source_of, tags_of
from ops.graph import ROLLOUTS
from ops.health import INFRASTRUCTURE_HELD
from ops.rollouts import CHECK, rollout_ops
from resources.experiment import Experiment


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""
    plan, shard, merge = rollout_ops(experiment)
    prefix = key_of(experiment, ROLLOUTS.name).to_python_identifier()

    @dg.graph_asset(
        key=key_of(experiment, ROLLOUTS.name),
        group_name=experiment.name,
        owners=OWNERS,
        kinds={"parquet"},
        tags=tags_of(ROLLOUTS),
        metadata=source_of(build),
        partitions_def=partitions_of(experiment),
        ins=inputs_of(experiment, ROLLOUTS),
        description="Episodes of the acting policy in sandboxes: episodes, sequences with logprobs, and their costs.",
        code_version=code_version(experiment, ROLLOUTS),
        check_specs=[
            check(experiment, ROLLOUTS, CHECK, "All groups that the plan requires exist.", blocking=True),
            check(
                experiment,
                ROLLOUTS,
                INFRASTRUCTURE_HELD,
                "Infrastructure faults ended few episodes.",
                blocking=False,
            ),
        ],
    )
    def rollouts(iteration_inputs: Any, prompts: Any) -> dict[str, Any]:
        merged, complete, held = merge(plan(iteration_inputs, prompts).map(shard).collect())
        return {"result": merged, f"{prefix}_{CHECK}": complete, f"{prefix}_{INFRASTRUCTURE_HELD}": held}

    return rollouts
