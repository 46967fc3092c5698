"""Token permutation in Triton: a stable counting sort in three launches, and row copies that read each row of memory
once.

experts --count--> [E, chunks] --scan--> bases, totals --place--> offsets, source, position     all on the device
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triplane_kernels.narrow_triton import narrow
from triplane_kernels.permute_reference import padded_rows
from triplane_kernels.rounding_triton import to_float32
from triplane_kernels.tuning import Config, Results, lookup

MOST_HITS = 2**14
"""Elements of the comparison of a chunk of pairs with every expert: more do not fit the registers of a program."""
SMALL: Config = {"BLOCK_T": 32, "BLOCK_H": 128, "num_warps": 4}
CANDIDATES: list[Config] = [
    {"BLOCK_T": tokens, "BLOCK_H": width, "num_warps": warps}
    for tokens, width, warps in (
        (1, 2048, 4),
        (1, 2048, 8),
        (1, 2048, 2),
        (1, 1024, 4),
        (1, 1024, 2),
        (2, 1024, 4),
        (2, 1024, 8),
        (4, 512, 4),
        (4, 512, 8),
        (1, 4096, 4),
        (1, 4096, 8),
    )
]


@triton.jit
def _count_kernel(
    experts: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    num_experts: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """counts[e, c] = pairs of chunk c that go to expert e."""
    chunk = tl.program_id(0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + index, mask=index < pairs, other=-1)
    bins = tl.arange(0, BINS)
    hits = (expert[:, None] == bins[None, :]).to(tl.int32)
    tl.store(counts + bins.to(tl.int64) * chunks + chunk, tl.sum(hits, axis=0), mask=bins < num_experts)


@triton.jit
def _scan_kernel(counts: tl.tensor, totals: tl.tensor, chunks: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Turns one expert's counts into how many of its pairs lie in earlier chunks, in place; totals[e] = all of them."""
    row = counts + tl.program_id(0).to(tl.int64) * chunks
    total = tl.zeros([1], tl.int32)
    for start in range(0, chunks, BLOCK):
        index = start + tl.arange(0, BLOCK)
        here = tl.load(row + index, mask=index < chunks, other=0)
        tl.store(row + index, total + tl.cumsum(here, axis=0) - here, mask=index < chunks)
        total += tl.sum(here, axis=0)
    tl.store(totals + tl.program_id(0) + tl.arange(0, 1), total)


@triton.jit
def _place_kernel(
    experts: tl.tensor,
    bases: tl.tensor,
    totals: tl.tensor,
    offsets: tl.tensor,
    source: tl.tensor,
    position: tl.tensor,
    pairs: tl.tensor,
    num_experts: tl.tensor,
    chunks: tl.tensor,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Row of every pair: its group's start, and its rank in the group; equal experts keep their order."""
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    real = bins < num_experts
    padded = (tl.load(totals + bins, mask=real, other=0) + ALIGN - 1) // ALIGN * ALIGN
    ends = tl.cumsum(padded, axis=0)
    if chunk == 0:
        tl.store(offsets + bins + 1, ends, mask=real)
        tl.store(offsets, 0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + index, mask=index < pairs, other=-1)
    starts = ends - padded + tl.load(bases + bins.to(tl.int64) * chunks + chunk, mask=real, other=0)
    start = tl.sum(tl.where(expert[:, None] == bins[None, :], starts[None, :], 0), axis=1)
    slot = tl.arange(0, CHUNK)
    before = (expert[:, None] == expert[None, :]) & (slot[None, :] < slot[:, None])
    row = start + tl.sum(before.to(tl.int32), axis=1)
    kept = (expert >= 0) & (expert < num_experts)
    tl.store(position + index, tl.where(kept, row, -1), mask=index < pairs)
    tl.store(source + row, index, mask=kept & (index < pairs))


@triton.jit
def _zero_padding(
    rows: tl.tensor,
    source: tl.tensor,
    block: tl.tensor,
    total: tl.tensor,
    width: tl.tensor,
    PAD_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Writes zeros to those rows of one block of PAD_ROWS that no token fills."""
    index = block * PAD_ROWS + tl.arange(0, PAD_ROWS)
    empty = tl.load(source + index, mask=index < total, other=0) < 0
    if tl.max(empty.to(tl.int32), axis=0) > 0:
        zeros = tl.zeros([PAD_ROWS, BLOCK_H], rows.dtype.element_ty)
        for start in range(0, width, BLOCK_H):
            columns = start + tl.arange(0, BLOCK_H)
            target = rows + index.to(tl.int64)[:, None] * width + columns[None, :]
            tl.store(target, zeros, mask=empty[:, None] & (columns < width)[None, :])


@triton.jit
def _scatter_kernel(
    x: tl.tensor,
    rows: tl.tensor,
    source: tl.tensor,
    position: tl.tensor,
    tokens: tl.tensor,
    total: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAD_ROWS: tl.constexpr,
) -> None:
    """One program a block of tokens: read their rows once, write them K times.

    Programs past the tokens clear padding rows.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(tokens, BLOCK_T)
    if program < blocks:
        token = program * BLOCK_T + tl.arange(0, BLOCK_T)
        real = token < tokens
        for start in range(0, width, BLOCK_H):
            columns = start + tl.arange(0, BLOCK_H)
            inside = real[:, None] & (columns < width)[None, :]
            values = tl.load(x + token.to(tl.int64)[:, None] * width + columns[None, :], mask=inside)
            for slot in tl.static_range(K):
                row = tl.load(position + token * K + slot, mask=real, other=-1).to(tl.int64)[:, None]
                tl.store(rows + row * width + columns[None, :], values, mask=inside & (row >= 0))
    else:
        _zero_padding(rows, source, program - blocks, total, width, PAD_ROWS, BLOCK_H)


@triton.jit
def _gather_kernel(
    rows: tl.tensor,
    position: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """One program a block of tokens and of columns: the K rows of each, weighted, summed in slot order in float32."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = token < tokens
    inside = real[:, None] & (columns < width)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(position + token * K + slot, mask=real, other=-1).to(tl.int64)[:, None]
        value = to_float32(tl.load(rows + row * width + columns[None, :], mask=inside & (row >= 0), other=0))
        if WEIGHTED:
            value *= to_float32(tl.load(weights + token * K + slot, mask=real, other=0))[:, None]
        total += value
    tl.store(
        out + token.to(tl.int64)[:, None] * width + columns[None, :], narrow(total, out.dtype.element_ty), mask=inside
    )


@triton.jit
def _unpermute_backward_kernel(
    gradient: tl.tensor,
    rows: tl.tensor,
    source: tl.tensor,
    position: tl.tensor,
    weights: tl.tensor,
    of_rows: tl.tensor,
    of_weights: tl.tensor,
    tokens: tl.tensor,
    total: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAD_ROWS: tl.constexpr,
) -> None:
    """One program a block of tokens: their gradients spread over their K rows, and the dot product with each of
    these.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(tokens, BLOCK_T)
    if program < blocks:
        token = program * BLOCK_T + tl.arange(0, BLOCK_T)
        real = token < tokens
        for slot in tl.static_range(K):
            row = tl.load(position + token * K + slot, mask=real, other=-1).to(tl.int64)[:, None]
            weight = to_float32(tl.load(weights + token * K + slot, mask=real, other=0))[:, None]
            products = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
            for start in range(0, width, BLOCK_H):
                columns = start + tl.arange(0, BLOCK_H)
                inside = real[:, None] & (columns < width)[None, :]
                slope = to_float32(
                    tl.load(gradient + token.to(tl.int64)[:, None] * width + columns[None, :], mask=inside, other=0)
                )
                held = inside & (row >= 0)
                at = row * width + columns[None, :]
                products += slope * to_float32(tl.load(rows + at, mask=held, other=0))
                tl.store(of_rows + at, narrow(slope * weight, of_rows.dtype.element_ty), mask=held)
            dots = tl.sum(products, axis=1)
            tl.store(of_weights + token * K + slot, narrow(dots, of_weights.dtype.element_ty), mask=real)
    else:
        _zero_padding(of_rows, source, program - blocks, total, width, PAD_ROWS, BLOCK_H)


def plan_triton(experts: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `plan_reference`."""
    pairs, device = experts.numel(), experts.device
    bins = triton.next_power_of_2(num_experts)
    chunk = min(max(MOST_HITS // bins, 8), 128)
    chunks = max(triton.cdiv(pairs, chunk), 1)
    counts = torch.empty(num_experts, chunks, dtype=torch.int32, device=device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    source = torch.full((padded_rows(pairs, num_experts, block),), -1, dtype=torch.int32, device=device)
    position = torch.empty(experts.shape, dtype=torch.int32, device=device)
    _count_kernel[(chunks,)](experts, counts, pairs, num_experts, chunks, CHUNK=chunk, BINS=bins, num_warps=8)
    _scan_kernel[(num_experts,)](counts, totals, chunks, BLOCK=1024)
    _place_kernel[(chunks,)](
        experts,
        counts,
        totals,
        offsets,
        source,
        position,
        pairs,
        num_experts,
        chunks,
        ALIGN=block,
        CHUNK=chunk,
        BINS=bins,
        num_warps=8,
    )
    return offsets, source, position


def scatter_triton(x: Tensor, source: Tensor, position: Tensor) -> Tensor:
    """As `scatter_reference`."""
    rows = torch.empty(source.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    tokens, k = position.shape
    # A copy needs no FP8 arithmetic: codes travel as bytes.
    seen, written = (x.view(torch.uint8), rows.view(torch.uint8)) if x.element_size() == 1 else (x, rows)

    def run(config: Config) -> Tensor:
        _scatter_kernel[_with_padding(tokens, source, config)](
            seen,
            written,
            source,
            position,
            tokens,
            source.numel(),
            x.shape[1],
            K=k,
            PAD_ROWS=_pad_rows(config),
            **config,
        )
        return written

    if rows.numel():
        run(lookup("permute", (tokens, k, x.shape[1]), CANDIDATES, run, small=SMALL))
    return rows


def gather_triton(rows: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """As `gather_reference`."""
    tokens, k = position.shape
    width = rows.shape[1]
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)

    def run(config: Config) -> Tensor:
        grid = (triton.cdiv(tokens, config["BLOCK_T"]), triton.cdiv(width, config["BLOCK_H"]))
        shares = rows if weights is None else weights
        _gather_kernel[grid](rows, position, shares, out, tokens, width, K=k, WEIGHTED=weights is not None, **config)
        return out

    if out.numel():
        run(lookup("unpermute", (tokens, k, width), CANDIDATES, run, small=SMALL))
    return out


def unpermute_backward_triton(
    gradient: Tensor, rows: Tensor, source: Tensor, position: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """As `unpermute_backward_reference`."""
    tokens, k = position.shape
    of_rows, of_weights = torch.empty_like(rows), torch.empty_like(weights)

    def run(config: Config) -> Results:
        _unpermute_backward_kernel[_with_padding(tokens, source, config)](
            gradient,
            rows,
            source,
            position,
            weights,
            of_rows,
            of_weights,
            tokens,
            source.numel(),
            rows.shape[1],
            K=k,
            PAD_ROWS=_pad_rows(config),
            **config,
        )
        return of_rows, of_weights

    if rows.numel() or weights.numel():
        run(lookup("unpermute_backward", (tokens, k, rows.shape[1]), CANDIDATES, run, small=SMALL))
    return of_rows, of_weights


def _pad_rows(config: Config) -> int:
    """Rows that one program checks for padding; a block of them has about the size of a block of tokens."""
    return 8 * config["BLOCK_T"]


def _with_padding(tokens: int, source: Tensor, config: Config) -> tuple[int]:
    """Programs for the tokens, and after them those that clear padding."""
    return (triton.cdiv(tokens, config["BLOCK_T"]) + triton.cdiv(source.numel(), _pad_rows(config)),)
