"""The top-k router in Triton: scores, choice and normalization of a block of tokens in one program, nothing but the k
picks written.

Each pick is one maximum over 64-bit keys: the score made an integer that orders as floats do, and below it the expert's
index counted down, so equal scores go to the lowest index and NaN, the greatest of all, is always picked and seen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triplane_kernels.narrow_triton import narrow
from triplane_kernels.rounding_triton import to_float32
from triplane_kernels.router_reference import TINY
from triplane_kernels.tuning import Config, Results, lookup

SMALL: Config = {"BLOCK_T": 64, "num_warps": 4}
CANDIDATES: list[Config] = [
    {"BLOCK_T": tokens, "num_warps": warps}
    for tokens, warps in ((8, 4), (8, 8), (8, 2), (4, 4), (4, 2), (16, 4), (16, 8), (2, 2), (2, 4))
]
LEAST = tl.constexpr(-(2**63))
FLOOR = tl.constexpr(TINY)


@triton.jit
def _scores(logits: tl.tensor, real: tl.tensor, SIGMOID: tl.constexpr) -> tl.tensor:
    """Scores of a block of float32 logits [tokens, BINS]; zeros where not real."""
    if SIGMOID:
        return tl.where(real, tl.sigmoid(logits), 0.0)
    peak = tl.max(tl.where(real, logits, float("-inf")), axis=1)
    mass = tl.where(real, tl.exp(logits - peak[:, None]), 0.0)
    return mass / tl.sum(mass, axis=1)[:, None]


@triton.jit
def _keys(values: tl.tensor, columns: tl.tensor, BINS: tl.constexpr) -> tl.tensor:
    """int64 keys that order as (value, then lower column); NaN above all."""
    values = tl.where(values == 0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(values == values, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)
    return ordered.to(tl.int64) * 4294967296 + (BINS - 1 - columns)


@triton.jit
def _route_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    tokens: tl.tensor,
    num_experts: tl.tensor,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    BIASED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BINS)
    real = (token < tokens)[:, None] & (columns < num_experts)[None, :]
    values = to_float32(tl.load(logits + token[:, None] * num_experts + columns[None, :], mask=real, other=0))
    scores = _scores(values, real, SIGMOID)
    if BIASED:
        values = scores + tl.load(bias + columns, mask=columns < num_experts, other=0)[None, :]
    keys = tl.where(real, _keys(values, columns[None, :], BINS), LEAST)
    slots = tl.arange(0, SLOTS)
    picked = tl.zeros([BLOCK_T, SLOTS], tl.float32)
    chosen = tl.zeros([BLOCK_T, SLOTS], tl.int32)
    for slot in tl.static_range(K):
        best = tl.max(keys, axis=1)
        expert = (BINS - 1 - (best & (BINS - 1))).to(tl.int32)
        here = columns[None, :] == expert[:, None]
        score = tl.sum(tl.where(here, scores, 0.0), axis=1)
        keys = tl.where(here, LEAST, keys)
        picked = tl.where(slots[None, :] == slot, score[:, None], picked)
        chosen = tl.where(slots[None, :] == slot, expert[:, None], chosen)
    if NORMALIZE:
        picked = picked / (tl.sum(picked, axis=1) + FLOOR)[:, None]
    at = token[:, None] * K + slots[None, :]
    written = (token < tokens)[:, None] & (slots < K)[None, :]
    tl.store(weights + at, picked, mask=written)
    tl.store(experts + at, chosen, mask=written)


@triton.jit
def _route_backward_kernel(
    gradient: tl.tensor,
    logits: tl.tensor,
    experts: tl.tensor,
    of_logits: tl.tensor,
    tokens: tl.tensor,
    num_experts: tl.tensor,
    K: tl.constexpr,
    BINS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BINS)
    known = token < tokens
    real = known[:, None] & (columns < num_experts)[None, :]
    at = token[:, None] * num_experts + columns[None, :]
    scores = _scores(to_float32(tl.load(logits + at, mask=real, other=0)), real, SIGMOID)
    spread = tl.zeros([BLOCK_T, BINS], tl.float32)
    chosen = tl.zeros([BLOCK_T, BINS], tl.int32)
    for slot in tl.static_range(K):
        expert = tl.load(experts + token * K + slot, mask=known, other=-1)
        slope = tl.load(gradient + token * K + slot, mask=known, other=0)
        here = columns[None, :] == expert[:, None]
        spread = tl.where(here, slope[:, None], spread)
        chosen = tl.where(here, 1, chosen)
    if NORMALIZE:
        picked = tl.where(chosen == 1, scores, 0.0)
        total = (tl.sum(picked, axis=1) + FLOOR)[:, None]
        mean = tl.sum(tl.where(chosen == 1, spread * scores, 0.0), axis=1)[:, None] / total
        spread = tl.where(chosen == 1, (spread - mean) / total, 0.0)
    mean = tl.sum(spread * scores, axis=1)[:, None]
    slopes = spread * scores * (1 - scores) if SIGMOID else scores * (spread - mean)
    tl.store(of_logits + at, narrow(slopes, of_logits.dtype.element_ty), mask=real)


def route_triton(logits: Tensor, k: int, bias: Tensor | None, scores: str, normalize: bool) -> tuple[Tensor, Tensor]:
    """As `route_reference`."""
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)

    def run(config: Config) -> Results:
        _route_kernel[(triton.cdiv(tokens, config["BLOCK_T"]),)](
            logits,
            weights if bias is None else bias,
            weights,
            experts,
            tokens,
            num_experts,
            K=k,
            SLOTS=triton.next_power_of_2(k),
            BINS=triton.next_power_of_2(num_experts),
            BIASED=bias is not None,
            SIGMOID=scores == "sigmoid",
            NORMALIZE=normalize,
            **config,
        )
        return weights, experts

    if tokens:
        run(lookup("route", (tokens, num_experts, k), CANDIDATES, run, small=SMALL))
    return weights, experts


def route_backward_triton(gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, normalize: bool) -> Tensor:
    """As `route_backward_reference`."""
    (tokens, num_experts), k = logits.shape, experts.shape[1]
    of_logits = torch.empty_like(logits)

    def run(config: Config) -> Tensor:
        _route_backward_kernel[(triton.cdiv(tokens, config["BLOCK_T"]),)](
            gradient,
            logits,
            experts,
            of_logits,
            tokens,
            num_experts,
            K=k,
            BINS=triton.next_power_of_2(num_experts),
            SIGMOID=scores == "sigmoid",
            NORMALIZE=normalize,
            **config,
        )
        return of_logits

    if tokens:
        run(lookup("route_backward", (tokens, num_experts, k), CANDIDATES, run, small=SMALL))
    return of_logits
