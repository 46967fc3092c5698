"""Rollouts that lack groups fail their check before they fail their step: the UI names what is missing. A shard whose
experiment was edited since the plan samples nothing.
"""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest
from dagster_world import World

from assets.naming import check, key_of, partitions_of
from ops.graph import ROLLOUTS
from ops.rollouts import CHECK, make_plan, rollout_ops
from ops.step import begin
from resources.errors import IterationRefused
from resources.progress import no_progress
from resources.ref_io import RefIOManager
from resources.refs import require_ref
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource


def test_missing_groups_fail_the_check(ran: World) -> None:
    experiment = ran.experiment.model_copy(update={"seed": 99})  # nothing is sampled with this seed
    given = {name: require_ref(ran.store, experiment.name, name, "0000") for name in ROLLOUTS.upstream}
    step = begin(dg.build_op_context(partition_key="0000"), experiment, ROLLOUTS, ran.store, no_progress, given)
    planned = make_plan(step).ref.model_dump(mode="json")
    _, _, merge = rollout_ops(experiment)

    @dg.op
    def shards() -> list[dict[str, Any]]:
        return [{"plan": planned, "shard": 0}]

    @dg.graph_asset(
        key=key_of(experiment, ROLLOUTS.name),
        partitions_def=partitions_of(experiment),
        check_specs=[check(experiment, ROLLOUTS, CHECK, "", blocking=True)],
    )
    def rollouts() -> dict[str, Any]:
        merged, checked, _ = merge(shards())
        return {"result": merged, f"{key_of(experiment, ROLLOUTS.name).to_python_identifier()}_{CHECK}": checked}

    store = StoreResource()
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(experiment.name, ["0000"])
        done = dg.materialize(
            [rollouts],
            instance=instance,
            partition_key="0000",
            raise_on_error=False,
            resources={
                "store": store,
                "io_manager": RefIOManager(store=store),
                "progress": dg.ResourceDefinition.hardcoded_resource(no_progress),
            },
        )
        assert not done.success
        (found,) = done.get_asset_check_evaluations()
    assert not found.passed
    assert found.description is not None and "groups are lacking: " in found.description
    assert found.metadata["expected"].value == len(found.metadata["lacking"].value) == experiment.prompts.groups  # type: ignore[arg-type]


def test_a_shard_of_an_experiment_that_was_edited_since_the_plan_samples_nothing(ran: World) -> None:
    planned = ran.experiment.model_copy(update={"seed": 98})  # nothing is sampled with this seed
    given = {name: require_ref(ran.store, planned.name, name, "0000") for name in ROLLOUTS.upstream}
    step = begin(dg.build_op_context(partition_key="0000"), planned, ROLLOUTS, ran.store, no_progress, given)
    plan = make_plan(step).ref.model_dump(mode="json")
    limits = planned.sandboxes.limits.model_copy(update={"memory_mb": 2 * planned.sandboxes.limits.memory_mb})
    edited = planned.model_copy(update={"sandboxes": planned.sandboxes.model_copy(update={"limits": limits})})
    _, shard, _ = rollout_ops(edited)

    @dg.op
    def part() -> dict[str, Any]:
        return {"plan": plan, "shard": 0}

    @dg.job(
        resource_defs={
            "store": StoreResource().get_resource_definition(),
            "sampler": SamplerResource().get_resource_definition(),
            "sandboxes": SandboxesResource().get_resource_definition(),
            "progress": dg.ResourceDefinition.hardcoded_resource(no_progress),
        }
    )
    def job() -> None:
        shard(part())

    with pytest.raises(IterationRefused, match=r"sandboxes\.limits\.memory_mb is .*tiny was edited"):
        job.execute_in_process(tags={"dagster/partition": "0000"})
