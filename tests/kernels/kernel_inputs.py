"""The ways a kernel test runs, inputs that every kernel must survive, and the distances by which results are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor
from triplane_kernels.tuning import Config, Results

T = TypeVar("T")
WayName = Literal["reference", "interpreter", "gpu"]
E4M3_MAX = 448.0
SQNR_FORWARD = 28.0
"""dB of an FP8 product of Gaussian data against the unquantized one."""
SQNR_GRADIENT = 25.0
DIFFERENCE = 1e-3
"""Largest `difference` of an FP8 product against the unquantized one."""
EXACT = 1e-5
"""Largest `relative_error` of a kernel against the float64 reference on the same codes and scales."""


@dataclass(frozen=True)
class Way:
    """How the kernels of one test are computed: what the fixture `way` gives."""

    name: WayName
    device: torch.device

    def pick(self, small: T, real: T) -> T:
        """`real` on a GPU, else `small`: the interpreter runs a program of a grid in milliseconds."""
        return real if self.name == "gpu" else small


def first_that_fits(op: str, candidates: Sequence[Config], run: Callable[[Config], Results]) -> Config:
    """The first configuration that the device does not refuse for its shared memory or registers."""
    from triton.runtime.errors import OutOfResources

    for candidate in candidates[:-1]:
        try:
            run(candidate)
        except OutOfResources:
            continue
        return dict(candidate)
    return dict(candidates[-1])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """float32, standard normal times spread."""
    return torch.randn(shape, generator=generator(seed)) * spread


def heavy_tailed(rows: int, columns: int, seed: int) -> Tensor:
    """Student's t with two degrees of freedom: no variance, so a few values rule their blocks."""
    chi = normal(2, rows, columns, seed=seed + 1).square().sum(0) / 2
    return normal(rows, columns, seed=seed) / chi.sqrt().clamp(min=1e-4)


def zeros(rows: int, columns: int, seed: int) -> Tensor:
    return torch.zeros(rows, columns)


def some_zero_blocks(rows: int, columns: int, seed: int) -> Tensor:
    """Every second block of 32 columns is zero, of both signs."""
    kept = (torch.arange(columns) // 32 % 2).float()
    return normal(rows, columns, seed=seed) * kept


def denormals(rows: int, columns: int, seed: int) -> Tensor:
    """Below float32's smallest normal number, 2**-126."""
    return normal(rows, columns, seed=seed) * 2.0**-130


def tiny(rows: int, columns: int, seed: int) -> Tensor:
    """Normal numbers whose FP8 scale would be denormal."""
    return normal(rows, columns, seed=seed) * 2.0**-120


def huge(rows: int, columns: int, seed: int) -> Tensor:
    """Near float32's largest number, 3.4e38, none above."""
    return normal(rows, columns, seed=seed).clamp(-3, 3) * 1e38


def e4m3_edges(rows: int, columns: int, seed: int) -> Tensor:
    """Each row of a block holds 448, so its scale is 1; the rest are codes, midpoints between codes and their
    neighbours in float32.
    """
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    below, above = (torch.nextafter(middles, torch.full_like(middles, limit)) for limit in (0.0, 1e9))
    values = torch.cat([codes, middles, below, above])
    values = torch.cat([values, -values])
    picks = torch.randint(values.numel(), (rows, columns), generator=generator(seed))
    matrix = values[picks]
    matrix[:, ::32] = E4M3_MAX
    return matrix


def outlier_a_block(rows: int, columns: int, seed: int) -> Tensor:
    """One value a thousand times the others in every 32 columns of every row."""
    matrix = normal(rows, columns, seed=seed)
    matrix[:, 5::32] *= 1000
    return matrix


def one_nan(rows: int, columns: int, seed: int) -> Tensor:
    return _with(rows, columns, seed, float("nan"))


def one_infinity(rows: int, columns: int, seed: int) -> Tensor:
    return _with(rows, columns, seed, float("-inf"))


def _with(rows: int, columns: int, seed: int, value: float) -> Tensor:
    matrix = normal(rows, columns, seed=seed)
    if matrix.numel():
        matrix[rows // 2, columns // 3] = value
    return matrix


FINITE: Mapping[str, Callable[[int, int, int], Tensor]] = {
    "normal": lambda rows, columns, seed: normal(rows, columns, seed=seed),
    "heavy_tailed": heavy_tailed,
    "zeros": zeros,
    "some_zero_blocks": some_zero_blocks,
    "denormals": denormals,
    "tiny": tiny,
    "huge": huge,
    "e4m3_edges": e4m3_edges,
    "outlier_a_block": outlier_a_block,
}
"""Name -> maker(rows, columns, seed) of a float32 matrix without NaN or infinity."""

NOT_FINITE: Mapping[str, Callable[[int, int, int], Tensor]] = {"one_nan": one_nan, "one_infinity": one_infinity}

GROUPS: Mapping[str, tuple[int, ...]] = {
    "even": (128, 128, 128),
    "ragged": (1, 130, 77, 3),
    "empty_ones": (0, 64, 0, 0, 200, 0),
    "one_takes_all": (0, 0, 300, 0),
    "all_empty": (0, 0, 0),
    "single": (17,),
}
"""Name -> rows of each group (each expert)."""


def offsets_of(rows: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """int32 [groups + 1]: group g holds rows offsets[g] to offsets[g + 1]."""
    return torch.tensor([0, *rows]).cumsum(0).to(dtype=torch.int32, device=device)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||, in float64; 0 where both are zero."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    distance, size = (found - wanted).norm(), wanted.norm()
    return float(distance / size) if size > 0 else float(distance)


def sqnr(found: Tensor, wanted: Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    error = relative_error(found, wanted)
    return float("inf") if error == 0 else float(-20 * torch.tensor(error, dtype=torch.float64).log10())


def difference(found: Tensor, wanted: Tensor) -> float:
    """1 - 2<x, y> / (<x, x> + <y, y>): DeepGEMM's distance; 0 where both are zero."""
    found, wanted = found.detach().double().cpu().flatten(), wanted.detach().double().cpu().flatten()
    sizes = found @ found + wanted @ wanted
    return float(1 - 2 * (found @ wanted) / sizes) if sizes > 0 else 0.0


def cosine(found: Tensor, wanted: Tensor) -> float:
    """Cosine of the angle between two tensors read as vectors."""
    found, wanted = found.detach().double().cpu().flatten(), wanted.detach().double().cpu().flatten()
    return float(found @ wanted / (found.norm() * wanted.norm()))
