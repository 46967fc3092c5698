"""`triplane place --inventory`, by the real nvidia-ml-py on a library that speaks its interface."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from contracts.errors import ConfigError
from inference.placement.fleet import Gpus
from inference.placement.inventory import inventory
from inference.placement.mig import KINDS, layouts
from tests.inference.test_model_placement import GIB, write_model
from triplane_dagster.cli.app import app

pynvml = pytest.importorskip("pynvml")
A100 = {  # profile -> name, processors, memory in MiB, start and size of its places
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE: ("1g.5gb", 1, 4864, [(start, 1) for start in range(7)]),
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1: ("1g.5gb+me", 1, 4864, [(start, 1) for start in range(7)]),
    pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2: ("1g.10gb", 1, 9856, [(start, 2) for start in (0, 2, 4, 6)]),
    pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE: ("2g.10gb", 2, 9856, [(start, 2) for start in (4, 0, 2)]),
    pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE: ("3g.20gb", 3, 19968, [(0, 4), (4, 4)]),
    pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE: ("4g.20gb", 4, 19968, [(0, 4)]),
    pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE: ("7g.40gb", 7, 40192, [(0, 8)]),
}
"""As `nvidia-smi mig -lgip` and `-lgipp` print them for an A100 of 40 GB (NVIDIA, MIG User Guide)."""


class Driver:
    """libnvidia-ml.so.1 as nvidia-ml-py calls it: two A100, then a GPU without MIG."""

    names = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", "NVIDIA L4")

    def __init__(self) -> None:
        self.open = 0
        self.handles: list[Any] = []

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.open += 1
        return int(pynvml.NVML_SUCCESS)

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        self.handles.append(handle._obj)
        return int(pynvml.NVML_SUCCESS)

    def _number(self, handle: Any) -> int:
        return next(number for number, each in enumerate(self.handles) if each is handle)

    def nvmlDeviceGetName(self, handle: Any, name: Any, length: Any) -> int:
        name.value = self.names[self._number(handle)].encode()
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = (40960 if self._number(handle) < 2 else 23034) << 20
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceProfileInfoV(self, handle: Any, profile: int, info: Any) -> int:
        if self._number(handle) == 2:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if profile not in A100:
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        name, processors, memory, places = A100[profile]
        found = info._obj
        found.id, found.sliceCount, found.memorySizeMB = 100 + profile, processors, memory
        found.instanceCount, found.name = len(places), f"MIG {name}".encode()
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstancePossiblePlacements_v2(self, handle: Any, profile: int, places: Any, count: Any) -> int:
        made = A100[profile - 100][3]
        if count._obj.value < len(made):
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for place, (start, size) in zip(places, made, strict=False):
            place.start, place.size = start, size
        count._obj.value = len(made)
        return int(pynvml.NVML_SUCCESS)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(pynvml, "nvmlLib", made)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return made


def test_slices_of_a_driver_are_those_of_the_table(driver: Driver) -> None:
    a100, other = inventory("a")
    assert driver.open == 0
    assert (a100["kind"], a100["count"], a100["memory_gib"], a100["node"]) == ("A100-SXM4-40GB", 2, 40.0, "a")
    assert other == {"node": "a", "kind": "L4", "count": 1, "memory_gib": 22.4, "slices": []}
    read, known = Gpus.model_validate(a100).described, KINDS["A100-40GB"]
    assert [(each.name, each.processors, each.positions, each.starts) for each in sorted(read.profiles, key=str)] == [
        (each.name, each.processors, each.positions, each.starts) for each in sorted(known.profiles, key=str)
    ]
    assert {each.name: each.memory_gib for each in read.profiles}["1g.5gb"] == 4.7
    assert len(layouts(read)) == len(layouts(known))
    assert layouts(Gpus.model_validate(other).described) == layouts(
        Gpus(kind="A100-40GB", count=1, mig=False).described
    )


def test_the_printed_inventory_is_a_part_of_a_fleet_file(driver: Driver, tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["place", "--inventory"])
    assert printed.exit_code == 0, printed.output
    services = {"small": {"model": "small", "context": 4096, "sequences": 7}}
    write_model(tmp_path / "small", GIB // 2)
    (tmp_path / "fleet.yaml").write_text(printed.output + yaml.safe_dump({"services": services}))
    done = CliRunner().invoke(app, ["place", str(tmp_path / "fleet.yaml")])
    assert done.exit_code == 0 and "small: 7 of 7 sequences" in done.output, done.output


def test_a_machine_without_a_driver_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pynvml, "nvmlLib", SimpleNamespace(nvmlInitWithFlags=lambda flags: pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    )
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    with pytest.raises(ConfigError, match="is there a driver"):
        inventory("a")


@pytest.mark.parametrize(
    ("changed", "said"), [({"starts": [7]}, "can't begin there"), ({"processors": 8}, "less than or equal to 7")]
)
def test_impossible_slices_of_a_file_are_refused(changed: dict[str, Any], said: str) -> None:
    made = {"name": "2g.x", "processors": 2, "positions": 2, "starts": [0], "memory_gib": 9.0, **changed}
    with pytest.raises(ValueError, match=said):
        Gpus.model_validate({"kind": "x", "count": 1, "memory_gib": 40, "slices": [made]})
