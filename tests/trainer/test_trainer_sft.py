"""Supervised training: determinism, resumption after a kill, and the stopping criterion."""

from __future__ import annotations

import json

import pytest
from trainer_world import World, make_world

from contracts.artifacts import ArtifactWriter, find_artifact, list_artifacts, open_artifact
from contracts.digests import digest_of
from trainer.config import SftJob
from trainer.errors import TrainingDataError, TrainingStopped
from trainer.metrics import Record
from trainer.result import TrainResult
from trainer.run import run_job
from trainer.sft import batch_members


def digests(result: TrainResult) -> tuple[str, str]:
    return result.checkpoint.digest, result.trainer_state.digest


def test_the_same_job_twice_gives_the_same_digests(world: World) -> None:
    first, second = run_job(world.sft_job("a")), run_job(world.sft_job("b"))
    assert first.checkpoint.key != second.checkpoint.key
    assert digests(first) == digests(second)


def test_another_seed_gives_another_checkpoint(world: World) -> None:
    job = world.sft_job("a")
    other = job.model_copy(update={"key": digest_of("other"), "seed": 2})
    assert run_job(job).checkpoint.digest != run_job(other).checkpoint.digest


def test_committed_job_is_not_run_again(world: World) -> None:
    first = run_job(world.sft_job())

    def fail(record: Record) -> None:
        raise AssertionError("trained again")

    assert digests(run_job(world.sft_job(), [fail])) == digests(first)


@pytest.mark.parametrize("killed_at", [2, 5])
def test_a_killed_job_resumes_from_its_snapshot_bit_for_bit(world: World, killed_at: int) -> None:
    undisturbed = run_job(world.sft_job("undisturbed"))

    def kill(record: Record) -> None:
        if record["step"] == killed_at:
            raise TrainingStopped(9)

    seen: list[Record] = []
    with pytest.raises(TrainingStopped):
        run_job(world.sft_job("killed"), [kill])
    resumed = run_job(world.sft_job("killed"), [seen.append])
    assert digests(resumed) == digests(undisturbed)
    assert seen[0]["step"] == (killed_at - 1) // 2 * 2 + 1
    assert not list(list_artifacts(world.store, "trainer_snapshot"))
    rows = open_artifact(world.store, resumed.checkpoint).path("metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, rows) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_training_stops_on_the_criterion_once_copying_is_learned(world: World) -> None:
    job = world.sft_job(
        max_steps=400, evaluate_every=10, snapshot_every=1000, expected_solve=0.9, expected_form=0.9, consecutive=2
    )
    result = run_job(job)
    assert result.metrics["converged"] is True
    assert 20 <= result.metrics["step"] < 400
    assert result.metrics["expected_solve"] >= 0.9


EASY = {"expected_solve": 1e-9, "expected_form": 1e-9, "evaluate_every": 3, "consecutive": 1}


def rates(world: World, result: TrainResult) -> list[float]:
    rows = open_artifact(world.store, result.checkpoint).path("metrics.jsonl").read_text().splitlines()
    return [row["lr"] for row in map(json.loads, rows) if "lr" in row]


@pytest.mark.parametrize(("max_steps", "factors"), [(100, [1, 1, 1, 1, 0.75, 0.5, 0.25]), (5, [1, 1, 1, 1, 0.5])])
def test_the_learning_rate_falls_to_zero_once_the_criterion_is_met(
    world: World, max_steps: int, factors: list[float]
) -> None:
    result = run_job(world.sft_job(**EASY, max_steps=max_steps, decay_steps=4, warmup_steps=0))
    assert rates(world, result) == pytest.approx([3e-3 * factor for factor in factors])
    assert (result.metrics["converged"], result.metrics["step"]) == (True, len(factors))


def test_a_job_killed_while_its_rate_falls_resumes_bit_for_bit(world: World) -> None:
    settings = {**EASY, "max_steps": 100, "decay_steps": 4}

    def kill(record: Record) -> None:
        if record["step"] == 6:
            raise TrainingStopped(9)

    with pytest.raises(TrainingStopped):
        run_job(world.sft_job("killed", **settings), [kill])
    resumed = run_job(world.sft_job("killed", **settings))
    assert digests(resumed) == digests(run_job(world.sft_job("undisturbed", **settings)))


def test_the_bound_on_steps_is_reported(world: World) -> None:
    seen: list[Record] = []
    result = run_job(world.sft_job(), [seen.append])
    assert result.metrics["converged"] is False
    assert any("max_steps 6" in str(record.get("warning")) for record in seen)


def test_an_epoch_shows_every_demonstration_once() -> None:
    first = [row for step in range(5) for row in batch_members(20, 4, 7, step)]
    second = [row for step in range(5, 10) for row in batch_members(20, 4, 7, step)]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_tokens_of_another_tokenizer_are_refused(world: World) -> None:
    table = world.demonstrations.table("train.parquet")
    rows = table.to_pylist()
    rows[3]["token_ids"][0] = 5000
    with ArtifactWriter(world.store, "demonstrations", "0" * 64, parents={}, config={}, code_version="1") as out:
        out.add_table("train.parquet", type(table).from_pylist(rows, schema=table.schema))
        out.add_table("validation.parquet", world.demonstrations.table("validation.parquet"))
        bad = out.commit()
    job: SftJob = world.sft_job().model_copy(update={"demonstrations": bad.ref})
    with pytest.raises(TrainingDataError, match="row 3 has a token id outside"):
        run_job(job)
    assert find_artifact(world.store, "checkpoint", job.key) is None


def test_result_does_not_depend_on_the_store(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = make_world(tmp_path_factory.mktemp("elsewhere"))
    assert digests(run_job(world.sft_job())) == digests(run_job(elsewhere.sft_job()))
