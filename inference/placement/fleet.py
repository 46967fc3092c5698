"""The file of `triplane place`: which GPUs there are, and which models they are to serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from contracts.checkpoints import BLOCK
from contracts.errors import ConfigError
from inference.engines.vllm_memory import NARROW, UTILIZATION, token_bytes, weight_bytes
from inference.placement.mig import KINDS, PROCESSORS, Kind, Profile


class Gpus(BaseModel):
    """Equal GPUs of one node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: str = "here"
    kind: str
    """A name of `mig.KINDS`, or any name with `memory_gib`."""
    count: int = Field(ge=1, le=64)
    memory_gib: float | None = Field(default=None, gt=0)
    """Of one GPU; default: the kind's."""
    mig: bool = True
    """Whether they may be divided."""

    @model_validator(mode="after")
    def _known(self) -> Gpus:
        if self.kind not in KINDS and self.memory_gib is None:
            raise ValueError(f"unknown kind {self.kind}: name one of {', '.join(KINDS)}, or give memory_gib")
        return self

    @property
    def described(self) -> Kind:
        """What these GPUs are."""
        known = KINDS.get(self.kind)
        gigabytes = known.gigabytes if known and self.mig else (0, 0, 0)
        return Kind(self.memory_gib or (known.memory_gib if known else 0.0), gigabytes)


class Service(BaseModel):
    """A model to serve."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    """Directory with config.json, and with the weights or their index; without them, the size of an FP8 checkpoint of
    that shape counts.
    """
    context: int = Field(ge=1)
    """Longest sequence, in tokens."""
    sequences: int = Field(ge=1)
    """Wanted at once, over all servers."""
    servers: int = Field(default=1, ge=0)
    """Fewest servers."""
    value: float = Field(default=1.0, gt=0)
    """Of one sequence, beside those of other services."""
    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of whole GPUs of one node that a server may use."""
    slices: bool = True
    """Whether a server may run on a slice."""
    per_gpu: int | None = Field(default=None, ge=1)
    """Most sequences that the processors of a whole GPU take; a slice takes its share."""
    utilization: float = Field(default=UTILIZATION, gt=0, le=1)
    """Share of the memory that the engine uses."""
    reserve_gib: float = Field(default=1.5, ge=0)
    """Activations and CUDA graphs on each GPU."""
    fp8_cache: bool = False
    """Keys and values of one byte instead of two."""

    def room(self, config: Mapping[str, Any], weights: int, memory: int, parts: int) -> int:
        """Tokens of keys and values that a server has room for; negative if its weights do not fit.

        weights: bytes of the whole model. memory: bytes of each of its `parts` GPUs or of its slice.
        """
        free = memory * self.utilization - self.reserve_gib * 2**30 - weights / parts
        return int(free // token_bytes(config, parts, 1 if self.fp8_cache else NARROW))

    def bounded(self, room: int, processors: float) -> int:
        """Sequences of a server. processors: share of a GPU, or number of GPUs."""
        sequences = max(room, 0) // self.context
        return sequences if self.per_gpu is None else min(sequences, int(self.per_gpu * processors))


class Fleet(BaseModel):
    """A fleet file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: tuple[Gpus, ...] = Field(min_length=1)
    services: Mapping[str, Service] = Field(min_length=1)

    @classmethod
    def read(cls, path: Path) -> Fleet:
        """The fleet of a YAML file; paths of models are relative to it. Raises ConfigError."""
        try:
            fleet = cls.model_validate(yaml.safe_load(path.read_text()))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {where or 'the file'}: {first['msg'].removeprefix('Value error, ')}") from None
        services = {
            name: each.model_copy(update={"model": path.parent / each.model}) for name, each in fleet.services.items()
        }
        return fleet.model_copy(update={"services": services})


class Capacity:
    """How many sequences of a service a server holds, by where it runs."""

    def __init__(self, service: Service) -> None:
        """Reads the model's config.json and the size of its weights. Raises ConfigError, SchemaError."""
        self.service = service
        self.config = _config(service.model)
        known = _weights(service.model)
        self.weights = weight_bytes(self.config) if known is None else known
        self._fp8 = known is None or (self.config.get("quantization_config") or {}).get("quant_method") == "fp8"

    def on_slice(self, kind: Kind, profile: Profile) -> int:
        """Sequences of a server on a slice."""
        if not self.service.slices:
            return 0
        room = self.service.room(self.config, self.weights, kind.slice_bytes(profile), 1)
        return self.service.bounded(room, profile.processors / PROCESSORS)

    def on_gpus(self, kind: Kind, parts: int) -> int:
        """Sequences of a server on `parts` whole GPUs, where the model can be divided so."""
        if not self.divides(parts):
            return 0
        room = self.service.room(self.config, self.weights, int(kind.memory_gib * 2**30), parts)
        return self.service.bounded(room, parts)

    def divides(self, parts: int) -> bool:
        """Whether vLLM can divide the model among so many GPUs."""
        width = self.config.get("moe_intermediate_size") or BLOCK * parts
        whole_blocks = not self._fp8 or width % (parts * BLOCK) == 0
        return self.config.get("num_attention_heads", parts) % parts == 0 and whole_blocks

    def needed_gib(self, parts: int) -> float:
        """Memory of each of `parts` GPUs that one sequence needs."""
        token = token_bytes(self.config, parts, 1 if self.service.fp8_cache else NARROW)
        used = self.weights / parts + token * self.service.context + self.service.reserve_gib * 2**30
        return used / self.service.utilization / 2**30


def _config(model: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model}: its config.json can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model {model}: its config.json is no object")
    return config


def _weights(model: Path) -> int | None:
    """Bytes of the weights, by their index or their files; None if there are none."""
    index = model / "model.safetensors.index.json"
    if index.is_file():
        try:
            return int(json.loads(index.read_text())["metadata"]["total_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"model {model}: {index.name} has no metadata.total_size ({error})") from None
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) or None
