"""The file of `triplane place`: which GPUs there are, and which models they are to serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from contracts.errors import ConfigError
from contracts.yaml_text import load_yaml
from inference.engines.vllm_memory import NARROW, UTILIZATION, keeps_blocks, token_bytes, weight_bytes
from inference.placement.mig import KINDS, POSITIONS, PROCESSORS, Kind, Profile

_MOST_GIB = 2.0**20
"""Bound of the memory of a GPU."""


class Slice(BaseModel):
    """A MIG profile, as `triplane place --inventory` reads it from a driver."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    processors: int = Field(ge=1, le=PROCESSORS)
    positions: int = Field(ge=1, le=POSITIONS)
    starts: tuple[int, ...] = Field(min_length=1)
    memory_gib: float = Field(gt=0, le=_MOST_GIB)

    @model_validator(mode="after")
    def _legal(self) -> Slice:
        if not all(0 <= start <= POSITIONS - self.positions for start in self.starts):
            raise ValueError(f"{self.name}: a slice of {self.positions} of {POSITIONS} positions can't begin there")
        return self

    @property
    def profile(self) -> Profile:
        """The profile."""
        return Profile(self.name, self.processors, self.positions, self.starts, self.memory_gib)


class Gpus(BaseModel):
    """Equal GPUs of one node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: str = "here"
    kind: str
    """A name of `mig.KINDS`, or any name with `memory_gib`."""
    count: int = Field(ge=1, le=64)
    memory_gib: float | None = Field(default=None, gt=0, le=_MOST_GIB)
    """Of one GPU; default: the kind's."""
    mig: bool = True
    """Whether they may be divided."""
    slices: tuple[Slice, ...] | None = None
    """MIG profiles of these GPUs; default: those of the kind."""

    @model_validator(mode="after")
    def _known(self) -> Gpus:
        if self.kind not in KINDS and self.memory_gib is None:
            raise ValueError(f"unknown kind {self.kind}: name one of {', '.join(KINDS)}, or give memory_gib")
        return self

    @property
    def described(self) -> Kind:
        """What these GPUs are."""
        known = KINDS.get(self.kind, Kind(0.0))
        profiles = known.profiles if self.slices is None else tuple(each.profile for each in self.slices)
        return Kind(self.memory_gib or known.memory_gib, profiles if self.mig else ())


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
    value: float = Field(default=1.0, ge=1e-6, le=1e6)
    """Weight of one served sequence in the objective, relative to other services."""
    tensor_parallel: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2, 4, 8)
    """Numbers of whole GPUs of one node that a server may use."""
    slices: bool = True
    """Whether a server may run on a slice."""
    per_gpu: int | None = Field(default=None, ge=1)
    """Most sequences at once that a whole GPU is fast enough for; a slice gets its share of them. None: no limit."""
    utilization: float = Field(default=UTILIZATION, gt=0, le=1)
    """Share of the memory that the engine uses."""
    reserve_gib: float = Field(default=1.5, ge=0, le=_MOST_GIB)
    """Activations and CUDA graphs on each GPU."""
    fp8_cache: bool = False
    """Keys and values of one byte instead of two."""


class Fleet(BaseModel):
    """A fleet file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: tuple[Gpus, ...] = Field(min_length=1)
    services: Mapping[str, Service] = Field(min_length=1)

    @field_validator("services", mode="before")
    @classmethod
    def _have_names(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("must map names to services, not list them: `policy: {model: ..., context: ...}`")
        return value

    @classmethod
    def read(cls, path: Path) -> Fleet:
        """The fleet of a YAML file; paths of models are relative to it. Raises ConfigError."""
        try:
            fleet = cls.model_validate(load_yaml(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {where or 'the file'}: {first['msg'].removeprefix('Value error, ')}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from None
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
        try:
            self.weights = weight_bytes(self.config) if known is None else known
            quantized = self.config.get("quantization_config") or {}
            self._fp8 = known is None or quantized.get("quant_method") == "fp8"
            parts = filter(self.divides, (1, *service.tensor_parallel))
            if not all(0 < size < 1 << 60 for size in (self.weights, *map(self._token, parts))):
                raise ValueError("weights or cache without a size")
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"model {service.model}: its config.json is none of a model ({error})") from None

    def on_slice(self, kind: Kind, profile: Profile) -> int:
        """Sequences of a server on a slice."""
        if not self.service.slices:
            return 0
        return self._sequences(kind.slice_bytes(profile), 1, profile.processors / PROCESSORS)

    def on_gpus(self, kind: Kind, parts: int) -> int:
        """Sequences of a server on `parts` whole GPUs; 0 if the model can't be divided among them."""
        return self._sequences(int(kind.memory_gib * 2**30), parts, parts) if self.divides(parts) else 0

    def divides(self, parts: int) -> bool:
        """Whether vLLM can divide the model among this number of GPUs."""
        whole_blocks = not self._fp8 or keeps_blocks(self.config.get("moe_intermediate_size") or 0, parts)
        return self.config.get("num_attention_heads", parts) % parts == 0 and whole_blocks

    def needed_gib(self, parts: int) -> float:
        """Memory of each of `parts` GPUs that a server of one sequence needs."""
        return (self._fixed(parts) + self._token(parts) * self.service.context) / self.service.utilization / 2**30

    def _sequences(self, memory: int, parts: int, processors: float) -> int:
        """Sequences of a server. memory: bytes of its slice or of each GPU. processors: as a multiple of a GPU's."""
        service = self.service
        tokens = int((memory * service.utilization - self._fixed(parts)) // self._token(parts))
        sequences = max(tokens, 0) // service.context
        return sequences if service.per_gpu is None else min(sequences, int(service.per_gpu * processors))

    def _fixed(self, parts: int) -> float:
        """Bytes on each GPU that do not depend on the sequences."""
        return self.weights / parts + self.service.reserve_gib * 2**30

    def _token(self, parts: int) -> int:
        return token_bytes(self.config, parts, 1 if self.service.fp8_cache else NARROW)


def _config(model: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model}: its config.json can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model {model}: its config.json is no object")
    return config


def _weights(model: Path) -> int | None:
    """Size of the weights in bytes, from the index or the files; None if the directory has neither."""
    index = model / "model.safetensors.index.json"
    if index.is_file():
        try:
            size = int(json.loads(index.read_bytes())["metadata"]["total_size"])
            if size <= 0:
                raise ValueError(f"it is {size}")
            return size
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise ConfigError(f"model {model}: {index.name} has no metadata.total_size ({error})") from None
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) or None
