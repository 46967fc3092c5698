"""Capabilities of this machine, and the choice of an op's implementation.

    tensors, TRIPLANE_KERNELS --choose--> "reference" (torch, anywhere) | "triton" (CUDA, or the interpreter) | "gluon"
    (Hopper)

If a kernel can't run, the reference runs instead, with one log line; if the kernel was requested by name, that is an
error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, cast

import torch
from torch import Tensor

from triplane_kernels.errors import KernelInputError, KernelUnavailable

Way = Literal["reference", "triton", "gluon"]
FORCE = "TRIPLANE_KERNELS"
"""Environment variable that forces one implementation for every op: reference, triton or gluon."""
GLUON_OPS = frozenset({"grouped_gemm"})
"""Ops with a Gluon version; if the environment forces "gluon", the others run on Triton."""
_WAYS = ("reference", "triton", "gluon")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """Capabilities found at run time, for the current CUDA device if there is one."""

    device: str
    """The CUDA device's name, "Triton interpreter" or "CPU"."""
    triton: str | None
    """Triton's version; None if it can't be imported."""
    interpreter: bool
    """Whether Triton's kernels run on the CPU, under its interpreter (TRITON_INTERPRET=1, set before Triton is
    imported).
    """
    capability: tuple[int, int] | None
    """CUDA compute capability; None without a CUDA device."""
    multiprocessors: int
    """Streaming multiprocessors of the CUDA device; 1 without one."""
    gluon: bool
    """Whether Gluon can be imported and the device has Hopper's warpgroup matrix instructions."""

    @property
    def fp8(self) -> bool:
        """Whether the matrix units support FP8: Ada (8.9), Hopper (9.0) and later."""
        return self.capability is not None and self.capability >= (8, 9)

    @property
    def tma(self) -> bool:
        """Whether the tensor memory accelerator copies tiles by descriptor: Hopper (9.0) and later."""
        return self.capability is not None and self.capability >= (9, 0)


def machine() -> Machine:
    """Capabilities of this process now; cheap after the first call."""
    cuda = torch.cuda.is_available()
    return _probe(_interpreting(), torch.cuda.current_device() if cuda else None)


def choose(op: str, *tensors: Tensor, wanted: str | None = None) -> Way:
    """The implementation that `op` runs on `tensors`.

    wanted: forces one; it overrides the environment variable TRIPLANE_KERNELS. Default: Triton for CUDA tensors, and
    for CPU tensors under Triton's interpreter; else the reference, also for float64, which kernels don't support.
    Raises KernelUnavailable if the forced one can't run, KernelInputError for an unknown name or tensors on several
    devices.
    """
    named = wanted or forced()
    if named is not None and named not in _WAYS:
        raise KernelInputError(f"{op}: no implementation {named!r}; use one of {', '.join(_WAYS)} ({FORCE} or wanted=)")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise KernelInputError(f"{op}: tensors lie on {', '.join(sorted(map(str, devices)))}; move them to one device")
    if named == "reference":
        return "reference"
    here = machine()
    on_cuda = any(device.type == "cuda" for device in devices)
    obstacle = _obstacle(here, on_cuda, tensors)
    if named is None:
        if obstacle is not None and (on_cuda or here.interpreter):
            _say_once(f"{op if 'float64' in obstacle else 'kernels'}: {obstacle}; the torch reference runs instead")
        return "reference" if obstacle else "triton"
    if named == "gluon" and op not in GLUON_OPS and wanted is None:
        named = "triton"
    if named == "gluon":
        obstacle = obstacle or _gluon_obstacle(op, here)
    if obstacle is not None:
        raise KernelUnavailable(f"{op}: {named} can't run on {here.device}: {obstacle}; set {FORCE}=reference")
    return cast(Way, named)


def forced() -> str | None:
    """Value of the environment variable that forces an implementation for every op; None if unset."""
    return os.environ.get(FORCE) or None


def _obstacle(here: Machine, on_cuda: bool, tensors: tuple[Tensor, ...]) -> str | None:
    """Reason why Triton can't run on these tensors, or None."""
    if here.triton is None:
        return "Triton is not installed (pip install triton, on Linux)"
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return "float64 tensors are computed by the reference only"
    if here.interpreter:
        return None
    if not on_cuda:
        return "the tensors are not on a CUDA device (move them, or start with TRITON_INTERPRET=1 for the interpreter)"
    if not here.fp8:
        return f"{here.device} has no FP8 units (compute capability {here.capability}, FP8 needs 8.9 or newer)"
    return None


def _gluon_obstacle(op: str, here: Machine) -> str | None:
    if op not in GLUON_OPS:
        return "this op has no Gluon version"
    if here.interpreter:
        return "Gluon does not run in Triton's interpreter (unset TRITON_INTERPRET)"
    if not here.gluon:
        return f"it needs Triton 3.6 or newer and a Hopper GPU (compute capability 9.0, not {here.capability})"
    return None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@cache
def _probe(interpreter: bool, index: int | None) -> Machine:
    found = importlib.util.find_spec("triton") is not None
    version = importlib.metadata.version("triton") if found else None
    interpreter = interpreter and found
    if index is None:
        return Machine("Triton interpreter" if interpreter else "CPU", version, interpreter, None, 1, gluon=False)
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    gluon = capability[0] == 9 and not interpreter and _gluon_is_there(version)
    return Machine(properties.name, version, interpreter, capability, properties.multi_processor_count, gluon)


def _gluon_is_there(version: str | None) -> bool:
    release = tuple(int(part) for part in (version or "0.0").split(".")[:2])
    return release >= (3, 6) and importlib.util.find_spec("triton.experimental.gluon") is not None


@lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    _log.warning("%s", message)
