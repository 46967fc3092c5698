"""The forecast of memory: its formulas against torch's own tensors, limits of machines, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from trainer_world import World

import trainer.flat
import trainer.head
from contracts.artifacts import ArtifactWriter, find_artifact
from contracts.store import open_store
from contracts.supports import Supports, supports_of
from resources.experiment import load_experiment
from tests.trainer.test_trainer_rl import base, own_dataset
from trainer.data import ScoredSequence, make_batch
from trainer.errors import TrainingConfigError, TrainingMemoryError
from trainer.model import score
from trainer.model_config import ModelConfig
from trainer.parameters import Parameters, draw_masters
from trainer.plan import (
    Batch,
    Limit,
    Workload,
    activations,
    check,
    machine_limits,
    plan_training,
    require_memory,
    torch_backend,
)
from trainer.plan.forecast import BackendKind, batch_of
from trainer.plan.shapes import Shapes
from trainer.plan.tape import HOST
from trainer.run import run_job

GROUPED = ModelConfig(
    hidden_size=256, layers=3, experts=4, expert_width=384, experts_per_token=2, heads=8, kv_heads=2, head_dim=64
)
UNTIED = ModelConfig(
    hidden_size=128, layers=1, experts=3, expert_width=256, heads=2, kv_heads=2, head_dim=64, tie_word_embeddings=False
)
DENSE = ModelConfig(family="qwen3", hidden_size=256, layers=2, mlp_width=384, heads=4, kv_heads=2, head_dim=64)


def saved_by_autograd(config: dict[str, object], lengths: list[int], scored: int, supports: Supports | None) -> int:
    """Bytes of all tensors that a forward pass saves, once each, without the weights. supports: of each sequence."""
    parameters = Parameters.from_masters(config, draw_masters(config, 0))
    own = {each.untyped_storage().data_ptr() for each in parameters.leaves.values()}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            held.setdefault(place, tensor)
        return tensor

    sequences = [ScoredSequence(np.zeros(n, np.int64), np.arange(n - scored, n), supports=supports) for n in lengths]
    batch = make_batch(sequences)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        score(parameters.leaves, config, batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@pytest.mark.parametrize("lengths", [[70, 50], [64]])
@pytest.mark.parametrize("model", [GROUPED, UNTIED, DENSE])
@pytest.mark.parametrize("limit", [0, 2**40])
def test_planned_activations_are_those_that_autograd_saves(
    model: ModelConfig, lengths: list[int], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.head, "LARGEST_LOGITS", limit)
    monkeypatch.setattr(activations, "LARGEST_LOGITS", limit)
    config = model.hf_config(1000)
    batch = Batch(sum(lengths), 30 * len(lengths), sequences=len(lengths))
    shape = Shapes.of(config).model
    _, head, _ = activations.head_bytes(shape, batch, cuda=False)
    planned = activations.saved_bytes(shape, batch) + head
    assert planned == pytest.approx(saved_by_autograd(config, lengths, 30, None), rel=0.002)


def test_planned_activations_include_tokens_with_a_support() -> None:
    config = DENSE.hf_config(20_000)
    whole = [None] * 35
    supports = supports_of([*whole, *[np.arange(20_000) % 2 == 0] * 29])  # all scored tokens but the first
    batch = Batch(64, 30, supported=True)
    shape = Shapes.of(config).model
    _, head, _ = activations.head_bytes(shape, batch, cuda=False)
    planned = activations.saved_bytes(shape, batch) + head
    assert planned == pytest.approx(saved_by_autograd(config, [64], 30, supports), rel=0.03)
    assert planned > saved_by_autograd(config, [64], 30, None) * 1.3


def test_planned_weights_are_the_bytes_of_the_trainers_buffers() -> None:
    config = GROUPED.hf_config(1000)
    buffers = Parameters.from_masters(config, draw_masters(config, 0)).buffers
    at_peak = plan_training(Workload(config, Batch(64, 32))).moments["step"]
    assert at_peak["masters"] == sum(each.master.nbytes for each in buffers)
    assert at_peak["gradients"] == sum(each.gradient.nbytes for each in buffers)
    assert at_peak["leaves"] == sum(each.leaf.nbytes for each in buffers if each.codes is not None)
    assert at_peak["codes"] == sum(each.codes.nbytes for each in buffers if each.codes is not None)
    assert at_peak["scales"] == sum(each.scales.nbytes for each in buffers if each.scales is not None)


def test_planner_knows_where_the_trainer_begins_to_tile_logits() -> None:
    assert activations.LARGEST_LOGITS == trainer.head.LARGEST_LOGITS


def test_data_that_is_larger_than_the_memory_is_counted_by_its_rows() -> None:
    assert torch_backend.IN_MEMORY == trainer.flat.IN_MEMORY
    few, many = (
        plan_training(Workload(DENSE.hf_config(1000), Batch(4096, 4096, rows=rows, sequences=2))).at_peak["data"]
        for rows in (100_000, 500_000)  # 0.2 and 1 billion tokens
    )
    assert many - few == 400_000 * torch_backend.ROW


def test_the_forecast_of_supervised_training_follows_its_limits_on_tokens(world: World) -> None:
    def plan(**config: int) -> tuple[int, str]:
        job = world.sft_job(**config)
        found = check._plan_warm_start(job, world.store)
        return found.moments["backward"]["activations"], check._advice(job, found)

    whole, advice = plan(batch_size=2048)
    assert advice.startswith("set base.sft.microbatch_tokens,")
    cut, advice = plan(batch_size=2048, microbatch_tokens=2048)
    assert cut < whole / 5 and advice.startswith("lower base.sft.microbatch_tokens 2048,")
    assert plan(batch_tokens=2048)[0] == pytest.approx(cut, rel=0.05)
    assert plan(batch_size=2048, microbatch_tokens=10**6)[0] == whole


def test_sharded_backends_hold_their_share() -> None:
    config, batch = GROUPED.hf_config(1000), Batch(512, 256)
    shards = {ranks: plan_training(Workload(config, batch, "fsdp2", ranks)).at_peak for ranks in (1, 4)}
    for kind in ("masters", "gradients", "optimizer moments"):
        assert shards[1][kind] == pytest.approx(4 * shards[4][kind], rel=1e-3)
    one, two, three = (
        plan_training(Workload(config, batch, "deepspeed", 4, stage=stage)).moments["step"] for stage in (1, 2, 3)
    )
    assert one["gradients"] == pytest.approx(4 * two["gradients"], rel=1e-3)
    weights = "weights of the forward pass"
    assert one[weights] == two[weights] == pytest.approx(4 * three[weights], rel=1e-3)
    plain, less = (plan_training(Workload(config, batch, "fsdp2", 4, recompute=each)) for each in (False, True))
    assert less.at_peak["activations"] < plain.at_peak["activations"]
    apart = plan_training(Workload(config, batch, "fsdp2", 4, expert_ranks=4))
    assert apart.at_peak["gathered weights"] < plain.at_peak["gathered weights"]
    assert apart.at_peak["masters"] == plain.at_peak["masters"]
    zero = [
        plan_training(Workload(config, batch, "deepspeed", 4, expert_ranks=each)).moments["step"] for each in (1, 4)
    ]
    assert zero[1][weights] < zero[0][weights] and zero[1]["masters"] == zero[0]["masters"]
    with pytest.raises(TrainingConfigError, match=r"expert_ranks 3 does not divide the model's 4 experts"):
        plan_training(Workload(config, batch, "fsdp2", 3, expert_ranks=3))


def test_quickstart_fits_a_small_laptop() -> None:
    from triplane_dagster.memory import plan_experiment

    found = plan_experiment(load_experiment(Path(__file__).parents[2] / "experiments" / "quickstart.yaml"))
    require_memory(found.training, "", limits=[Limit("a laptop", 10**9)])


@pytest.mark.parametrize(
    ("line", "limit", "usage"),
    [
        ("0::/a/b", "memory.max", "memory.current"),
        ("4:memory:/a/b", "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_limits_of_control_groups_above_the_process_count(tmp_path: Path, line: str, limit: str, usage: str) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"7:cpu:/elsewhere\n{line}\n")
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 2000000 kB\nSwapFree: 500000 kB\n")
    root = groups / Path(limit).parent
    for folder, most in ((root / "a", "1000000000"), (root / "a" / "b", "max")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / Path(limit).name).write_text(most)
        (folder / Path(usage).name).write_text("600000000")
        (folder / "memory.stat").write_text("inactive_file 100000000\ntotal_inactive_file 100000000\n")
    found = {each.name: each.free for each in machine_limits(proc, groups)}
    assert found == {f"the control group {root / 'a'}": 500_000_000, "this machine": 2_500_000 * 1024}


def test_machine_without_known_limits_refuses_nothing(tmp_path: Path) -> None:
    assert machine_limits(tmp_path, tmp_path) == []
    require_memory(plan_training(Workload(GROUPED.hf_config(1000), Batch(10**9, 10**9))), "", limits=[])


def test_refusal_names_largest_kinds_limit_and_fix() -> None:
    plan = plan_training(Workload(GROUPED.hf_config(1000), Batch(40_000, 20_000)))
    tight = Limit("the control group /x", int(plan.peak * 0.85))
    with pytest.raises(TrainingMemoryError) as caught:
        require_memory(plan, "lower trainer.microbatch_tokens 40000", limits=[tight])
    words = str(caught.value)
    assert "activations" in words and "the control group /x leaves" in words and "\n" not in words
    assert "lower trainer.microbatch_tokens 40000" in words and "triplane plan" in words
    require_memory(plan, "", limits=[Limit("enough", int(plan.peak * 0.95))])
    with pytest.raises(TrainingMemoryError, match="4 ranks of"):
        require_memory(plan, "", local_ranks=4, limits=[Limit("enough for one", 2 * plan.peak)])


def test_job_that_can_not_fit_is_refused_before_it_publishes_anything(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = base(world)
    job = world.rl_job("large", own_dataset(world, start), start.checkpoint, start.trainer_state)
    monkeypatch.setattr(check, "machine_limits", lambda: [Limit("a watch", 2_000_000)])
    with pytest.raises(TrainingMemoryError, match="a watch leaves 2 MB"):
        run_job(job)
    with pytest.raises(TrainingMemoryError, match="a watch leaves 2 MB"):
        run_job(world.sft_job("large too"))
    assert find_artifact(open_store(job.store), "checkpoint", job.key) is None
    monkeypatch.setattr(check, "machine_limits", lambda: [Limit("a phone", 50_000_000)])
    assert run_job(job) is not None


def test_the_forecast_reads_its_data_piece_by_piece(world: World) -> None:
    rows, length = 8000, 1000
    roles = pa.array(np.resize(np.array([0, 1], np.uint8), rows * length))
    offsets = pa.array(np.arange(0, rows * length + 1, length, dtype=np.int32))
    table = pa.table({name: pa.ListArray.from_arrays(offsets, roles) for name in ("token_ids", "token_role")})
    with ArtifactWriter(world.store, "demonstrations", "d" * 64, parents={}, config={}, code_version="1") as out:
        out.add_table("train.parquet", table)
        made = out.commit()
    usual, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    try:
        check.check_memory(world.sft_job().model_copy(update={"demonstrations": made.ref}), world.store)
    finally:
        pa.set_memory_pool(usual)
    assert 0 < counted.max_memory() < table.nbytes / 2


def test_the_forecast_is_the_same_however_its_data_is_cut() -> None:
    roles = [[0, 1, 1], [0] * 7, [0, 1], [], [0, 2, 1, 1]]
    table = pa.table({"token_role": pa.array(roles, pa.list_(pa.uint8()))})
    found = [batch_of(table.to_batches(max_chunksize=size), 8, ranks=2) for size in (1, 2, 5)]
    assert found == [Batch(tokens=8, scored=3, rows=5, sequences=2)] * 3
    assert batch_of([], 8) == batch_of(table.slice(3, 1).to_batches(), 8) == Batch(0, 0)


@pytest.mark.parametrize("backend", ["torch", "fsdp2", "deepspeed"])
def test_a_plan_for_gpus_leaves_out_what_lies_in_the_hosts_memory(backend: BackendKind) -> None:
    work = Workload(config=GROUPED.hf_config(256), batch=Batch(4096, 1024, rows=64), backend=backend, ranks=2)
    host, gpu = plan_training(work), plan_training(replace(work, cuda=True))
    assert HOST.isdisjoint(kind for held in gpu.moments.values() for kind in held)
    assert not HOST.isdisjoint(kind for held in host.moments.values() for kind in held)
    assert all(size > 0 for held in gpu.moments.values() for size in held.values())
    assert sum(gpu.moments["load"].values()) < sum(host.moments["load"].values())
    for kind in ("masters", "gradients", "optimizer moments"):
        assert gpu.moments["step"][kind] == host.moments["step"][kind]
