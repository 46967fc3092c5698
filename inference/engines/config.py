"""Configuration of the engine: a discriminated union with one entry for each kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inference.engines.base import Engine


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BuiltinConfig(_Config):
    """The CPU engine in this process."""

    kind: Literal["builtin"] = "builtin"
    max_batch: int = Field(default=256, ge=1, le=4096)
    """Sequences computed at once."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads; null for torch's own default. Two beside other load are slower than one."""
    prefix_megabytes: int = Field(default=512, ge=0)
    """Memory for the state of finished turns, in MiB; 0 turns reuse off."""


class _RemoteConfig(_Config):
    connections: int = Field(default=256, ge=1)
    """Requests in flight at most."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one call, in seconds."""
    retries: int = Field(default=4, ge=0, le=20)
    """More attempts after a connection fault; any answer, even an error, is final."""


class OpenAIConfig(_RemoteConfig):
    """A server that takes and returns token ids over the OpenAI completions API and is told of no new policies: `python
    -m inference serve`, or any.
    """

    kind: Literal["openai"] = "openai"
    base_url: str
    """Up to and including `/v1`, e.g. http://localhost:8000/v1."""
    model: str = "policy"
    """The name the server gives the policy."""


class VllmConfig(_RemoteConfig):
    """A vLLM server, given every policy and proven to serve it: one started for the run, or one that runs (`base_url`).

    See docs/engines.md.
    """

    kind: Literal["vllm"] = "vllm"
    base_url: str | None = None
    """Root of a server that runs, e.g. http://host:8000; it must see our files. Null starts one here and stops it at
    the end of the run.
    """
    python: str = "python"
    """Interpreter of the environment that has vLLM, for a server started here."""
    flags: tuple[str, ...] = ()
    """More arguments for a server started here, e.g. [--max-model-len, "16384"]. They win over ours."""
    env: dict[str, str] = {}
    """More environment variables for a server started here."""
    devices: tuple[int, ...] = ()
    """GPUs of a server started here (CUDA_VISIBLE_DEVICES); empty: all. One server at a time has them."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """GPUs (or CPU workers) that share a layer, of a server started here."""
    weights: Literal["auto", "fp8", "dequantized"] = "auto"
    """What the server loads: the FP8 checkpoint itself, or a float32 copy of it in $TRIPLANE_CACHE. auto: the copy on a
    CPU, where vLLM loads no FP8 blocks.
    """
    exact: bool = True
    """Whether served weights must be the checkpoint's to the bit. Only for GPU kernels that quantize weights again:
    false leaves small differences to the probes.
    """
    tolerance: float | None = Field(default=None, gt=0)
    """Largest difference of a probe's log-probability, served against computed by the built-in engine. Null: 1e-4 for
    float32 weights; 0.5 for FP8 kernels, which round activations.
    """
    probe_gigabytes: float = Field(default=4.0, ge=0)
    """Checkpoints larger than this are not computed here for the probes: their tensors and layers are compared, their
    log-probabilities are not.
    """
    startup_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds until a server that was started must answer, and that GPUs in use are waited for."""
    drain_s: float = Field(default=60.0, ge=0)
    """Seconds that requests in flight get to finish before new weights are loaded; then they are aborted, and sampled
    again.
    """
    max_restarts: int = Field(default=2, ge=0, le=100)
    """Times that a server which died is started again, a lease."""


class CustomConfig(_Config):
    """An engine made by a function that is named here: `factory(options, directory, version)` returns an `Engine` (see
    inference/engines/base.py) of the checkpoint in `directory`.
    """

    kind: Literal["custom"]
    """Selects this engine."""
    factory: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Importable name of the function, e.g. package.module:open_engine."""
    options: dict[str, Any] = {}
    """Options for the function, which checks them."""

    @model_validator(mode="after")
    def _importable(self) -> Self:
        try:
            self.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"engine.factory={self.factory}: {error}: name a function as package.module:name"
            ) from None
        return self

    def load(self) -> Callable[[dict[str, Any], Path, str], Engine]:
        """Import the function."""
        module, _, name = self.factory.partition(":")
        found: Callable[[dict[str, Any], Path, str], Engine] = getattr(importlib.import_module(module), name)
        return found


EngineConfig = Annotated[BuiltinConfig | OpenAIConfig | VllmConfig | CustomConfig, Field(discriminator="kind")]
