"""Folder of checkpoints by content digest: complete and verified, or absent.

    <folder>/<digest>            files of the checkpoint, read-only
    <folder>/<digest>-float32    its dequantized copy, for servers that can't load FP8 blocks
    <folder>/first               link to the checkpoint that the server starts with
    <folder>/tmp                 staging, and the download cache; a killed pull goes on with the files that it had

A folder is renamed to its digest after the last file was checked against the manifest.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from contracts.artifacts import Artifact, ArtifactRef, find_artifact
from contracts.errors import ArtifactCorrupt, ArtifactMissing, ConfigError, StoreError
from contracts.filecache import CACHE_FOLDER
from contracts.store import Store, readable_errors

PLAIN = "-float32"
"""Suffix of the folder of a dequantized copy."""
FIRST = "first"
"""Link to the checkpoint that the server starts with, which is never removed."""
_PLAIN_FACTOR = 4
"""Float32 bytes for one byte of FP8 weights."""
_NAME = re.compile(rf"[0-9a-f]{{64}}({PLAIN})?")
_STAGE, _GONE = "stage-", "gone-"


class NoSpace(StoreError):
    """The folder's disk has no room for a checkpoint."""


@dataclass(frozen=True)
class Held:
    """A checkpoint in the folder."""

    name: str
    """Digest, with PLAIN at its end for a dequantized copy."""
    bytes: int
    used_unix: float
    """Time of the last pull that asked for it."""


class WeightsFolder:
    """Checkpoints below `folder`, which belongs to one process at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        """keep: digests to keep; the one pulled before stays until the next pull in any case, as it may be in use.

        Raises ConfigError if another process has the folder.
        """
        self.folder, self._keep = folder.absolute(), keep
        self._tmp = self.folder / "tmp"
        with self._readable():
            self._tmp.mkdir(parents=True, exist_ok=True)
            self._lock = (self._tmp / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.folder} is in use by another weights service: give each its own folder") from None
        for left in self._tmp.glob("*"):
            if left.name.startswith((_STAGE, _GONE)):
                shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(self.cache / CACHE_FOLDER / "tmp", ignore_errors=True)

    @property
    def cache(self) -> Path:
        """Place of the download cache (TRIPLANE_CACHE), on the same disk, so that a finished file is linked."""
        return self._tmp / "cache"

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def find(self, digest: str, *, plain: bool = False) -> Path | None:
        """Folder of a complete checkpoint, marked as recently used, or None."""
        path = self._path(digest, plain)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def pull(
        self, store: Store, ref: ArtifactRef, *, plain: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> Path:
        """Folder of the checkpoint, downloaded unless it is there. plain: its dequantized copy.

        progress(bytes done, bytes in all) is called after each file. Raises ArtifactMissing, ArtifactCorrupt, NoSpace,
        StoreError.
        """
        found = self.find(ref.digest, plain=plain)
        if found is not None:
            return found
        with self._readable():
            artifact = _artifact(store, ref)
            if self.find(ref.digest) is None:
                self._download(artifact, progress or (lambda done, total: None), plain)
            if plain:
                self._dequantize(ref.digest)
            self._retain(self._keep, keep_used=ref.digest)
        path = self.find(ref.digest, plain=plain)
        assert path is not None, "the newest digest is never removed"
        return path

    def held(self) -> list[Held]:
        """Complete checkpoints, the most recently used one first; other folders are not counted."""
        found = []
        for path in self.folder.iterdir():
            if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
                continue
            with suppress(FileNotFoundError):
                size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
                found.append(Held(path.name, size, path.stat().st_mtime))
        return sorted(found, key=lambda each: -each.used_unix)

    def start_with(self, path: Path) -> None:
        """Point the link `first` at a checkpoint of this folder."""
        with self._readable():
            link = self._tmp / f"{_GONE}{uuid.uuid4().hex}"
            link.symlink_to(path.name)
            link.replace(self.folder / FIRST)

    def _path(self, digest: str, plain: bool) -> Path:
        return self.folder / f"{digest}{PLAIN if plain else ''}"

    def _download(self, artifact: Artifact, progress: Callable[[int, int], None], plain: bool) -> None:
        files = artifact.manifest.files
        total, done = sum(entry.size for entry in files), 0
        self._require_space(artifact.ref, total * (1 + (_PLAIN_FACTOR if plain else 0)))
        progress(0, total)
        with self._staged(artifact.ref.digest, plain=False) as stage:
            for entry in files:
                source, target = artifact.path(entry.path), stage / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(source, target)
                done += entry.size
                progress(done, total)
        for entry in files:
            artifact.store.forget(f"{artifact.uri}/{artifact.manifest.attempt}/{entry.path}")

    def _dequantize(self, digest: str) -> None:
        from inference.engines.vllm_plain import is_quantized_checkpoint, write_plain  # loads torch

        source = self._path(digest, plain=False)
        if self.find(digest, plain=True) is not None:
            return
        with self._staged(digest, plain=True) as stage:
            if is_quantized_checkpoint(source):
                write_plain(source, stage)
                return
            for path in source.iterdir():
                _link_or_copy(path, stage / path.name)

    @contextmanager
    def _staged(self, digest: str, *, plain: bool) -> Iterator[Path]:
        """Folder to fill; it becomes the checkpoint's if the block ends without an error."""
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=self._tmp))
        try:
            yield stage
            for path in stage.rglob("*"):
                if path.is_file() and path.stat().st_mode & 0o222:
                    path.chmod(0o444)
            stage.chmod(0o755)  # the server may run as another user
            stage.replace(self._path(digest, plain))
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def _require_space(self, ref: ArtifactRef, needed: int) -> None:
        """Remove old checkpoints until `needed` bytes are free. Raises NoSpace."""
        if shutil.disk_usage(self.folder).free < needed:
            self._retain(1, keep_used="")
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise NoSpace(
                f"{self.folder} has {free / 1e9:.2f} GB free, checkpoint {ref.short} needs {needed / 1e9:.2f} GB:"
                " enlarge the volume, or lower --keep"
            )

    def _retain(self, keep: int, keep_used: str) -> None:
        """Remove the least recently used digests: `keep` remain, and the one before `keep_used`: it may be in use."""
        order = list(dict.fromkeys(held.name.removesuffix(PLAIN) for held in self.held()))
        before = next((digest for digest in order if digest != keep_used), None)
        started = (self.folder / FIRST).readlink().name if (self.folder / FIRST).is_symlink() else ""
        for digest in order[keep:]:
            if digest in (before, keep_used, started.removesuffix(PLAIN)):
                continue
            for path in (self._path(digest, plain=True), self._path(digest, plain=False)):
                gone = self._tmp / f"{_GONE}{uuid.uuid4().hex}"
                with suppress(FileNotFoundError):
                    path.rename(gone)
                    shutil.rmtree(gone, ignore_errors=True)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        with readable_errors(self.folder, "weights folder", "--folder"):
            yield


def _artifact(store: Store, ref: ArtifactRef) -> Artifact:
    """The artifact with this key and digest."""
    found = find_artifact(store, ref.kind, ref.key)
    if found is None:
        raise ArtifactMissing(f"store {store.url} has no {ref.uri}: give the service the store of the experiment")
    if found.ref.digest != ref.digest:
        raise ArtifactCorrupt(
            f"{ref.uri} in store {store.url} has the digest {found.ref.short}, not {ref.short}: give the service the"
            " store of the experiment"
        )
    return found


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)
