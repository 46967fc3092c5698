"""Supervised training: determinism, resumption after a kill, and the stopping criterion."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from trainer_world import World, make_world

from contracts.artifacts import ArtifactWriter, find_artifact, list_artifacts, open_artifact
from contracts.checkpoints import WEIGHTS
from contracts.digests import digest_of
from trainer.config import SftConfig, SftJob
from trainer.errors import TrainingDataError, TrainingStopped
from trainer.export import load_checkpoint
from trainer.metrics import Record
from trainer.order import batch_members
from trainer.parameters import Parameters
from trainer.result import TrainResult
from trainer.run import run_job
from trainer.sft import Look
from trainer.state import load_state


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


def test_adamw_trains_beside_a_muon_of_rate_0(world: World) -> None:
    still, moving = (world.sft_job(f"rate-{rate}", learning_rate=0.0, adamw_learning_rate=rate) for rate in (0, 3e-3))
    before, after = (run_job(each) for each in (still, moving))
    assert before is not None and after is not None
    weights = [load_file(open_artifact(world.store, each.checkpoint).path(WEIGHTS)) for each in (before, after)]
    changed = {name for name, tensor in weights[0].items() if not torch.equal(tensor.float(), weights[1][name].float())}
    assert changed == {name for name in weights[0] if "_proj." not in name}


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


@pytest.mark.slow
def test_training_stops_on_the_criterion_once_copying_is_learned(world: World) -> None:
    job = world.sft_job(
        max_steps=400, evaluate_every=10, snapshot_every=1000, expected_solve=0.9, expected_form=0.9, consecutive=2
    )
    result = run_job(job)
    assert result.metrics["converged"] is True
    assert 20 <= result.metrics["step"] < 400
    assert result.metrics["expected_solve"] >= 0.9


EASY = {"expected_solve": 1e-9, "expected_form": 1e-9, "evaluate_every": 3, "consecutive": 1}


@pytest.mark.parametrize(("max_steps", "averaged"), [(100, [4, 5, 6, 7]), (5, [4, 5])])
def test_the_mean_weights_of_the_last_steps_are_published(
    world: World, monkeypatch: pytest.MonkeyPatch, max_steps: int, averaged: list[int]
) -> None:
    seen: list[dict[str, torch.Tensor]] = []  # masters at the start and after each optimizer step
    requantize = Parameters.requantize

    def recorded(self: Parameters) -> None:
        seen.append({name: master.clone() for name, master in self.masters()})
        requantize(self)

    monkeypatch.setattr(Parameters, "requantize", recorded)
    result = run_job(world.sft_job(**EASY, max_steps=max_steps, average_steps=4, warmup_steps=0))
    monkeypatch.undo()
    assert (result.metrics["converged"], result.metrics["step"]) == (True, averaged[-1])
    folder = open_artifact(world.store, result.checkpoint).directory()
    served = load_checkpoint(folder)
    state = load_state(open_artifact(world.store, result.trainer_state), served.config)
    last = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(state.masters[last], seen[averaged[-1]][last])
    for name, found in state.masters.items():
        mean = torch.stack([seen[step][name].double() for step in averaged]).mean(0)
        torch.testing.assert_close(found.double(), mean, rtol=1e-6, atol=1e-8)
    again = Parameters.from_masters(served.config, state.masters)
    pairs = zip(again.buffers, served.buffers, strict=True)
    assert all(torch.equal(ours.leaf, theirs.leaf) for ours, theirs in pairs)


@pytest.mark.slow
def test_a_job_killed_while_it_averages_resumes_bit_for_bit(world: World) -> None:
    settings = {**EASY, "max_steps": 100, "average_steps": 4}

    def kill(record: Record) -> None:
        if record["step"] == 6:
            raise TrainingStopped(9)

    with pytest.raises(TrainingStopped):
        run_job(world.sft_job("killed", **settings), [kill])
    resumed = run_job(world.sft_job("killed", **settings))
    assert digests(resumed) == digests(run_job(world.sft_job("undisturbed", **settings)))


def test_a_criterion_of_1_is_off_even_where_float32_gives_that_probability() -> None:
    perfect = Look(solve=1.0, form=1.0, loss=0.0, episodes=64)
    assert perfect.meets(SftConfig(expected_solve=0.999))
    assert not perfect.meets(SftConfig(expected_solve=1.0))


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
