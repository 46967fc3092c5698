"""Process that `tune` starts: runs workloads with a search at every lookup, and reports tries and results on standard
output.

Standard input: one JSON object {"work": [[op, shape], ...], "skipped": [[op, configuration], ...]}. Output, one JSON
object per line: {"trying": [op, configuration]} before each, {"done": [op, shape], "found": table} after each workload,
{"failed": [op, shape], "why": text}.
"""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
import sys

import torch

import triplane_kernels
from triplane_kernels.tuning import WORKLOADS, Config, Workload, searching


def load_workloads() -> dict[str, Workload]:
    """Workloads of all ops, after importing the modules that register them."""
    for module in pkgutil.iter_modules(triplane_kernels.__path__):
        if not module.name.endswith(("_triton", "_gluon")) and not module.name.startswith(("tune", "compiled")):
            importlib.import_module(f"triplane_kernels.{module.name}")
    return WORKLOADS


def main() -> int:
    """Run until the work is done. Returns 1 if the CUDA context is lost."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="tune: %(message)s")
    order = json.load(sys.stdin)
    skipped = [(op, config) for op, config in order["skipped"]]
    workloads = load_workloads()
    for op, shape in order["work"]:
        with searching(skipped, _announce) as found:
            try:
                workloads[op].run(*shape)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001  Triton and torch raise many types
                _tell({"failed": [op, shape], "why": (str(error).splitlines() or [type(error).__name__])[0]})
                if _context_is_lost():
                    return 1
                continue
        _tell({"done": [op, shape], "found": found})
        torch.cuda.empty_cache()
    return 0


def _announce(op: str, config: Config) -> None:
    _tell({"trying": [op, config]})


def _tell(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def _context_is_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001  torch raises several types
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
