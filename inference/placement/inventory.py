"""The GPUs of this machine as entries of a fleet file, read by NVIDIA's management library (package nvidia-ml-py)."""

from __future__ import annotations

import ctypes
from typing import Any

from contracts.errors import ConfigError
from inference.placement.mig import POSITIONS

_MOST_PLACES = 16
_GIB = 2**30


def inventory(node: str) -> list[dict[str, Any]]:
    """Entries of `gpus`: equal GPUs are one. MIG profiles are those that the driver names, with all of their positions,
    whether MIG is enabled or not.

    Raises ConfigError without the package, a driver, or a GPU.
    """
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError("the inventory needs nvidia-ml-py: run pip install 'triplane[place]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ConfigError(f"NVIDIA's management library can't be used here ({error}): is there a driver?") from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = [_gpu(pynvml, handle) for handle in handles]
    except pynvml.NVMLError as error:
        raise ConfigError(f"the GPUs of this machine can't be read: {error}") from None
    finally:
        pynvml.nvmlShutdown()
    if not gpus:
        raise ConfigError("this machine has no NVIDIA GPU")
    different = [each for place, each in enumerate(gpus) if each not in gpus[:place]]
    return [{"node": node, **each, "count": gpus.count(each)} for each in different]


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    name = nvml.nvmlDeviceGetName(handle)
    total = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return {
        "kind": name.removeprefix("NVIDIA "),
        "memory_gib": _gib(total),
        "slices": [
            each
            for profile in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
            if (each := _slice(nvml, handle, profile)) is not None
        ],
    }


def _slice(nvml: Any, handle: Any, profile: int) -> dict[str, Any] | None:
    """A MIG profile; None: the GPU has no such profile, or it is the whole GPU or has media engines of its own."""
    try:
        info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, profile)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
        return None
    places, count = (nvml.c_nvmlGpuInstancePlacement_t * _MOST_PLACES)(), ctypes.c_uint(_MOST_PLACES)
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, info.id, places, ctypes.byref(count))
    name = info.name.removeprefix("MIG ")
    if not count.value or places[0].size >= POSITIONS or set(name) & {"+", "-"}:
        return None
    return {
        "name": name,
        "processors": info.sliceCount,
        "positions": places[0].size,
        "starts": sorted(place.start for place in places[: count.value]),
        "memory_gib": _gib(info.memorySizeMB << 20),
    }


def _gib(size: int) -> float:
    """Bytes in GiB, rounded down to a tenth."""
    return size * 10 // _GIB / 10
