"""The checks of the assets: each carries its partition, and turns red, with its reason, for planted bad cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest
from dagster_world import World
from deployment_world import (
    Tensors,
    an_expert_of_zeros,
    doubled_scales,
    good_smoke,
    no_smoke,
    planted_checkpoint,
    saturated_codes,
    stage_of,
)

from contracts.artifacts import Artifact, open_artifact
from contracts.digests import digest_of
from curation.dataset import MEMBERS, select_rows
from ops.checkpoint_check import layout_check
from ops.graph import PER_ITERATION
from ops.health import (
    finite_loss,
    fp8_codes_are_sound,
    infrastructure_held,
    reward_varies,
    sampler_and_trainer_agree,
    tampering_is_rare,
    went_live,
)
from ops.inputs import trainer_state_of
from ops.rewards import _facts
from ops.rollback import plan_rollback, roll_back
from ops.training import training_records
from resources.refs import read_artifact, require_ref
from trainer.config import RlJob
from trainer.rl import train_rl
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


def test_a_healthy_run_has_no_red_check(ran: World) -> None:
    red = {each.check_name: each.metadata.get("why") for each in evaluations(ran) if not each.passed}
    # how many groups of so untrained a policy have equal rewards differs between processors
    assert red.keys() <= {"reward_varies"}, red


def made(world: World, asset: str) -> Artifact:
    found = read_artifact(world.store, world.experiment.name, asset, "0000")
    assert found is not None
    return found


def why(check: dg.AssetCheckResult) -> str:
    return str(check.metadata["why"].value)


def test_a_policy_that_tampers_is_red(ran: World) -> None:
    table = made(ran, "rewards").table("rewards.parquet")
    verdicts = ["tampered"] * 3 + table["verdict"].to_pylist()[3:]
    planted = table.set_column(table.schema.get_field_index("verdict"), "verdict", pa.array(verdicts, pa.string()))
    check = tampering_is_rare(_facts(planted, ran.experiment.rewards), planted.num_rows)
    assert not check.passed and f"3 of {table.num_rows} episodes tampered" in why(check)
    assert tampering_is_rare(_facts(table, ran.experiment.rewards), table.num_rows).passed


def test_a_policy_that_answers_nothing_is_red(ran: World, tmp_path: Path) -> None:
    rollouts, rewards = made(ran, "rollouts"), made(ran, "rewards").table("rewards.parquet")
    nothing = pa.array([0.0] * rewards.num_rows, pa.float32())
    planted = rewards.set_column(rewards.schema.get_field_index("reward"), "reward", nothing)
    pa.parquet.write_table(planted, tmp_path / "rewards.parquet")
    tables = (rollouts.path(f"{name}.parquet") for name in ("episodes", "sequences"))
    _, members = select_rows(*tables, tmp_path / "rewards.parquet", ran.experiment.dataset)
    check = reward_varies(members)
    assert not check.passed and "6 of 6 groups have equal rewards" in why(check)


def test_a_dataset_without_groups_has_no_red_share() -> None:
    assert reward_varies(MEMBERS.empty_table()).passed


def test_many_episodes_lost_to_infrastructure_are_red(ran: World) -> None:
    episodes = made(ran, "rollouts").table("episodes.parquet", columns=["outcome"])
    outcomes = ["infra_error", *episodes["outcome"].to_pylist()[1:]]
    check = infrastructure_held(pa.table({"outcome": outcomes}), dg.AssetKey("rollouts"))
    assert not check.passed and f"1 of {len(outcomes)} episodes were lost" in why(check)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (an_expert_of_zeros, "1 tensor(s) are all zeros, first model.layers.0.mlp.experts.0.down_proj.weight"),
        (doubled_scales, "times those of its parent"),
        (saturated_codes, "of the codes are saturated"),
    ],
)
def test_a_badly_exported_checkpoint_is_red(ran: World, change: Callable[[Tensors], None], reason: str) -> None:
    parent = open_artifact(ran.store, require_ref(ran.store, ran.experiment.name, "base_policy"))
    bad = planted_checkpoint(ran, made(ran, "checkpoint").ref, change)
    assert layout_check(bad).passed, "the layout alone shows nothing"
    check = fp8_codes_are_sound(bad, parent)
    assert not check.passed and reason in why(check)
    assert fp8_codes_are_sound(made(ran, "checkpoint"), parent).passed


def test_training_on_tokens_of_other_weights_is_red(ran: World) -> None:
    start = require_ref(ran.store, ran.experiment.name, "checkpoint", "0001")  # two iterations after the sampler's
    job = RlJob(
        store=ran.store.url,
        key=digest_of(["other weights"]),
        seed=1,
        dataset=made(ran, "dataset").ref,
        checkpoint=start,
        trainer_state=trainer_state_of(ran.store, start),
        config=ran.experiment.trainer.rl,
    )
    trained = train_rl(job, ran.store)
    assert trained is not None
    records = training_records(open_artifact(ran.store, trained.checkpoint))
    check = sampler_and_trainer_agree(records)
    assert not check.passed and "not at most 0.01" in why(check)
    assert finite_loss(records).passed


def test_a_loss_that_is_not_finite_is_red() -> None:
    steps = [{"step": 1, "loss": 0.5, "grad_norm": 1.0}, {"step": 2, "loss": float("nan"), "grad_norm": 1.0}]
    check = finite_loss(steps)
    assert not check.passed and "loss of step 2 is nan" in why(check)


def test_a_decision_that_did_not_go_live_is_red_with_its_reason(ran: World) -> None:
    stage = stage_of(ran, "shown")
    equal = went_live(stage.decide(stage.base, stage.base, "0000", no_smoke), None)
    assert not equal.passed and equal.severity is dg.AssetCheckSeverity.ERROR and "nothing was learned" in why(equal)
    good = stage.decide(stage.first, stage.base, "0001", good_smoke)
    assert went_live(good, None).passed
    stale = went_live(stage.decide(stage.second, stage.base, "0002", no_smoke), None)
    assert not stale.passed and stale.severity is dg.AssetCheckSeverity.WARN and "is not live any more" in why(stale)
    roll_back(ran.store, stage.experiment, plan_rollback(ran.store, "shown", None), "it cheats")
    undone = went_live(good, stage.registry.rolled_back()[stage.first.digest])
    assert not undone.passed and "it cheats" in why(undone)
