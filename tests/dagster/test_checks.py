"""What the checks of the assets show."""

from __future__ import annotations

import dagster as dg
from dagster_world import World

from ops.graph import PER_ITERATION
from triplane_dagster.assembly import definitions_for


def evaluations(world: World) -> list[dg.AssetCheckEvaluation]:
    found = []
    for run in world.instance.get_runs():
        for entry in world.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION):
            found.append(entry.get_dagster_event().asset_check_evaluation_data)
    return found


def test_every_check_of_an_iteration_carries_its_partition(ran: World) -> None:
    graph = definitions_for([ran.experiment]).resolve_asset_graph()
    wanted = {
        (key.asset_key.path[1], key.name, partition)
        for key in graph.asset_check_keys
        for partition in (ran.made if key.asset_key.path[1] in PER_ITERATION else [None])
    }
    assert {(each.asset_key.path[1], each.check_name, each.partition) for each in evaluations(ran)} == wanted
