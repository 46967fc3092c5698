"""Run under torchrun: a mixture of experts that the ranks divide, beside the same mixture on one rank.

Every rank compares its outputs, and the gradients of its rows, shares and experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.backends.expert_parallel import exchanged_mixture
from trainer.precision import PRECISION, W8A8, AnyPrecision, Bf16, Fp8Block
from trainer.recipes import recipe_of
from trainer.recipes.base import Experts, Recipe

EXPERTS, PICKS, HIDDEN, WIDTH = 8, 2, 128, 256
STACKS = ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
ROUTES: dict[str, Callable[[int], Tensor]] = {
    "drawn": lambda tokens: torch.rand(tokens, EXPERTS).topk(PICKS).indices,
    "to the first rank": lambda tokens: torch.arange(PICKS).repeat(tokens, 1),
    "to the last rank": lambda tokens: torch.arange(EXPERTS - PICKS, EXPERTS).repeat(tokens, 1),
}


def of_rank(rank: int, recipe: Recipe, route: Callable[[int], Tensor]) -> list[Tensor]:
    """Rows, shares, chosen experts and the output's gradient of one rank."""
    torch.manual_seed(rank)
    tokens, wide = 5 + 3 * rank, recipe.wide(torch.zeros(1)).dtype
    rows, gradient = (recipe.narrow(torch.randn(tokens, HIDDEN)) for _ in range(2))
    return [rows, torch.rand(tokens, PICKS, dtype=wide), route(tokens), gradient]


def trained(
    parts: Sequence[list[Tensor]], experts: Sequence[Tensor], mixture: Callable[..., Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """(output and gradients of rows and shares, gradients of experts) of the ranks with these parts."""
    rows, shares, chosen, gradient = (torch.cat(each) for each in zip(*parts, strict=True))
    leaves = [leaf.detach().requires_grad_() for leaf in (rows, shares, *experts)]
    out = mixture(*leaves[:2], chosen, Experts(*leaves[2:]))
    out.backward(gradient)
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [out.detach(), *found[:2]], found[2:]


def compare(precision: AnyPrecision, route: Callable[[int], Tensor]) -> None:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    recipe = recipe_of({PRECISION: precision.model_dump(mode="json")})
    torch.manual_seed(ranks)
    stacks = [torch.randn(shape) / 8 for shape in STACKS]
    parts = [of_rank(each, recipe, route) for each in range(ranks)]
    own = [stack.chunk(ranks)[rank] for stack in stacks]
    found = trained([parts[rank]], own, lambda *each: exchanged_mixture(recipe, *each, group))
    whole = trained(parts, stacks, recipe.mixture)
    # bfloat16 keeps 8 bits, and a gradient of half the tokens is rounded by itself
    limit = 1e-2 if recipe.activations == torch.bfloat16 else 1e-5
    tokens = [len(part[0]) for part in parts]
    theirs = [each.split(tokens)[rank] for each in whole[0]] + [each.chunk(ranks)[rank] for each in whole[1]]
    for ours, other in zip(found[0] + found[1], theirs, strict=True):
        assert ours.shape == other.shape
        assert float((ours - other).double().norm()) <= limit * float(other.double().norm()), precision.kind


def main() -> None:
    dist.init_process_group("gloo")
    for precision in (Bf16(kind="bf16"), W8A8(kind="w8a8-1x128"), Fp8Block(kind="fp8-block")):
        for name, route in ROUTES.items():
            compare(precision, route)
            if dist.get_rank() == 0:
                print(f"the same: {precision.kind}, {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
