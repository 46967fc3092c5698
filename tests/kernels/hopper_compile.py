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
    serialized: bool
    """The assembler makes every wgmma wait for the one before (its C7514), since something touches accumulators in flight."""


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
    metadata = kernel.metadata
    said = _assemble(kernel.asm["ptx"])
    registers, stack = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes stack frame", said)
    assert registers and stack, said
    matrix = tuple(sorted(set(re.findall(r"wgmma\.mma_async\S*?(m\d+n\d+k\d+\S*)", kernel.asm["ptx"]))))
    options = f"warps={metadata.num_warps} stages={metadata.num_stages}"
    return Compiled(
        op, metadata.name, options, int(registers[1]), int(stack[1]), metadata.shared, matrix, "C7514" in said
    )


def _assemble(ptx: str) -> str:
    """What NVIDIA's assembler says of the PTX."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        return subprocess.run(
            [tool, "-v", "--gpu-name=sm_90a", source, "-o", Path(folder) / "kernel.cubin"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip


def pretend(*, first: bool = False) -> None:
    """Make this process choose and launch as on an H200. first: of the configurations that tuning would try, the first alone."""
    triton.runtime.driver.set_active(_Target())
    machine_module._probe = lambda interpreter, index: H200
    machine_module._obstacle = lambda here, on_cuda, tensors: None
    tuning._packaged = lambda device: {}
    tuning.read_table = lambda path: {}
    tuning._keep = lambda op, name, found: None
    tuning._remembered.clear()

    def every_candidate(
        op: str, candidates: Sequence[tuning.Config], run: Callable[[tuning.Config], object]
    ) -> tuning.Config:
        for candidate in candidates[: 1 if first else None]:
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


@case("gemm")
def _gemm() -> None:
    from triplane_kernels.gemm import gemm

    a, b = drawn(512, 1024, dtype=torch.float8_e4m3fn), drawn(256, 1024, dtype=torch.float8_e4m3fn)
    gemm((a, drawn(8, 512, dtype=torch.float32).t()), (b, drawn(2, 8, dtype=torch.float32)))
    gemm((a, drawn(8, 512, dtype=torch.float32).t()), (b, drawn(8, 256, dtype=torch.float32).t()))


@case("permute")
def _permute() -> None:
    from triplane_kernels.permute import permute, unpermute

    experts = torch.zeros(4096, 8, dtype=torch.int32)
    permuted = permute(drawn(4096, 2048).requires_grad_(), experts, 128)
    unpermute(permuted.rows, permuted, drawn(4096, 8, dtype=torch.float32).requires_grad_()).sum().backward()


@case("route")
def _route() -> None:
    from triplane_kernels.router import route

    logits = drawn(4096, 128, dtype=torch.float32).requires_grad_()
    route(logits, 8)[0].sum().backward()
    route(logits, 8, bias=logits[0], scores="sigmoid", normalize=False)[0].sum().backward()


@case("swiglu")
def _swiglu() -> None:
    from triplane_kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_quantized, swiglu_quantized

    for width in (768, 700):
        gate_up, gradient = drawn(4096, 2 * width), drawn(4096, width)
        swiglu(gate_up)
        swiglu_backward(gradient, gate_up)
        swiglu_quantized(gate_up)
        swiglu_backward_quantized(gradient, gate_up)


@case("loss_head")
def _loss_head() -> None:
    from triplane_kernels.loss_head import loss_head

    for mask in (None, torch.ones(1024, 2048, dtype=torch.bool)):
        leaves = drawn(1024, 512).requires_grad_(), drawn(2048, 512).requires_grad_()
        loss_head(*leaves, torch.zeros(1024, dtype=torch.int64), allowed=mask)[0].sum().backward()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", default=sorted(CASES), help=f"of {', '.join(sorted(CASES))}; all without")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.add_argument("--first", action="store_true", help="the first configuration of each kernel alone")
    chosen = parser.parse_args(arguments)
    pretend(first=chosen.first)
    for op in chosen.ops:
        for found in compile_case(op):
            line = f"{found.kernel:28} {found.options:20} registers {found.registers:3} stack {found.stack:4} shared {found.shared:6}"
            print(
                json.dumps(asdict(found))
                if chosen.json
                else f"{line} {' '.join(found.matrix)}{' SERIALIZED' if found.serialized else ''}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
