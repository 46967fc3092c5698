"""The FP8 grouped product for Hopper in Gluon, warp-specialized: one warp copies tiles by TMA, two warpgroups multiply
half a tile each.

    producer: wait for an empty stage, TMA a and b into it --ready--> consumers: two blocks' wgmma, scaled and added in
    turn --empty-->

The warpgroups wait for no other, and one adds (the promotion of DeepSeek-V3, section 3.3.2) while the other keeps the
tensor cores busy. Tiles are dealt to persistent programs as in `grouped_gemm_triton`; every partition walks the groups
on the device.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from triplane_kernels.machine import machine
from triplane_kernels.tuning import Config

DEPTH = gl.constexpr(128)
HALF = gl.constexpr(64)
"""Rows of a tile that one warpgroup multiplies."""
ROWS = gl.constexpr(128)
CONFIGS: list[Config] = [
    {"GLUON": 1, "BLOCK_N": columns, "STAGES": stages, "BAND": band}
    for columns, stages, band in ((128, 5, 8), (128, 6, 16), (64, 8, 16))
]
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
MOST_REGISTERS = 65536 // (12 * 32) // 8 * 8
"""A thread's, at launch: a multiprocessor's, over two consumers' and a producer's four warps."""


def grouped_gemm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, offsets: Tensor, out: Tensor, config: Config
) -> None:
    """out [M, N] = rows of a times their groups' matrices, as `grouped_gemm_reference`: a [M, K], b [G, N, K], K a
    multiple of 16.
    """
    (rows, depth), (groups, columns, _) = a.shape, b.shape
    wide = config["BLOCK_N"]
    tiles = (triton.cdiv(rows, ROWS.value) + groups) * triton.cdiv(columns, wide)
    _kernel[(min(tiles, machine().multiprocessors),)](
        _descriptor(a, ROWS.value),
        _descriptor(b.view(-1, depth), wide),
        out,
        a_scales,
        b_scales,
        offsets,
        rows,
        columns,
        depth,
        groups,
        *a_scales.stride(),
        *b_scales.stride(),
        STAGES=config["STAGES"],
        BAND=config["BAND"],
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=MOST_REGISTERS,
    )


def _descriptor(matrix: Tensor, rows: int) -> TensorDescriptor:
    block = [rows, DEPTH.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)


@gluon.jit
def _kernel(
    a_tiles: tma.tensor_descriptor,
    b_tiles: tma.tensor_descriptor,
    out: gl.tensor,
    a_scales: gl.tensor,
    b_scales: gl.tensor,
    offsets: gl.tensor,
    rows: gl.tensor,
    columns: gl.tensor,
    depth: gl.tensor,
    groups: gl.tensor,
    a_scale_row: gl.tensor,
    a_scale_column: gl.tensor,
    b_scale_matrix: gl.tensor,
    b_scale_row: gl.tensor,
    b_scale_column: gl.tensor,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
) -> None:
    a_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES] + a_tiles.block_type.shape, a_tiles.layout)  # noqa: RUF005  Triton has no starred lists
    b_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES] + b_tiles.block_type.shape, b_tiles.layout)  # noqa: RUF005  Triton has no starred lists
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    stages = (a_stages, b_stages, ready, empty)
    scales = (a_scales, b_scales, a_scale_row, a_scale_column, b_scale_matrix, b_scale_row, b_scale_column)
    sizes = (offsets, rows, columns, depth, groups)
    BLOCK_N: gl.constexpr = b_tiles.block_type.shape[0]
    gl.warp_specialize(
        [
            (_consume, (stages, scales, sizes, out, 0, BLOCK_N, STAGES, BAND)),
            (_consume, (stages, scales, sizes, out, HALF, BLOCK_N, STAGES, BAND)),
            (_produce, (a_tiles, b_tiles, stages, sizes, STAGES, BAND)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    a_tiles: tma.tensor_descriptor,
    b_tiles: tma.tensor_descriptor,
    stages: gl.tuple,
    sizes: gl.tuple,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
) -> None:
    """Copies the operands of this program's tiles, STAGES blocks ahead at most."""
    a_stages, b_stages, ready, empty = stages
    offsets, _rows, columns, depth, groups = sizes
    BLOCK_N: gl.constexpr = b_tiles.block_type.shape[0]
    across = gl.cdiv(columns, BLOCK_N)
    at = gl.program_id(0)
    first, start, block = 0, gl.load(offsets), 0
    for group in range(groups):
        end = gl.load(offsets + group + 1)
        down = gl.cdiv(end - start, ROWS)
        for within in range(at - first, down * across, gl.num_programs(0)):
            row, column = _place(within, down, across, BAND)
            for step in range(gl.cdiv(depth, DEPTH)):
                stage = block % STAGES
                bar = ready.index(stage)
                mbarrier.wait(empty.index(stage), (block // STAGES & 1) ^ 1)
                mbarrier.expect(bar, a_tiles.block_type.nbytes + b_tiles.block_type.nbytes)
                tma.async_copy_global_to_shared(a_tiles, [start + row * ROWS, step * DEPTH], bar, a_stages.index(stage))
                tma.async_copy_global_to_shared(
                    b_tiles, [group * columns + column * BLOCK_N, step * DEPTH], bar, b_stages.index(stage)
                )
                block += 1
            at += gl.num_programs(0)
        first += down * across
        start = end


@gluon.jit
def _consume(
    stages: gl.tuple,
    scales: gl.tuple,
    sizes: gl.tuple,
    out: gl.tensor,
    FIRST: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
) -> None:
    """Multiplies, promotes and stores the HALF rows from FIRST of this program's tiles; rows after the last group are
    zeros.
    """
    offsets, rows, columns, depth, groups = sizes
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [4, 1], [1, 0])
    across = gl.cdiv(columns, BLOCK_N)
    at = gl.program_id(0)
    first, start, block = 0, gl.load(offsets), 0
    for group in range(groups + 1):
        end = gl.where(group < groups, gl.load(offsets + gl.minimum(group + 1, groups)), rows)
        down = gl.cdiv(end - start, ROWS)
        steps = gl.where(group < groups, gl.cdiv(depth, DEPTH), 0)
        for within in range(at - first, down * across, gl.num_programs(0)):
            tile_row, tile_column = _place(within, down, across, BAND)
            first_row = start + tile_row * ROWS + FIRST
            row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, ACC))
            total = _accumulate(
                stages, scales, row, end, group, tile_column * BLOCK_N, steps, block, FIRST, BLOCK_N, STAGES, ACC
            )
            block += steps
            kept = gl.convert_layout(total.to(out.dtype.element_ty), STORE)
            to_row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, STORE))
            to_column = tile_column * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, STORE))
            to = out + to_row.to(gl.int64)[:, None] * columns + to_column[None, :]
            gl.store(to, kept, mask=(to_row[:, None] < end) & (to_column[None, :] < columns))
            at += gl.num_programs(0)
        first += down * across
        start = end


@gluon.jit
def _accumulate(
    stages: gl.tuple,
    scales: gl.tuple,
    row: gl.tensor,
    end: gl.tensor,
    group: gl.tensor,
    column: gl.tensor,
    steps: gl.tensor,
    block: gl.tensor,
    FIRST: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ACC: gl.constexpr,
) -> gl.tensor:
    """The sum over `steps` blocks of depth of their scaled products; block counts the stages this program has used
    before.

    No product in flight is carried round the loop: copying one's registers would make the assembler wait for every
    instruction.
    """
    empty = stages[3]
    a_scales, b_scales, a_scale_row, a_scale_column, b_scale_matrix, b_scale_row, b_scale_column = scales
    a_scale = a_scales + row.to(gl.int64) * a_scale_row
    b_scale = b_scales + group.to(gl.int64) * b_scale_matrix + column // DEPTH * b_scale_row
    kept = row < end
    total = gl.zeros([HALF, BLOCK_N], gl.float32, ACC)
    for step in range(0, steps - 1, 2):
        even = _start(stages, block + step, FIRST, BLOCK_N, STAGES, ACC)
        odd = _start(stages, block + step + 1, FIRST, BLOCK_N, STAGES, ACC)
        scale = gl.load(a_scale + step * a_scale_column, mask=kept, other=0.0) * gl.load(
            b_scale + step * b_scale_column
        )
        next_scale = gl.load(a_scale + (step + 1) * a_scale_column, mask=kept, other=0.0)
        next_scale *= gl.load(b_scale + (step + 1) * b_scale_column)
        part = warpgroup_mma_wait(num_outstanding=1, deps=(even,))
        mbarrier.arrive(empty.index((block + step) % STAGES), count=1)
        total += part * scale[:, None]
        part = warpgroup_mma_wait(num_outstanding=0, deps=(odd,))
        mbarrier.arrive(empty.index((block + step + 1) % STAGES), count=1)
        total += part * next_scale[:, None]
    for step in range(steps // 2 * 2, steps):
        running = _start(stages, block + step, FIRST, BLOCK_N, STAGES, ACC)
        scale = gl.load(a_scale + step * a_scale_column, mask=kept, other=0.0) * gl.load(
            b_scale + step * b_scale_column
        )
        part = warpgroup_mma_wait(num_outstanding=0, deps=(running,))
        mbarrier.arrive(empty.index((block + step) % STAGES), count=1)
        total += part * scale[:, None]
    return total


@gluon.jit
def _start(
    stages: gl.tuple,
    block: gl.tensor,
    FIRST: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ACC: gl.constexpr,
) -> gl.tensor:
    """Wait for the operands of a block and start their product into fresh registers."""
    a_stages, b_stages, ready, _empty = stages
    stage = block % STAGES
    mbarrier.wait(ready.index(stage), block // STAGES & 1)
    nothing = gl.zeros([HALF, BLOCK_N], gl.float32, ACC)
    a_half = a_stages.index(stage).slice(FIRST, HALF, dim=0)
    return warpgroup_mma(a_half, b_stages.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _place(within: gl.tensor, down: gl.tensor, across: gl.tensor, BAND: gl.constexpr) -> gl.tuple:
    """Row and column of tile `within` in a grid of down x across tiles: bands of BAND rows, each walked column by
    column.
    """
    band = within // (BAND * across)
    height = gl.minimum(down - band * BAND, BAND)
    rest = within - band * BAND * across
    return band * BAND + rest % height, rest // height
