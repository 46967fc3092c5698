"""Engines behind one interface (`base.Engine`): token ids in, token ids with log-probabilities and policy versions out.

`open_engine` picks one by its config. `builtin` runs on the CPU in a thread of this process. `openai` connects to a
server. `vllm` loads each policy into a vLLM server and proves that it is served (vllm_update); it may start that server
itself (vllm_keeper), or use several (fleet). `sglang` does so with a running SGLang server, `trtllm` starts a
TensorRT-LLM server for each policy. `routed` spreads requests over several engines. `custom` calls a function that the
config names. May import contracts, triplane_kernels, inference.router and inference.errors.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, overload

from inference.engines.base import Completion, Engine, Piece, SamplingParams
from inference.engines.config import (
    BuiltinConfig,
    CustomConfig,
    EngineConfig,
    OpenAIConfig,
    ReplicaConfig,
    RoutedConfig,
    SglangConfig,
    TrtllmConfig,
    VllmConfig,
)
from inference.errors import EngineError

if TYPE_CHECKING:  # load torch and httpx only for engines that need them
    from inference.engines.builtin import BuiltinEngine
    from inference.engines.fleet import FleetEngine
    from inference.engines.openai import OpenAIEngine
    from inference.engines.routed import Opener, RoutedEngine
    from inference.engines.sglang import SglangEngine
    from inference.engines.trtllm import TrtllmEngine
    from inference.engines.vllm import VllmEngine
    from inference.engines.vllm_keeper import VllmKeeper

__all__ = [
    "BuiltinConfig",
    "Completion",
    "CustomConfig",
    "Engine",
    "EngineConfig",
    "OpenAIConfig",
    "Piece",
    "RoutedConfig",
    "SamplingParams",
    "SglangConfig",
    "TrtllmConfig",
    "VllmConfig",
    "open_engine",
]


@overload
def open_engine(spec: BuiltinConfig, directory: Path, version: str) -> BuiltinEngine: ...
@overload
def open_engine(spec: OpenAIConfig, directory: Path, version: str, *, pinned: bool = True) -> OpenAIEngine: ...
@overload
def open_engine(spec: SglangConfig, directory: Path, version: str) -> SglangEngine: ...
@overload
def open_engine(spec: TrtllmConfig, directory: Path, version: str) -> TrtllmEngine: ...
@overload
def open_engine(spec: RoutedConfig, directory: Path, version: str) -> RoutedEngine: ...
@overload
def open_engine(
    spec: VllmConfig, directory: Path, version: str, keeper: VllmKeeper | None = None
) -> VllmEngine | FleetEngine: ...
@overload
def open_engine(
    spec: EngineConfig, directory: Path, version: str, keeper: VllmKeeper | None = None, *, pinned: bool = True
) -> Engine: ...
def open_engine(
    spec: EngineConfig, directory: Path, version: str, keeper: VllmKeeper | None = None, *, pinned: bool = True
) -> Engine:
    """Engine for the checkpoint in `directory`, with the policy version `version`.

    A server must already serve that version, or get it by `load_weights`; other versions are refused. vLLM,
    SGLang and TensorRT-LLM load it on the first call. keeper: keeper of the vLLM server to use, which stays running.
    pinned: False accepts any version of a Triplane server (`kind: openai`).
    """
    if isinstance(spec, CustomConfig):
        return spec.load()(spec.options, directory, version)
    if isinstance(spec, VllmConfig):
        from inference.engines.policies import PolicyDirectory

        if spec.is_fleet:
            from inference.engines.fleet import FleetEngine

            return FleetEngine(spec, PolicyDirectory(directory, version))
        from inference.engines.vllm import VllmEngine

        return VllmEngine(spec, PolicyDirectory(directory, version), keeper)
    if isinstance(spec, SglangConfig):
        from inference.engines.policies import PolicyDirectory
        from inference.engines.sglang import SglangEngine

        return SglangEngine(spec, PolicyDirectory(directory, version))
    if isinstance(spec, TrtllmConfig):
        return _trtllm(spec, directory, version)
    if isinstance(spec, OpenAIConfig):
        from inference.engines.openai import OpenAIEngine

        return OpenAIEngine(
            spec.base_url,
            spec.model,
            version=version,
            directory=directory,
            pinned=pinned,
            connections=spec.connections,
            timeout_s=spec.timeout_s,
            retries=spec.retries,
        )
    if isinstance(spec, RoutedConfig):
        from inference.engines.routed import Member, RoutedEngine

        members = [
            Member(f"replica {place}", _replica(each), each.events, server)
            for place, (each, server) in enumerate(zip(spec.replicas, spec.servers, strict=True))
        ]
        return RoutedEngine(members, directory, version, spec.hedging_delay_s, spec.redis_env)
    from inference.engines.builtin import open_builtin

    return open_builtin(spec, directory, version)


def _trtllm(spec: TrtllmConfig, directory: Path, version: str) -> TrtllmEngine:
    from inference.engines.policies import PolicyDirectory

    if importlib.util.find_spec("smg_grpc_proto") is None:
        raise EngineError("engine.kind trtllm needs the messages of its server: pip install 'triplane[trtllm]'")
    from inference.engines.trtllm import TrtllmEngine

    return TrtllmEngine(spec, PolicyDirectory(directory, version))


def _replica(spec: ReplicaConfig) -> Opener:
    """Opens one engine of several."""
    if isinstance(spec, VllmConfig) and not spec.is_fleet:
        from inference.engines.policies import PolicyDirectory
        from inference.engines.vllm import VllmEngine

        return lambda directory, version, _: VllmEngine(spec, PolicyDirectory(directory, version), waits=False)
    if not isinstance(spec, BuiltinConfig):
        return lambda directory, version, _: open_engine(spec, directory, version)
    from inference.engines.builtin import open_builtin

    return lambda directory, version, publish: open_builtin(spec, directory, version, publish)
