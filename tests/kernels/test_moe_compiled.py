"""The expert layer under torch.compile and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed
from kernel_inputs import normal
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from triplane_kernels.moe import BF16, Recipe
from triplane_kernels.moe_module import ExpertLayer

from tests.torchrun import torchrun

TRAINS_ALIKE = Path(__file__).parent / "moe_ranks.py"


def make_layer(recipe: Recipe = Recipe()) -> ExpertLayer:
    torch.manual_seed(0)
    return ExpertLayer(128, 72, 4, 2, recipe=recipe)


def step(layer: torch.nn.Module, hidden: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    hidden = hidden.detach().requires_grad_()
    out = layer(hidden)
    found = torch.autograd.grad(out.square().mean(), [hidden, *layer.parameters()])
    return [out.detach(), *found]


@pytest.mark.slow
def test_a_compiled_layer_is_one_graph_and_the_same_numbers() -> None:
    layer, hidden = make_layer(), normal(2, 5, 128)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(step(compiled, hidden), step(layer, hidden), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.slow
def test_weights_quantized_once_serve_every_micro_batch() -> None:
    layer = make_layer()
    weights = layer.quantized()
    parts = [normal(6, 128, seed=seed) for seed in range(3)]
    kept = torch.cat([layer(part, weights) for part in parts])
    assert torch.equal(kept, torch.cat([layer(part) for part in parts]))
    kept.sum().backward()
    assert layer.gate_proj.grad is not None and bool(layer.gate_proj.grad.any())


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(wgrad=True), BF16], ids=["fp8", "fp8-wgrad", "w8"])
@pytest.mark.slow
def test_a_sharded_layer_computes_the_same(one_rank: None, recipe: Recipe) -> None:
    layer, hidden = make_layer(recipe), normal(12, 128)
    wanted = step(layer, hidden)
    fully_shard(layer, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)))
    hidden = hidden.detach().requires_grad_()
    out = layer(hidden)
    out.square().mean().backward()
    found = [out.detach(), hidden.grad, *(parameter.grad.full_tensor() for parameter in layer.parameters())]
    for one, other in zip(found, wanted, strict=True):
        assert one is not None and torch.equal(one, other)


@pytest.mark.slow
def test_two_ranks_train_the_layer_that_one_trains(tmp_path: Path) -> None:
    assert "the same on 2 ranks" in torchrun(TRAINS_ALIKE, 2, tmp_path)
