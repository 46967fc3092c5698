"""Token permutation in plain torch, on any device, without a host synchronization."""

from __future__ import annotations

import torch
from torch import Tensor


def padded_rows(pairs: int, num_experts: int, block: int) -> int:
    """Maximum rows of `pairs` (token, expert) pairs with every expert's group padded to a multiple of block."""
    return (pairs + min(pairs, num_experts) * (block - 1)) // block * block


def plan_reference(experts: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row of every pair. experts: int32 [T, k]; returns offsets int32 [E+1], source int32 [P], position int32 [T,
    k].
    """
    device = experts.device
    flat = experts.reshape(-1).long()
    pairs = flat.numel()
    rows = padded_rows(pairs, num_experts, block)
    bucket = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, bucket, torch.ones_like(bucket))
    offsets = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    offsets[1:] = ((counts[:-1] + block - 1) // block * block).cumsum(0)
    order = bucket.argsort(stable=True)
    sorted_bucket = bucket[order]
    rank = torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[sorted_bucket]
    placed = torch.where(sorted_bucket < num_experts, offsets[sorted_bucket] + rank, -1)
    position = torch.empty_like(flat).scatter_(0, order, placed)
    # All dropped pairs go to one extra row, which is then removed.
    source = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
    source.scatter_(0, torch.where(placed >= 0, placed, rows), order)
    return offsets.int(), source[:rows].int(), position.view(experts.shape).int()


def scatter_reference(x: Tensor, source: Tensor, k: int) -> Tensor:
    """Rows [P, H] of x [T, H] in expert order; row p is x[source[p] // k], zeros where source is negative."""
    rows = x[source.clamp(min=0).long() // k]
    return torch.where(source[:, None] < 0, torch.zeros((), dtype=x.dtype, device=x.device), rows)


def gather_reference(rows: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over j of weights[t, j] * rows[position[t, j]], in slot order, accumulated in float32 or wider; [T, H] of
    rows' dtype.
    """
    tokens, k = position.shape
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(tokens, rows.shape[1], dtype=wide, device=rows.device)
    for slot in range(k):
        picked = _pick(rows, position[:, slot]).to(wide)
        total += picked if weights is None else picked * weights[:, slot, None].to(wide)
    return total.to(rows.dtype)


def unpermute_backward_reference(
    gradient: Tensor, rows: Tensor, source: Tensor, position: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `gather_reference`: of rows [P, H] (zeros on padding) and of weights [T, k]."""
    k = position.shape[1]
    wide = torch.promote_types(rows.dtype, torch.float32)
    scale = weights.reshape(-1)[source.clamp(min=0).long()].to(wide)
    spread = scatter_reference(gradient, source, k).to(wide) * torch.where(source < 0, 0, scale)[:, None]
    slots = [(_pick(rows, position[:, slot]).to(wide) * gradient.to(wide)).sum(1) for slot in range(k)]
    return spread.to(rows.dtype), torch.stack(slots, 1).to(weights.dtype)


def _pick(rows: Tensor, position: Tensor) -> Tensor:
    """rows[position], zeros where position is negative; rows may be empty when every position is."""
    if rows.shape[0] == 0:
        return rows.new_zeros(position.shape[0], rows.shape[1])
    picked = rows[position.clamp(min=0).long()]
    return torch.where(position[:, None] < 0, torch.zeros((), dtype=rows.dtype, device=rows.device), picked)
