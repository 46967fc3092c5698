"""Run under torchrun: steps of an expert layer under FSDP2, each rank on its half of the tokens, beside the same steps
on one rank.

Every rank checks the output, the masters after each step and the codes of all ranks; rank 0 says so on standard output.
"""

from __future__ import annotations

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from triplane_kernels.moe_module import ExpertLayer
from triplane_kernels.moe_weights import ExpertWeights

STEPS, TOKENS, HIDDEN = 3, 24, 128


def make_layer() -> ExpertLayer:
    torch.manual_seed(0)
    return ExpertLayer(HIDDEN, 72, 4, 2)


def main() -> None:
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    whole, sharded = make_layer(), make_layer()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (whole, sharded)]
    for number in range(STEPS):
        tokens = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(number))
        mine = tokens.chunk(ranks)[rank]
        for layer, part, optimizer in zip((whole, sharded), (tokens, mine), optimizers, strict=True):
            optimizer.zero_grad()
            layer(part).square().mean().backward()
            optimizer.step()
        check(whole, sharded)
    if rank == 0:
        print(f"the same on {ranks} ranks")
    distributed.destroy_process_group()


def check(whole: ExpertLayer, sharded: ExpertLayer) -> None:
    """Masters agree but for the order of sums; every rank quantizes the same codes."""
    gathered = {name: parameter.full_tensor() for name, parameter in sharded.named_parameters()}  # type: ignore[attr-defined]
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gathered[name], parameter.detach(), rtol=1e-3, atol=1e-4)
    weights = ExpertWeights.quantize(gathered["gate_proj"], gathered["up_proj"], gathered["down_proj"])
    for codes, _ in weights.codes().values():
        mine: Tensor = codes.contiguous().view(torch.uint8)
        every = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
        distributed.all_gather(every, mine)
        assert all(torch.equal(mine, other) for other in every)


if __name__ == "__main__":
    main()
