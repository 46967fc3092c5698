"""Compiles for an H200, on a machine without a GPU, what the public operators would launch there, and prints a line for each kernel.

    python tests/kernels/hopper_compile.py [OP ...]    (a process of its own: Triton must not be interpreted in it)

The operators run over CPU tensors with Triton's driver replaced by one that knows the target alone: launches stop after compilation to machine code.
Every configuration that tuning would try is compiled; a kernel's line tells registers, stack (spills), shared memory and matrix instructions.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triplane_kernels import machine as machine_module
from triplane_kernels import tuning
from triplane_kernels.machine import Machine
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

H200 = Machine("NVIDIA H200", triton.__version__, False, (9, 0), 132, gluon=True)
CASES: dict[str, Callable[[], object]] = {}


@dataclass(frozen=True)
class Compiled:
    """One kernel in one configuration."""

    op: str
    kernel: str
    options: str
    registers: int
    stack: int
    """Bytes a thread keeps in local memory: spilled registers and arrays indexed at run time."""
    shared: int
    """Bytes of shared memory."""
    matrix: tuple[str, ...]
    """Kinds of wgmma instructions in the PTX."""


class _Target:
    """What Triton's compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def case(op: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def register(run: Callable[[], object]) -> Callable[[], object]:
        CASES[op] = run
        return run

    return register


def compile_case(op: str) -> Iterator[Compiled]:
    """Everything that case `op` launches, each kernel and configuration once."""
    kept: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        options.pop("warmup", None)
        kept.append(run(self, *args, warmup=True, **options))

    JITFunction.run = compile_only
    try:
        CASES[op]()
    finally:
        JITFunction.run = run
    seen = set()
    for kernel in kept:
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            yield _describe(op, kernel)


def _describe(op: str, kernel: Any) -> Compiled:
    registers, stack = _resources(kernel.asm["cubin"])
    metadata = kernel.metadata
    matrix = tuple(sorted(set(re.findall(r"wgmma\.mma_async\S*?(m\d+n\d+k\d+\S*)", kernel.asm["ptx"]))))
    options = f"warps={metadata.num_warps} stages={metadata.num_stages}"
    return Compiled(op, metadata.name, options, registers, stack, metadata.shared, matrix)


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def pretend() -> None:
    """Make this process choose and launch as on an H200."""
    triton.runtime.driver.set_active(_Target())
    machine_module._probe = lambda interpreter, index: H200
    machine_module._obstacle = lambda here, on_cuda, tensors: None
    tuning._packaged = lambda device: {}
    tuning.read_table = lambda path: {}
    tuning._keep = lambda op, name, found: None
    tuning._remembered.clear()

    def every_candidate(op: str, candidates: Sequence[tuning.Config], run: Callable[[tuning.Config], object]) -> tuning.Config:
        for candidate in candidates:
            run(candidate)
        return candidates[0]

    tuning.search = every_candidate
    torch.cuda.is_current_stream_capturing = lambda: False


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@case("quantize")
def _quantize() -> None:
    from triplane_kernels.quantize import quantize_activations, quantize_both, quantize_mx, quantize_weights_both

    x = drawn(256, 1024)
    quantize_activations(x)
    quantize_activations(x, power_of_two=True, stochastic_seed=3)
    quantize_both(x)
    quantize_both(x, stochastic_seed=2**40)
    quantize_mx(x)
    quantize_mx(x, stochastic_seed=3)
    quantize_weights_both(drawn(2, 256, 512, dtype=torch.float32))


@case("grouped_gemm")
def _grouped_gemm() -> None:
    from triplane_kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad

    e4m3, offsets = torch.float8_e4m3fn, torch.zeros(9, dtype=torch.int32)
    rows = drawn(4096, 1024, dtype=e4m3), drawn(8, 4096, dtype=torch.float32).t()
    matrices = drawn(8, 512, 1024, dtype=e4m3), drawn(8, 4, 8, dtype=torch.float32)
    grouped_gemm(rows, matrices, offsets)
    sides = [(drawn(size, 4096, dtype=e4m3), drawn(32, size, dtype=torch.float32).t()) for size in (512, 1024)]
    grouped_gemm_wgrad(*sides, offsets)
    plain, plain_matrices, grad = drawn(4096, 1024), drawn(8, 512, 1024), drawn(4096, 512)
    grouped_gemm(plain, plain_matrices, offsets)
    grouped_gemm_dgrad(grad, plain_matrices, offsets)
    grouped_gemm_wgrad(grad, plain, offsets)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", default=sorted(CASES), help=f"of {', '.join(sorted(CASES))}; all without")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    chosen = parser.parse_args(arguments)
    pretend()
    for op in chosen.ops:
        for found in compile_case(op):
            line = f"{found.kernel:28} {found.options:20} registers {found.registers:3} stack {found.stack:4} shared {found.shared:6}"
            print(json.dumps(asdict(found)) if chosen.json else f"{line} {' '.join(found.matrix)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
