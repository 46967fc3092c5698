"""The fused loss head in Triton: a persistent product of hidden and weight whose tiles end in sums, not in memory.

    forward   tile of logits --> three sums a row and tile, and the target's logit --> logprob, entropy, log-sum-exp
    backward  a chunk of the vocabulary at a time: tile of logits again --> tile of slopes [T, chunk] --> two torch
    products

Tiles run in groups of GROUP rows of tiles, so that what is read of hidden and weight stays in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from triplane_kernels.launch_triton import by_tma, operand
from triplane_kernels.loss_head_reference import Gradients, Head, Sums, combine
from triplane_kernels.machine import machine
from triplane_kernels.narrow_triton import narrow
from triplane_kernels.product_triton import product, tile
from triplane_kernels.tuning import Config, Results, lookup

SLOPES = 2**28
"""Elements of the slopes of one chunk: 512 MiB in bfloat16, enough to keep the products busy."""
CHUNK_STEP = 256
"""Chunks of the vocabulary are multiples of this."""
SMALL: Config = {"BLOCK_T": 32, "BLOCK_V": 64, "BLOCK_H": 32, "PARTS": 2, "GROUP": 2, "num_warps": 4, "num_stages": 1}
FLOAT32: Config = {"BLOCK_T": 64, "BLOCK_V": 64, "BLOCK_H": 32, "PARTS": 1, "GROUP": 8, "num_warps": 4, "num_stages": 3}
"""Float32 is multiplied outside the matrix units, exactly: for comparisons, not for speed."""


def _config(rows: int, columns: int, stages: int, parts: int, group: int = 16) -> Config:
    """parts: into how many parts of columns a tile's sums or slopes are cut; more take fewer registers."""
    return {
        "BLOCK_T": rows,
        "BLOCK_V": columns,
        "BLOCK_H": 64,
        "PARTS": parts,
        "GROUP": group,
        "num_warps": 8,
        "num_stages": stages,
    }


FORWARD = [
    _config(128, 256, 4, 1),
    _config(128, 256, 4, 2),
    _config(128, 256, 3, 2),
    _config(256, 128, 3, 1),
    _config(128, 128, 4, 1),
    _config(128, 128, 4, 2),
    _config(128, 256, 4, 1, group=8),
]
BACKWARD = [
    _config(128, 256, 4, 4),
    _config(128, 256, 4, 2),
    _config(128, 256, 3, 4),
    _config(128, 128, 4, 4),
    _config(128, 128, 4, 2),
    _config(128, 256, 4, 4, group=8),
]
# a mask of [T, V] is read by its own loads, which take registers and shared memory
FORWARD_MASKED = [_config(128, 128, 4, 4), _config(128, 128, 4, 2), _config(128, 128, 5, 4), _config(64, 256, 4, 4)]
BACKWARD_MASKED = [_config(128, 256, 4, 4), _config(128, 256, 3, 4), _config(128, 128, 4, 4), _config(128, 128, 4, 2)]


@triton.jit
def _corner(
    index: tl.tensor,
    tokens: tl.tensor,
    entries: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """First token and first vocabulary entry of a tile: column by column inside a group of GROUP rows of tiles."""
    tall, wide = tl.cdiv(tokens, BLOCK_T), tl.cdiv(entries, BLOCK_V)
    first = index // (GROUP * wide) * GROUP
    rows = tl.minimum(tall - first, GROUP)
    inner = index % (GROUP * wide)
    return (first + inner % rows) * BLOCK_T, inner // rows * BLOCK_V


@triton.jit
def _logits_tile(
    hidden: tl.tensor,
    weight: tl.tensor,
    token: tl.tensor,
    entry: tl.tensor,
    tokens: tl.tensor,
    vocabulary: tl.tensor,
    width: tl.tensor,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> tl.tensor:
    """hidden[token :] @ weight[entry :].T, one tile in float32; zeros past the edges."""
    total = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    row = token + tl.arange(0, BLOCK_T)
    column = entry + tl.arange(0, BLOCK_V)
    for start in range(0, width, BLOCK_H):
        if TMA:
            left = hidden.load([token, start])
            right = weight.load([entry, start])
        else:
            inner = start + tl.arange(0, BLOCK_H)
            known = (inner < width)[None, :]
            left = tile(hidden, row, inner, width, (row < tokens)[:, None] & known)
            right = tile(weight, column, inner, width, (column < vocabulary)[:, None] & known)
        total += product(left, tl.trans(right))
    return total


@triton.jit
def _pieces(whole: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """A tile cut into PARTS (1, 2 or 4) pieces of neighbouring columns, as a tuple."""
    if PARTS == 4:
        left, right = _halves(whole)
        first, second = _halves(left)
        third, fourth = _halves(right)
        pieces = (first, second, third, fourth)
    elif PARTS == 2:
        pieces = _halves(whole)
    else:
        pieces = (whole,)  # type: ignore[assignment]
    return pieces


@triton.jit
def _halves(whole: tl.tensor) -> tl.tensor:
    return tl.split(tl.permute(tl.reshape(whole, (whole.shape[0], 2, whole.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _kept(
    allowed: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    allowed_row: tl.tensor,
    MASKS: tl.constexpr,
) -> tl.tensor:
    """Which elements are logits of real tokens for entries before `end` that are allowed.

    MASKS: dimensions of the mask, 0 for none.
    """
    known = column < end
    if MASKS == 1:
        known = known & (tl.load(allowed + column, mask=known, other=0) != 0)
    kept = (row < tokens)[:, None] & known[None, :]
    if MASKS == 2:
        at = row.to(tl.int64)[:, None] * allowed_row + column[None, :]
        kept = kept & (tl.load(allowed + at, mask=kept, other=0) != 0)
    return kept


@triton.jit
def _forward_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    targets: tl.tensor,
    allowed: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    moments: tl.tensor,
    target_logits: tl.tensor,
    tokens: tl.tensor,
    vocabulary: tl.tensor,
    width: tl.tensor,
    allowed_row: tl.tensor,
    scale: tl.tensor,
    TMA: tl.constexpr,
    MASKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Of every tile and row: the largest logit, the sum of exp(z - largest), the sum of that times (z - largest)."""
    tiles = tl.cdiv(tokens, BLOCK_T) * tl.cdiv(vocabulary, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        token, entry = _corner(index, tokens, vocabulary, BLOCK_T, BLOCK_V, GROUP)
        products = _logits_tile(hidden, weight, token, entry, tokens, vocabulary, width, TMA, BLOCK_T, BLOCK_V, BLOCK_H)
        row = token + tl.arange(0, BLOCK_T)
        real = row < tokens
        target = tl.load(targets + row, mask=real, other=-1)
        picked = tl.zeros([BLOCK_T], tl.float32)
        peak = tl.full([BLOCK_T], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_T], tl.float32)
        moment = tl.zeros([BLOCK_T], tl.float32)
        pieces = _pieces(products, PARTS)
        for part in tl.static_range(PARTS):
            column = entry + part * (BLOCK_V // PARTS) + tl.arange(0, BLOCK_V // PARTS)
            kept = _kept(allowed, row, column, tokens, vocabulary, allowed_row, MASKS)
            logits = tl.where(kept, pieces[part] * scale, float("-inf"))
            picked += tl.sum(tl.where(column[None, :] == target[:, None], logits, 0.0), axis=1)
            before = peak
            peak = tl.maximum(peak, tl.max(logits, axis=1))
            shift = tl.where(peak == float("-inf"), 0.0, peak)
            drop = tl.where(before == float("-inf"), 0.0, before - shift)
            kept_share = tl.exp(drop)
            shifted = logits - shift[:, None]
            share = tl.exp(shifted)
            moment = kept_share * (moment + mass * drop)
            moment += tl.sum(share * tl.where(share == 0, 0.0, shifted), axis=1)
            mass = kept_share * mass + tl.sum(share, axis=1)
        inside = (target >= entry) & (target < entry + BLOCK_V) & (target < vocabulary)
        tl.store(target_logits + row, picked, mask=real & inside)
        at = (entry // BLOCK_V).to(tl.int64) * tokens + row
        tl.store(peaks + at, peak, mask=real)
        tl.store(masses + at, mass, mask=real)
        tl.store(moments + at, moment, mask=real)


@triton.jit
def _slopes_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    slopes: tl.tensor,
    targets: tl.tensor,
    allowed: tl.tensor,
    peaks: tl.tensor,
    log_masses: tl.tensor,
    entropy: tl.tensor,
    of_logprob: tl.tensor,
    of_entropy: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    vocabulary: tl.tensor,
    width: tl.tensor,
    slopes_row: tl.tensor,
    allowed_row: tl.tensor,
    scale: tl.tensor,
    TMA: tl.constexpr,
    MASKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Gradient of hidden @ weight[begin:end].T from those of the logprobs and the entropies."""
    tiles = tl.cdiv(tokens, BLOCK_T) * tl.cdiv(end - begin, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        token, local = _corner(index, tokens, end - begin, BLOCK_T, BLOCK_V, GROUP)
        products = _logits_tile(
            hidden, weight, token, begin + local, tokens, vocabulary, width, TMA, BLOCK_T, BLOCK_V, BLOCK_H
        )
        row = token + tl.arange(0, BLOCK_T)
        real = row < tokens
        # one after the other: their sum rounds to the size of the peak
        peak = tl.load(peaks + row, mask=real, other=0.0)[:, None]
        log_mass = tl.load(log_masses + row, mask=real, other=0.0)[:, None]
        mean = tl.load(entropy + row, mask=real, other=0.0)[:, None]
        first = tl.load(of_logprob + row, mask=real, other=0.0)[:, None]
        second = tl.load(of_entropy + row, mask=real, other=0.0)[:, None]
        # A token's gradient that is NaN reaches what is not allowed too.
        nothing = tl.where(first == first, 0.0, first)
        target = tl.load(targets + row, mask=real, other=-1)[:, None]
        pieces = _pieces(products, PARTS)
        for part in tl.static_range(PARTS):
            offset = local + part * (BLOCK_V // PARTS)
            column = begin + offset + tl.arange(0, BLOCK_V // PARTS)
            logprob = pieces[part] * scale - peak - log_mass
            slope = -tl.exp(logprob) * (first + second * (logprob + mean))
            slope += tl.where(column[None, :] == target, first, 0.0)
            kept = _kept(allowed, row, column, tokens, end, allowed_row, MASKS)
            written = narrow(tl.where(kept, slope * scale, nothing), slopes.dtype if TMA else slopes.dtype.element_ty)
            if TMA:
                slopes.store([token, offset], written)
            else:
                at = row.to(tl.int64)[:, None] * slopes_row + (column - begin)[None, :]
                tl.store(slopes + at, written, mask=real[:, None] & (column < end)[None, :])


def loss_head_triton(head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `loss_head_reference`."""
    hidden, vocabulary = head.hidden, head.weight.shape[0]
    tokens, width = hidden.shape
    target_logits = hidden.new_full((tokens,), torch.nan, dtype=torch.float32)

    def run(config: Config) -> tuple[Tensor, ...]:
        sums = hidden.new_empty(3, triton.cdiv(vocabulary, config["BLOCK_V"]), tokens, dtype=torch.float32)
        _forward_kernel[(_programs(),)](
            *_operands(head, config),
            head.targets,
            _mask(head),
            *sums,
            target_logits,
            tokens,
            vocabulary,
            width,
            _mask_row(head),
            1 / head.temperature,
            **_constants(head),
            **config,
        )
        return target_logits, *combine(*sums)

    if not tokens:
        return target_logits, target_logits.clone(), target_logits.clone(), target_logits.clone()
    _, log_mass, mean, peak = run(_found("loss_head", head, vocabulary, FORWARD, FORWARD_MASKED, run))
    return target_logits - peak - log_mass, log_mass - mean, peak, log_mass


def loss_head_backward_triton(head: Head, sums: Sums, into: Gradients) -> None:
    """As `loss_head_backward_reference`; slopes are rounded to hidden's dtype before they are multiplied."""
    hidden, weight = head.hidden, head.weight
    (tokens, width), vocabulary = hidden.shape, weight.shape[0]
    if not tokens:
        into.of_weight.zero_()
        return
    total = torch.zeros_like(hidden, dtype=torch.float32)
    chunk = max(SLOPES // tokens // CHUNK_STEP, 1) * CHUNK_STEP
    # Rows of whole 16 bytes, as the copy engine writes them.
    pitch = triton.cdiv(min(chunk, vocabulary), 16) * 16
    buffer = hidden.new_empty(tokens, pitch)
    for begin in range(0, vocabulary, chunk):
        end = min(begin + chunk, vocabulary)
        slopes = buffer[:, : end - begin]

        def run(config: Config, begin: int = begin, end: int = end, slopes: Tensor = slopes) -> Tensor:
            _slopes_kernel[(_programs(),)](
                *_operands(head, config, slopes),
                head.targets,
                _mask(head),
                sums.peak,
                sums.log_mass,
                sums.entropy,
                sums.of_logprob,
                sums.of_entropy,
                tokens,
                begin,
                end,
                vocabulary,
                width,
                pitch,
                _mask_row(head),
                1 / head.temperature,
                **_constants(head),
                **config,
            )
            return slopes

        run(_found("loss_head_backward", head, end - begin, BACKWARD, BACKWARD_MASKED, run))
        if into.of_hidden.numel():
            total += _mm(slopes, weight[begin:end])
        if into.of_weight.numel():
            torch.mm(slopes.mT, hidden, out=into.of_weight[begin:end])
    if into.of_hidden.numel():
        into.of_hidden.copy_(total)


def _found(
    op: str, head: Head, entries: int, plain: list[Config], masked: list[Config], run: Callable[[Config], Results]
) -> Config:
    """The configuration for `entries` of the vocabulary. What takes other room on the chip has a name of its own."""
    (tokens, width), dtype = head.hidden.shape, head.hidden.dtype
    candidates = masked if _masks(head) == 2 else plain
    name = f"{op}_masked" if _masks(head) == 2 else op
    if dtype == torch.float32:
        name, candidates = f"{op}_float32", [FLOAT32]
    return lookup(name, (tokens, entries, width), candidates, run, small=SMALL)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32, of operands as they are."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _operands(head: Head, config: Config, slopes: Tensor | None = None) -> list[Any]:
    """The matrices as kernels take them: descriptors of tiles for the copy engine, or pointers."""
    tall, wide, deep = config["BLOCK_T"], config["BLOCK_V"], config["BLOCK_H"]
    tiles = [(head.hidden, [tall, deep]), (head.weight, [wide, deep])]
    if slopes is not None:
        tiles.append((slopes, [tall, wide // config["PARTS"]]))
    tma = by_tma(head.hidden, head.weight)
    return [operand(tensor, tile, tma) for tensor, tile in tiles]


def _constants(head: Head) -> dict[str, int]:
    """What is compiled in."""
    return {"TMA": by_tma(head.hidden, head.weight), "MASKS": _masks(head), "PROGRAMS": _programs()}


def _mask(head: Head) -> Tensor:
    """The mask as bytes; anything where there is none, since nothing reads it."""
    return head.targets if head.allowed is None else head.allowed.view(torch.uint8)


def _masks(head: Head) -> int:
    """Dimensions of the mask, 0 for none."""
    return 0 if head.allowed is None else head.allowed.dim()


def _mask_row(head: Head) -> int:
    """Elements from one token's mask to the next; 0 when all share one."""
    return head.allowed.shape[1] if head.allowed is not None and head.allowed.dim() == 2 else 0


def _programs() -> int:
    return machine().multiprocessors
