"""Engines behind one interface (`base.Engine`): token ids in, token ids with log-probabilities and policy versions out.

`open_engine` picks one by its config. `builtin` runs on the CPU in a thread of this process, `openai` talks to a
server, `vllm` to one that it gives each policy and proves to serve it (vllm_update); it may start that server itself
(vllm_keeper); `custom` calls a function that the config names. May import contracts, triplane_kernels and
inference.errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, overload

from inference.engines.base import Completion, Engine, SamplingParams
from inference.engines.config import BuiltinConfig, CustomConfig, EngineConfig, OpenAIConfig, VllmConfig

if TYPE_CHECKING:  # torch and httpx are loaded by who opens the one or the other
    from inference.engines.builtin import BuiltinEngine
    from inference.engines.openai import OpenAIEngine
    from inference.engines.vllm import VllmEngine
    from inference.engines.vllm_keeper import VllmKeeper

__all__ = [
    "BuiltinConfig",
    "Completion",
    "CustomConfig",
    "Engine",
    "EngineConfig",
    "OpenAIConfig",
    "SamplingParams",
    "VllmConfig",
    "open_engine",
]


@overload
def open_engine(spec: BuiltinConfig, directory: Path, version: str) -> BuiltinEngine: ...
@overload
def open_engine(spec: OpenAIConfig, directory: Path, version: str) -> OpenAIEngine: ...
@overload
def open_engine(spec: VllmConfig, directory: Path, version: str, keeper: VllmKeeper | None = None) -> VllmEngine: ...
@overload
def open_engine(spec: EngineConfig, directory: Path, version: str, keeper: VllmKeeper | None = None) -> Engine: ...
def open_engine(spec: EngineConfig, directory: Path, version: str, keeper: VllmKeeper | None = None) -> Engine:
    """An engine for the checkpoint in `directory`, called `version`.

    A server is expected to serve that version already, or to be given it by `load_weights`; it refuses to answer with
    another one. vLLM is given it with the first call. keeper: of the vLLM server to use and to leave running.
    """
    if isinstance(spec, CustomConfig):
        return spec.load()(spec.options, directory, version)
    if isinstance(spec, VllmConfig):
        from inference.engines.vllm import VllmEngine

        return VllmEngine(spec, directory, version, keeper)
    if isinstance(spec, OpenAIConfig):
        from inference.engines.openai import OpenAIEngine

        return OpenAIEngine(
            spec.base_url,
            spec.model,
            version=version,
            directory=directory,
            connections=spec.connections,
            timeout_s=spec.timeout_s,
            retries=spec.retries,
        )
    from inference.engines.builtin import BuiltinEngine

    return BuiltinEngine(
        directory, version, max_batch=spec.max_batch, threads=spec.threads, prefix_bytes=spec.prefix_megabytes << 20
    )
