"""LoRA adapters (arXiv:2106.09685) beside the FP8 weights of a checkpoint, in the files that PEFT writes.

    adapter/adapter_config.json         rank, alpha, names of the adapted projections
    adapter/adapter_model.safetensors   base_model.model.<module>.lora_A.weight [rank, in], float32
                                        base_model.model.<module>.lora_B.weight [out, rank], float32

They lie in a folder of their own, so that loaders of the base read the base alone. A policy with an adapter computes
with weight + alpha / rank * B @ A, in float32; the checkpoint's own codes and scales stay as they are. Each expert of a
layer has its own A and B under its own name, as vLLM reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from contracts.architectures import expert_names, parameter_shapes
from contracts.errors import SchemaError
from contracts.tensor_files import TensorFiles

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "adapter"
"""Folder of the adapter in the checkpoint's directory."""
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Last part of the name of an adapted projection."""
TARGETS: tuple[Target, ...] = get_args(Target)
_WEIGHT = ".weight"
_PREFIX = "base_model.model."
_REQUIRED = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}


@dataclass(frozen=True)
class Adapter:
    """Numbers of an adapter."""

    rank: int
    alpha: float
    targets: tuple[Target, ...]

    @property
    def scale(self) -> float:
        """Factor of B @ A."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the adapter changes the parameter `name`."""
        return name.endswith(tuple(f".{target}{_WEIGHT}" for target in self.targets))

    def factors_of(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Name -> shape of A [rank, in] and B [out, rank] of an adapted parameter, experts before them."""
        *experts, out, width = shape
        first, second = factor_names(name)
        return {first: (*experts, self.rank, width), second: (*experts, out, self.rank)}

    def as_json(self) -> dict[str, Any]:
        """Content of adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "fan_in_fan_out": False,
            "modules_to_save": None,
            "inference_mode": True,
        }


def factor_names(name: str) -> tuple[str, str]:
    """Names of A and B of the parameter `name`, experts stacked."""
    base = name.removesuffix(_WEIGHT)
    return f"{base}.lora_A{_WEIGHT}", f"{base}.lora_B{_WEIGHT}"


def adapted_names(config: Mapping[str, Any], adapter: Adapter) -> list[str]:
    """Parameters of a model with this config.json that the adapter changes."""
    return [name for name in parameter_shapes(config) if adapter.adapts(name)]


def factor_shapes(config: Mapping[str, Any], adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every A and B: see `Adapter.factors_of`."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(config).items():
        if adapter.adapts(name):
            found |= adapter.factors_of(name, shape)
    return found


def exported_factors(name: str, shape: tuple[int, ...]) -> list[str]:
    """Names in adapter_model.safetensors of one of `factor_shapes`: one, or one per expert."""
    return [f"{_PREFIX}{single}" for single in expert_names(name, shape)]


def read_adapter(directory: Path, config: Mapping[str, Any]) -> Adapter | None:
    """Adapter in a checkpoint directory with this config.json, checked tensor by tensor, or None.

    Raises SchemaError that names the fault.
    """
    folder = directory / FOLDER
    if not folder.exists():
        return None
    if not (folder / ADAPTER_CONFIG).is_file():
        raise SchemaError(f"{folder} has no {ADAPTER_CONFIG}: export the adapter again")
    adapter = read_adapter_config(folder / ADAPTER_CONFIG)
    forms = adapter_files(directory).forms
    expected = {
        single: shape[-2:]
        for name, shape in factor_shapes(config, adapter).items()
        for single in exported_factors(name, shape)
    }
    for name, shape in expected.items():
        if name not in forms or forms[name] != ("F32", shape):
            have = forms.get(name, "absent")
            raise SchemaError(
                f"{folder}: tensor {name} is {have}, expected ('F32', {shape}): it belongs to another base or"
                " rank; export it again"
            )
    surplus = sorted(set(forms) - set(expected))
    if surplus:
        raise SchemaError(f"{folder} holds tensors its config does not name: {', '.join(surplus[:3])}")
    return adapter


def adapter_files(directory: Path) -> TensorFiles:
    """Reader of the adapter's tensors. directory: of the checkpoint. Raises SchemaError."""
    return TensorFiles(directory / FOLDER, ADAPTER_WEIGHTS)


def added_weight(files: TensorFiles, adapter: Adapter, name: str) -> Tensor | None:
    """alpha / rank * B @ A of one exported matrix `name`, float32 [out, in], or None if it has no adapter."""
    first, second = (f"{_PREFIX}{each}" for each in factor_names(name))
    if first not in files.forms:
        return None
    return adapter.scale * (files.tensor(second) @ files.tensor(first))


def read_adapter_config(path: Path) -> Adapter:
    """Adapter that the file adapter_config.json describes. Raises SchemaError."""
    try:
        found = json.loads(path.read_bytes())
        for name, value in _REQUIRED.items():
            if found.get(name, value) != value:
                raise SchemaError(f"{path}: {name} = {found[name]!r} is not supported, only {value!r}")
        targets = tuple(target for target in TARGETS if target in found["target_modules"])
        if set(found["target_modules"]) != set(targets):
            raise SchemaError(
                f"{path}: target_modules {found['target_modules']} are not supported: use {', '.join(TARGETS)}"
            )
        return Adapter(int(found["r"]), float(found["lora_alpha"]), targets)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{path} is not the configuration of an adapter ({error!r}): export it again") from None
