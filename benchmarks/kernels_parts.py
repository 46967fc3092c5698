"""Parts of the `kernels` benchmark, and the measurement of their cases."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from benchmarks.kernels_case import Case, Measured, Sizes, relative_error
from benchmarks.kernels_clock import Clock
from contracts.errors import ConfigError

PARTS: Mapping[str, tuple[str, str]] = {
    "quantizers": ("kernels_rows", "quantizers"),
    "permutation": ("kernels_rows", "permutation"),
    "activation": ("kernels_rows", "activation"),
    "norms": ("kernels_rows", "norms"),
    "router": ("kernels_rows", "router"),
    "dense product": ("kernels_products", "dense"),
    "grouped deepseek": ("kernels_products", "grouped_deepseek"),
    "grouped qwen": ("kernels_products", "grouped_qwen"),
    "grouped qwen down": ("kernels_products", "grouped_qwen_down"),
    "loss head": ("kernels_layers", "loss_head_rows"),
    "expert layer": ("kernels_layers", "expert_layer_rows"),
    # last: hand-written for Hopper, and so the most likely part to crash on another GPU
    "Gluon": ("kernels_products", "grouped_gluon"),
}
"""Name -> (module, function). The function returns cases for (sizes, device), or measurements for (sizes, clock)."""
SAME = 0.1
"""Largest relative distance between results of the same product in different precisions."""


def chosen_parts(only: str) -> list[str]:
    """Parts whose name contains one of the comma-separated pieces of `only`; all for "".

    Raises ConfigError if no name contains a piece.
    """
    pieces = [piece.strip() for piece in only.split(",") if piece.strip()]
    for piece in pieces:
        if not any(piece in name for name in PARTS):
            raise ConfigError(f"--only={only}: no part has {piece!r} in its name: {', '.join(PARTS)}")
    return [name for name in PARTS if not pieces or any(piece in name for piece in pieces)]


def measure(part: str, sizes: Sizes, clock: Clock, ceilings: Mapping[str, float]) -> Iterator[Measured]:
    """Yield the result of each case of a part; a case that raises gives a wrong row with the error."""
    module, function = PARTS[part]
    # imported late: the interpreter must be switched on or off before Triton is imported
    found = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    if module == "kernels_layers":
        yield from found(sizes, clock)
        return
    for case in found(sizes, clock.device):
        try:
            yield _measure_case(case, clock, ceilings)
        except Exception as failure:  # noqa: BLE001  a kernel that the device refuses is a row, not the end
            yield Measured.failed(case.name, case.shape, failure)


def _measure_case(case: Case, clock: Clock, ceilings: Mapping[str, float]) -> Measured:
    seconds, error = clock.seconds(case.work), case.error()
    amount = case.amount() if callable(case.amount) else case.amount
    rate = amount / seconds / 1e12
    ceiling = ceilings.get("copy_tb_per_s" if case.unit == "TB/s" else "bf16_product_tflops")
    beside, notes = [], []
    for name, make in case.peers.items():
        try:
            peer = make()
            off = _distance(peer(), case.work())
            beside.append(f"{name} {amount / clock.seconds(peer) / 1e12:.4g}")
        except Exception as refused:  # noqa: BLE001  what torch or the device lacks raises many types
            reason = (str(refused).splitlines() or [type(refused).__name__])[0][:120]
            notes.append(f"{case.name}, {case.shape}: {name} does not run here: {reason}")
            continue
        if not off <= SAME:
            notes.append(f"{case.name}, {case.shape}: {name} computes something else (relative distance {off:.2g})")
    row: dict[str, Any] = {
        "kernel": case.name,
        "shape": case.shape,
        "ms": seconds * 1e3,
        "rate": f"{rate:.4g} {case.unit}",
        "of ceiling": f"{100 * rate / ceiling:.0f}%" if ceiling else "",
        "error": error,
        "right": bool(error <= case.bound),
        "beside": ", ".join(beside),
    }
    return Measured(row, {} if case.metric is None else {case.metric: rate}, case.best, tuple(notes))


def _distance(theirs: object, ours: object) -> float:
    """Relative distance of two results, if both are one tensor of the same shape; 0 if they can't be compared."""
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor) or theirs.shape != ours.shape:
        return 0.0
    return relative_error(theirs, ours)
