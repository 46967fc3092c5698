"""Compile every kernel for an H200 on a machine without a GPU, and report the output of NVIDIA's assembler: `python -m
triplane_kernels.compiled`.

Public operators run on CPU tensors with a Triton driver that only knows the target: launches stop after compilation to
machine code. Each tuning candidate is a row: registers, spills, shared memory, matrix and copy instructions, width of
memory accesses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from triplane_kernels import machine as machine_module
from triplane_kernels import tuning
from triplane_kernels.compiled_cases import CASES, FIRST_ALONE
from triplane_kernels.machine import Machine
from triplane_kernels.tuning import Config, Results

H200 = Machine("NVIDIA H200", triton.__version__, False, (9, 0), 132, gluon=True)
MOST_SHARED = 227 * 1024
"""Maximum shared memory of one thread block on compute capability 9.0, in bytes."""
_REGISTERS, _SHARED, _THREADS, _BLOCKS = 65536, 228 * 1024, 2048, 32
"""Resources of a multiprocessor; each thread block reserves 1 KiB of shared memory."""
_BEGIN, _END = "<!-- compiled: begin -->", "<!-- compiled: end -->"


@dataclass(frozen=True)
class Compiled:
    """One kernel in one configuration."""

    case: str
    kernel: str
    config: str
    registers: int = 0
    stack: int = 0
    """Local memory per thread, in bytes: spilled registers and arrays indexed at run time."""
    shared: int = 0
    """Bytes of shared memory."""
    blocks: int = 0
    """Thread blocks that fit on a multiprocessor."""
    matrix: tuple[str, ...] = ()
    """Kinds of wgmma instructions in the PTX."""
    copies: str = ""
    """Copies of tiles to shared memory: "TMA", "cp.async", or "" if tiles go straight to registers."""
    load_bits: int = 0
    """Width of the global loads that move most bytes; 0 if TMA or cp.async do all copies."""
    store_bits: int = 0
    serialized: bool = False
    """Whether the assembler serializes all wgmma instructions (warning C7514), since other code accesses accumulators
    in flight.
    """
    refused: str = ""
    """Reason why it does not compile or fit; the numbers then have no meaning."""


class _Target:
    """Triton driver with only the target that the compiler needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_case(name: str, *, first: bool = False) -> Iterator[Compiled]:
    """All launches of case `name`, without duplicate kernels and configurations. first: only the first configuration of
    each kernel.
    """
    kept: list[tuple[str, Any]] = []
    refused: list[Compiled] = []
    current = ["fixed"]

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        options.pop("warmup", None)
        kept.append((current[0], launch(self, *args, warmup=True, **options)))

    def every_candidate(op: str, candidates: Sequence[Config], run: Callable[[Config], Results]) -> Config:
        for candidate in candidates[: 1 if first or name in FIRST_ALONE else None]:
            current[0] = _text(candidate)
            try:
                run(candidate)
            except Exception as error:  # noqa: BLE001  the compiler raises many types
                refused.append(Compiled(name, op, current[0], refused=(str(error).splitlines() or ["?"])[-1]))
        current[0] = "fixed"
        return dict(candidates[0])

    launch, search = JITFunction.run, tuning.search
    JITFunction.run, tuning.search = compile_only, every_candidate
    try:
        with tuning.searching():
            CASES[name]()
    finally:
        JITFunction.run, tuning.search = launch, search
    yield from refused
    distinct: dict[str, tuple[str, Any]] = {}
    for config, kernel in kept:
        distinct.setdefault(kernel.hash, (config, kernel))
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield from pool.map(lambda found: _describe(name, *found), distinct.values())


def pretend() -> None:
    """Make this process choose and launch kernels permanently as on an H200."""
    triton.runtime.driver.set_active(_Target())
    machine_module._probe = lambda interpreter, index: H200  # type: ignore[assignment]
    machine_module._obstacle = lambda here, on_cuda, tensors: None


def _text(config: Config) -> str:
    """A configuration in one short line, without the prefixes BLOCK_ and num_."""
    return " ".join(f"{name.removeprefix('BLOCK_').removeprefix('num_')}={value}" for name, value in config.items())


def _describe(case: str, config: str, kernel: Any) -> Compiled:
    metadata, ptx = kernel.metadata, kernel.asm["ptx"]
    try:
        said = _assemble(ptx)
    except subprocess.CalledProcessError as error:
        return Compiled(case, metadata.name, config, refused=error.stderr.strip().splitlines()[-1])
    registers, stack = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes stack frame", said)
    if registers is None or stack is None:
        raise RuntimeError(f"{metadata.name}: ptxas tells no registers: {said}")
    warps = metadata.num_warps
    copies = "TMA" if "cp.async.bulk.tensor" in ptx else "cp.async" if "cp.async.c" in ptx else ""
    return Compiled(
        case,
        metadata.name,
        config,
        int(registers[1]),
        int(stack[1]),
        metadata.shared,
        _blocks(int(registers[1]), warps, metadata.shared),
        tuple(sorted(set(re.findall(r"wgmma\.mma_async\S*?(m\d+n\d+k\d+\S*)", ptx)))),
        copies,
        _width(ptx, "ld"),
        _width(ptx, "st"),
        "C7514" in said,
        _obstacle(metadata.shared, kernel.asm.get("ttir", "")),  # Gluon has none
    )


def _obstacle(shared: int, ttir: str) -> str:
    """Why a compiled kernel must not run; "" if it may."""
    if shared > MOST_SHARED:
        return f"{shared} bytes of shared memory, more than {MOST_SHARED}"
    stored = set(re.findall(r"tt\.store %\S+, (%[^\s,]+)", ttir))
    turned = set(re.findall(r"tt\.trans (%\S+) .*: tensor<[0-9x]*f8E4M3FN", ttir))
    if stored & turned:
        return "stores codes and their transpose, which ptxas 12.9 compiles wrongly: see quantize_triton.transpose"
    return ""


def _blocks(registers: int, warps: int, shared: int) -> int:
    """Number of thread blocks per multiprocessor; registers are allocated in units of 8 per thread."""
    threads = 32 * warps
    return min(
        _BLOCKS, _THREADS // threads, _REGISTERS // (-(-registers // 8) * 8 * threads), _SHARED // (shared + 1024)
    )


def _width(ptx: str, access: str) -> int:
    """Width in bits of the global memory access ("ld" or "st") that moves most bytes."""
    moved: dict[int, int] = {}
    for count, bits in re.findall(rf"\b{access}\.global[a-z0-9_.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx):
        width = int(count or 1) * int(bits)
        moved[width] = moved.get(width, 0) + width
    return max(moved, key=lambda width: (moved[width], width), default=0)


def _assemble(ptx: str) -> str:
    """Output of NVIDIA's assembler for the PTX."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        return subprocess.run(
            [tool, "-v", "--gpu-name=sm_90a", source, "-o", Path(folder) / "kernel.cubin"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr


def table(rows: Sequence[Compiled]) -> str:
    """Markdown table of the rows."""
    lines = [
        (
            f"Compiled for compute capability 9.0 on {date.today()} by Triton {triton.__version__}, torch"
            f" {torch.__version__}. Spills are bytes a thread; shared memory is KiB of 227; blocks are those that fit a"
            " multiprocessor."
        ),
        "",
        "| case | kernel | configuration | registers | spills | shared | blocks | wgmma | tiles by | loads, stores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row.case} | `{row.kernel}` | {row.config} "
        if row.refused:
            lines.append(f"{start}| refused: {row.refused} | | | | | | |")
            continue
        matrix = ", ".join(kind.replace(".f32.", " ") for kind in row.matrix) + (
            " SERIALIZED" if row.serialized else ""
        )
        lines.append(
            f"{start}| {row.registers} | {row.stack} | {row.shared / 1024:.0f} | {row.blocks} | {matrix} | {row.copies}"
            f" | {row.load_bits}, {row.store_bits} bits |"
        )
    return "\n".join(lines)


def write_between(path: Path, text: str) -> None:
    """Replace the text between the two marks of a Markdown file. Raises ValueError if a mark is missing."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{path} has no {_BEGIN} ... {_END}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the named cases, or all.

    Returns the exit code: 1 if a first configuration does not compile, 2 under the interpreter.
    """
    parser = argparse.ArgumentParser(
        prog="python -m triplane_kernels.compiled",
        description="What each kernel's configurations compile to on an H200. Needs Triton and no GPU.",
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without")
    parser.add_argument("--first", action="store_true", help="the first configuration of each kernel alone")
    parser.add_argument("--json", action="store_true", help="a JSON object a line, as each is compiled")
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"put the table between {_BEGIN} and {_END} of FILE")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.cases) - set(CASES)
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if machine_module.machine().interpreter:
        print("compiled: the interpreter compiles nothing: unset TRITON_INTERPRET", file=sys.stderr)
        return 2
    pretend()
    rows = []
    for name in chosen.cases or CASES:
        for found in compile_case(name, first=chosen.first):
            rows.append(found)
            if chosen.json:
                print(json.dumps(asdict(found)), flush=True)
    if chosen.write is not None:
        write_between(chosen.write, table(rows))
    elif not chosen.json:
        print(table(rows))
    return 1 if chosen.first and any(row.refused for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
