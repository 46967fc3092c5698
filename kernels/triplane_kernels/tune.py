"""Finds launch configurations for this machine's GPU and writes them where every user of this device gets them: `python -m triplane_kernels.tune`.

Runs each op's workloads with a search at every lookup. Needs a CUDA device; takes minutes.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

import triplane_kernels
from triplane_kernels.machine import machine
from triplane_kernels.tuning import WORKLOADS, device_file, read_table, searching, write_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the named ops, or all. Returns the exit code: 2 where there is nothing to tune on."""
    for module in pkgutil.iter_modules(triplane_kernels.__path__):
        if not module.name.endswith(("_triton", "_gluon", "tune")):
            importlib.import_module(f"triplane_kernels.{module.name}")
    parser = argparse.ArgumentParser(prog="python -m triplane_kernels.tune", description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(sorted(WORKLOADS))}; all without")
    parser.add_argument("--out", type=Path, help="file to write; the package's own for this device without")
    chosen = parser.parse_args(arguments)
    here = machine()
    unknown = set(chosen.ops) - set(WORKLOADS)
    if unknown:
        parser.error(f"no op {', '.join(sorted(unknown))}; there are {', '.join(sorted(WORKLOADS))}")
    if here.capability is None or here.interpreter or here.triton is None or not here.fp8:
        print(
            f"tune: {here.device} runs no FP8 kernels: it takes a CUDA GPU of compute capability 8.9 or newer and Triton",
            file=sys.stderr,
        )
        return 2
    path = chosen.out or device_file(here.device)
    table = read_table(path)
    for op in chosen.ops or sorted(WORKLOADS):
        for shape in WORKLOADS[op].shapes:
            with searching() as found:
                WORKLOADS[op].run(*shape)
            for name, configurations in found.items():
                table.setdefault(name, {}).update(configurations)
                print(f"{name} {configurations}", flush=True)
        write_table(path, table)
    print(f"tune: wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
