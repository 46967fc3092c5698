"""A policy for servers that load it: where its files are, and what a server that serves it must answer.

PolicyDirectory | StoredPolicy --> Preparer (once for all servers) --> Prepared

A stored policy is fetched only as far as needed: its config, and its weights if probes are computed from them or the
server reads this machine's files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from contracts.adapters import FOLDER
from contracts.artifacts import Artifact, ArtifactRef
from contracts.precision import Forward, forward_of
from inference.engines.config import SglangConfig, TrtllmConfig, VllmConfig
from inference.engines.matching import server_mismatch
from inference.engines.probes import Probe, make_probes
from inference.engines.vllm_plain import CONFIG, checkpoint_bytes, is_quantized_checkpoint, plain_checkpoint
from inference.errors import EngineError

TOLERANCE = {"dequantized": 1e-4, "fp8": 0.5}
"""Tolerance of probes. Two float32 implementations differ by some 1e-5; FP8 kernels that round activations change
single tokens by tenths, a wrong order of experts by several nats.
"""
Settings = VllmConfig | SglangConfig | TrtllmConfig
_SHA256 = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class PolicyFiles(Protocol):
    """Files of a checkpoint."""

    @property
    def version(self) -> str:
        """Policy version."""

    @property
    def name(self) -> str:
        """Folder, for messages."""

    @property
    def ref(self) -> ArtifactRef | None:
        """Reference to the artifact in the store; None for a folder that is in no store."""

    def config(self) -> dict[str, Any]:
        """Content of config.json. Raises EngineError."""

    def directory(self) -> Path:
        """Local folder with all files."""

    def file(self, name: str) -> Path:
        """One local file."""

    def weight_bytes(self) -> int:
        """Size of the weights."""

    def has_adapter(self) -> bool:
        """Whether a LoRA adapter belongs to the checkpoint."""


@dataclass(frozen=True)
class PolicyDirectory:
    """Checkpoint in a local folder."""

    folder: Path
    version: str

    @property
    def name(self) -> str:
        """See PolicyFiles.name."""
        return str(self.folder)

    @property
    def ref(self) -> ArtifactRef | None:
        """See PolicyFiles.ref. Read from the path: files of a store are in artifacts/<kind>/<key>/<attempt>."""
        parts = self.folder.absolute().parts[-4:]
        if len(parts) < 4 or parts[0] != "artifacts" or not all(_SHA256.fullmatch(x) for x in (parts[2], self.version)):
            return None
        return ArtifactRef(kind=parts[1], key=parts[2], digest=self.version)

    def config(self) -> dict[str, Any]:
        """See PolicyFiles.config."""
        try:
            found: dict[str, Any] = json.loads((self.folder / CONFIG).read_bytes())
        except (OSError, ValueError) as error:
            raise EngineError(f"{self.folder / CONFIG} can't be read: {error}") from error
        return found

    def directory(self) -> Path:
        """See PolicyFiles.directory."""
        return self.folder

    def file(self, name: str) -> Path:
        """See PolicyFiles.file."""
        return self.folder / name

    def weight_bytes(self) -> int:
        """See PolicyFiles.weight_bytes."""
        return checkpoint_bytes(self.folder)

    def has_adapter(self) -> bool:
        """See PolicyFiles.has_adapter."""
        return (self.folder / FOLDER).exists()


class StoredPolicy:
    """Checkpoint in a store; its version is its content digest."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self.version = artifact.ref.digest

    @property
    def name(self) -> str:
        """See PolicyFiles.name."""
        return self._artifact.uri

    @property
    def ref(self) -> ArtifactRef:
        """See PolicyFiles.ref."""
        return self._artifact.ref

    def config(self) -> dict[str, Any]:
        """See PolicyFiles.config."""
        found: dict[str, Any] = self._artifact.json(CONFIG)
        return found

    def directory(self) -> Path:
        """See PolicyFiles.directory. Fetches and verifies the files."""
        return self._artifact.directory()

    def file(self, name: str) -> Path:
        """See PolicyFiles.file. Fetches and verifies it alone."""
        return self._artifact.path(name)

    def weight_bytes(self) -> int:
        """See PolicyFiles.weight_bytes."""
        return sum(entry.size for entry in self._artifact.manifest.files if entry.path.endswith(".safetensors"))

    def has_adapter(self) -> bool:
        """See PolicyFiles.has_adapter."""
        return any(name.startswith(f"{FOLDER}/") for name in self._artifact.names())


@dataclass(frozen=True)
class Prepared:
    """What a server that serves a policy must answer."""

    version: str
    probes: list[Probe]
    tolerance: float
    """Largest difference of a probe's log-probability, in nats."""
    plain: bool
    """Whether the server loads float32 weights."""


class Preparer:
    """Prepares each policy once for all servers of one event loop."""

    def __init__(self, config: Settings) -> None:
        self._config = config
        self._made: dict[bool, tuple[str, asyncio.Task[Prepared]]] = {}

    async def prepared(self, files: PolicyFiles, plain: bool) -> Prepared:
        """Expected answers of a server. plain: whether it loads float32 weights.

        Raises EngineError if the server can't match the policy's recipe.
        """
        version, task = self._made.get(plain, ("", None))
        failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or version != files.version or failed:
            task = asyncio.create_task(asyncio.to_thread(_prepare, files, self._config, plain))
            self._made[plain] = (files.version, task)
        return await asyncio.shield(task)


def served_directory(files: PolicyFiles, plain: bool) -> Path:
    """Folder of this machine for a server to load. plain: as float32 weights, copied if the checkpoint is quantized."""
    directory = files.directory()
    copied = plain and is_quantized_checkpoint(directory)
    return (plain_checkpoint(directory, files.version) if copied else directory).absolute()


def _prepare(files: PolicyFiles, config: Settings, plain: bool) -> Prepared:
    if files.has_adapter() and not plain:
        raise EngineError(
            f"{files.name} has a LoRA adapter, which {config.server} serves merged into float32 weights only: set"
            " engine.weights: dequantized"
        )
    forward = _require_match(files, config, plain)
    small = files.weight_bytes() <= config.probe_gigabytes * 1e9
    if not small:
        _log.warning(
            "%s exceeds engine.probe_gigabytes: its log-probabilities are not compared",
            files.name,
        )
    tolerance = config.tolerance or TOLERANCE["dequantized" if plain and not forward.rounds else "fp8"]
    return Prepared(files.version, make_probes(files.directory()) if small else [], tolerance, plain)


def _require_match(files: PolicyFiles, config: Settings, plain: bool) -> Forward:
    """Recipe of the checkpoint. Raises EngineError if the server can't match it, unless the settings allow that."""
    forward = forward_of(files.config())
    reason = server_mismatch(config.server, forward, plain)
    if reason is not None and config.unmatched == "refuse":
        raise EngineError(f"{files.name}: {reason}, or engine.unmatched to warn")
    if reason is not None:
        _log.warning("%s is served unmatched: %s", files.name, reason)
    return forward
