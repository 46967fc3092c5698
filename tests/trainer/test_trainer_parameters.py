"""Masters, codes and what the forward pass sees of them; states that survive the store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainer_world import TINY, World
from triplane_kernels.blockwise import fake_quantize_blockwise

from contracts.artifacts import open_artifact
from contracts.checkpoints import WEIGHTS, expected_tensors
from trainer.data import ScoredSequence, cut_by_tokens, make_batch
from trainer.errors import TrainingDataError
from trainer.export import checkpoint_tensors, load_checkpoint
from trainer.model import score
from trainer.optimizers import AdamW, Muon, MuonWithAdamW, Optimizer, orthogonalize
from trainer.parameters import Parameters, draw_masters
from trainer.run import run_job
from trainer.state import capture_state, load_state, publish_state

CONFIG = TINY.hf_config(50)


def parameters(seed: int = 0) -> Parameters:
    return Parameters.from_masters(CONFIG, draw_masters(CONFIG, seed))


def sequences(*lengths: int) -> list[ScoredSequence]:
    draw = torch.Generator().manual_seed(1)
    return [
        ScoredSequence(torch.randint(0, 50, (length,), generator=draw).numpy(), torch.arange(1, length).numpy())
        for length in lengths
    ]


def logprobs(weights: Parameters, *lengths: int) -> Tensor:
    return score(weights.leaves, CONFIG, make_batch(sequences(*lengths))).logprobs


@torch.no_grad()
def test_moving_masters_without_changing_a_code_leaves_the_loss_bit_identical() -> None:
    weights = parameters()
    before, codes = logprobs(weights, 9), checkpoint_tensors(weights)
    moved = 0
    for buffer in weights.buffers:
        if buffer.codes is None:
            continue
        candidate = buffer.master * (1 + 1e-3)
        small = buffer.leaf.abs() < 0.9 * buffer.leaf.abs().amax(dim=(1, 2), keepdim=True)
        scales = buffer.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        stays = (candidate / scales).to(torch.float8_e4m3fn).float() == buffer.codes.float()
        buffer.master.copy_(torch.where(small & stays, candidate, buffer.master))
        moved += int((small & stays).sum())
    weights.requantize()
    assert moved > 1000
    assert all(torch.equal(codes[name], tensor) for name, tensor in checkpoint_tensors(weights).items())
    assert torch.equal(logprobs(weights, 9), before)


@torch.no_grad()
def test_a_codes_change_reaches_the_logprobs() -> None:
    weights = parameters()
    before = logprobs(weights, 9)
    buffer = next(buffer for buffer in weights.buffers if buffer.codes is not None)
    buffer.master[0, 0, 0] += 0.05
    weights.requantize()
    assert not torch.equal(logprobs(weights, 9), before)


def test_gradients_pass_straight_through_quantization() -> None:
    weights = parameters()
    name = "model.layers.0.self_attn.q_proj.weight"
    logprobs(weights, 9).sum().backward()
    master = dict(weights.masters())[name].clone().requires_grad_()
    leaves = {**weights.leaves, name: fake_quantize_blockwise(master)}
    score(leaves, CONFIG, make_batch(sequences(9))).logprobs.sum().backward()
    assert torch.equal(master.grad, weights.leaves[name].grad)


@torch.no_grad()
def test_neighbours_in_a_batch_do_not_change_a_sequence() -> None:
    weights, members = parameters(), sequences(5, 30, 2, 9)
    together = score(weights.leaves, CONFIG, make_batch(members)).logprobs
    alone = [score(weights.leaves, CONFIG, make_batch([member])).logprobs for member in members]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=0)


def test_export_has_the_layout_of_the_contract_and_loads_back_exactly(world: World) -> None:
    weights = parameters()
    tensors = checkpoint_tensors(weights)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {name: shape for name, (_, shape) in expected_tensors(CONFIG).items()}
    directory = run_job(world.sft_job()).checkpoint
    loaded = load_checkpoint(open_artifact(world.store, directory).directory())
    stored = open_artifact(world.store, directory).path("model.safetensors")
    again = checkpoint_tensors(loaded)
    assert all(
        torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in load_file(stored).items()
    )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_resumed_from_a_state_equals_training_in_one_go(world: World, kind: str) -> None:
    def optimizer(weights: Parameters) -> Optimizer:
        return AdamW(weights.buffers, 0.9, 0.95) if kind == "adamw" else MuonWithAdamW(weights, 1.0)

    def train(weights: Parameters, rule: Optimizer, steps: range) -> None:
        for step in steps:
            weights.clear_gradients()
            (-logprobs(weights, 9, 9 + step).mean()).backward()
            rule.step(1e-3)
            weights.requantize()

    whole = parameters()
    train(whole, optimizer(whole), range(6))
    half = parameters()
    rule = optimizer(half)
    train(half, rule, range(3))
    state = capture_state(half, rule.state(), "adamw", 3, {})
    saved = publish_state(world.store, "trainer_state", "a" * 64, state, parents={}, config={}, code_version="1")
    loaded = load_state(saved, CONFIG)
    rest = Parameters.from_masters(CONFIG, loaded.masters)
    rule = optimizer(rest)
    rule.load(loaded.optimizer)
    train(rest, rule, range(3, 6))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole.masters(), rest.masters(), strict=True))
    with pytest.raises(TrainingDataError, match="does not fit"):
        load_state(saved, TINY.hf_config(51))


def test_muon_updates_are_nearly_orthogonal_per_matrix() -> None:
    draw = torch.Generator().manual_seed(0)
    matrices = torch.randn(5, 48, 64, generator=draw) * torch.tensor([1e-3, 1, 10, 1e3, 1]).view(-1, 1, 1)
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert float(values.min()) > 0.4 and float(values.max()) < 1.4
    wide = orthogonalize(matrices[:1].mT)
    torch.testing.assert_close(wide, orthogonalize(matrices[:1]).mT)
    weights = parameters()
    Muon([buffer for buffer in weights.buffers if buffer.codes is not None]).step(1e-3)
    assert all(bool(torch.isfinite(tensor).all()) for _, tensor in weights.masters())


def test_microbatches_hold_every_sequence_once_and_respect_their_bound() -> None:
    lengths = (5, 30, 7, 22, 65, 12, 64)
    parts = cut_by_tokens(sequences(*lengths), 64)
    assert [sum(lengths[index] for index in part) for part in parts] == [64, 65, 12, 64]
    assert [index for part in parts for index in part] == list(range(len(lengths)))


def test_adamw_equals_torchs() -> None:
    ours = parameters()
    rule = AdamW(ours.buffers, 0.9, 0.95, weight_decay=0.1)
    theirs = [buffer.master.clone().requires_grad_() for buffer in ours.buffers]
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        for buffer, handle in zip(ours.buffers, theirs, strict=True):
            buffer.gradient.normal_(generator=draw)
            handle.grad = buffer.gradient.clone()
        rule.step(1e-2)
        reference.step()
    for buffer, handle in zip(ours.buffers, theirs, strict=True):
        torch.testing.assert_close(buffer.master, handle.detach(), atol=1e-6, rtol=1e-5)


def test_a_checkpoint_whose_codes_were_changed_is_run_as_it_is(world: World, tmp_path: Path) -> None:
    directory = open_artifact(world.store, run_job(world.sft_job()).checkpoint).directory()
    tensors = load_file(directory / WEIGHTS)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = torch.where(tensors[name].float().abs() == 448, 240.0, tensors[name].float()).to(
        tensors[name].dtype
    )
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(tensors, tmp_path / WEIGHTS)
    loaded = load_checkpoint(tmp_path)
    assert torch.equal(checkpoint_tensors(loaded)[name].float(), tensors[name].float())
    ids = sequences(9)
    config = loaded.config
    with torch.no_grad():
        changed = score(loaded.leaves, config, make_batch(ids)).logprobs
        original = score(load_checkpoint(directory).leaves, config, make_batch(ids)).logprobs
    assert not torch.equal(changed, original)


@torch.no_grad()
def test_the_fused_step_of_a_gpu_is_adamw() -> None:
    """torch computes it on a CPU too."""
    found, wanted = parameters(), parameters()
    steps = AdamW(found.buffers, 0.9, 0.95, 0.1), AdamW(wanted.buffers, 0.9, 0.95, 0.1)
    for number in range(1, 4):
        for weights in (found, wanted):
            for buffer in weights.buffers:
                buffer.gradient.normal_(generator=torch.Generator().manual_seed(number))
        steps[0]._taken = number
        steps[0]._fused_step(1e-2)
        steps[1].step(1e-2)
    for one, other in zip(found.buffers, wanted.buffers, strict=True):
        torch.testing.assert_close(one.master, other.master, rtol=1e-6, atol=1e-7)
    for name, tensor in steps[0].state().items():
        torch.testing.assert_close(tensor, steps[1].state()[name], rtol=1e-6, atol=1e-8)
