"""Serve the policy that a file names, and another one whenever the file names another.

The first line is a checkpoint, as `--policy` takes it; the second, if there is one, its version. Without it the version
of a folder is its name and a fingerprint of its files, so that no other weights have it, at a later bridge either. A
trainer on the same machine writes the file anew and renames it, and sees in `Info` when the policy is served.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import ConfigError, TriplaneError, describe
from inference.engines.base import Engine
from inference.errors import EngineStopped, EngineUnreachable
from inference.server.policies import find_policy

LOOK_S = 0.2
"""Time between two looks at the file, in seconds."""
RETRY_S = 5.0
"""Seconds after which a policy is loaded again that a server could not load because it did not answer or had failed."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyFile:
    """A file that names a policy."""

    path: Path
    store: str | None
    """Store with the checkpoints; None: $TRIPLANE_STORE."""
    _weights: dict[str, str] = field(default_factory=dict, init=False)
    """Fingerprints of the weights that were read or loaded, by version."""

    def read(self) -> tuple[Path, str]:
        """Directory and version of the policy. Raises TriplaneError."""
        directory, version, found = self._named()
        self._weights[version] = found
        return directory, version

    def _named(self) -> tuple[Path, str, str]:
        """Directory, version and fingerprint of the policy."""
        try:
            lines = [line.strip() for line in self.path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            words = describe(error) if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"--policy-file {self.path} can't be read: {words}") from error
        if not lines or not lines[0]:
            raise ConfigError(f"--policy-file {self.path} is empty: write a checkpoint directory in its first line")
        directory, version = find_policy(lines[0], self.store)
        found, given = _fingerprint(directory), lines[1] if len(lines) > 1 else ""
        if Path(lines[0]).is_dir():
            version = f"{version}-{found}"
        return directory, given or version, found

    async def follow(self, engine: Engine) -> None:
        """Load every policy that the file names from now on, until cancelled. One that can't be loaded is logged, and
        the current one stays.
        """
        seen = None  # the file may have changed since the engine was opened
        while True:
            stamp = self._stamp()
            if stamp is None or stamp == seen:
                await asyncio.sleep(LOOK_S)
                continue
            seen = stamp
            try:
                directory, version, found = await asyncio.to_thread(self._named)
                if version != await engine.version():
                    await engine.load_weights(directory, version)
                    self._weights[version] = found
                elif self._weights.setdefault(version, found) != found:
                    _log.warning("%s: %s is served already, other weights need another version", self.path, version)
            except (EngineUnreachable, EngineStopped) as error:
                _log.error("the served policy stays, trying again in %g s: %s", RETRY_S, error)
                seen = None
                await asyncio.sleep(RETRY_S)
            except TriplaneError as error:
                _log.error("the served policy stays: %s", error)
            except Exception:  # noqa: BLE001 (whatever a damaged checkpoint raises must not end the bridge)
                _log.exception("the served policy stays: %s can't be loaded", self.path)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def _fingerprint(directory: Path) -> str:
    """Eight hex digits that differ for other weights: those of another folder, or written since."""
    files = [directory / "config.json", *sorted(directory.rglob("*.safetensors"))]
    stats = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in files if each.is_file()]
    return hashlib.sha256(repr((str(directory.resolve()), stats)).encode()).hexdigest()[:8]
