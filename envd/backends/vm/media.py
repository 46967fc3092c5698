"""Boot media of machines: the guest image with this envd's agent, and one read-only disk per template and runtime."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from envd.backends.base import BoxSpec
from envd.errors import BackendUnavailable, SandboxStartError
from envd.images.build import default_directory, load
from envd.images.initramfs import with_agent
from envd.images.packages import ImageError
from envd.native import guest_binary

_STAMP = "1000000000"
_PATIENCE_S = 600.0
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}."


class Disks(NamedTuple):
    """Read-only disks of one machine."""

    root: Path
    """Of the guest image, or of a runtime that is a whole root."""
    template: Path
    packages: Path | None
    """Of a runtime; None: the root's own."""


class Media:
    """Files from which machines start, kept below one directory of the server."""

    def __init__(self, directory: Path, image: Path | None = None, *, own_copies: bool = False) -> None:
        """own_copies: copy all files into `directory`, on its file system.

        Raises BackendUnavailable, with the fix, if a file or a program is missing.
        """
        self._directory = directory
        self._image = image or default_directory()
        try:
            about = load(self._image)
            self.digest = str(about["digest"])
            self.runs_our_packages = str(about.get("packages", {}).get("python3")).startswith(_PYTHON)
            """Whether the image's Python is of this one's version, for which runtimes are made."""
        except ImageError as error:
            raise BackendUnavailable(str(error)) from error
        agent = guest_binary()
        if shutil.which("mksquashfs") is None:
            raise BackendUnavailable(
                "templates become disks through mksquashfs: install Debian's package squashfs-tools"
            )
        directory.mkdir(mode=0o711, parents=True)
        self.kernel, self.root = self._image / "vmlinux", self._image / "rootfs.squashfs"
        if own_copies:
            self.kernel = Path(shutil.copy(self.kernel, directory))
            self.root = Path(shutil.copy(self.root, directory))
        self.ramdisk = directory / "initramfs"
        with_agent(self._image / "initramfs", agent, self.ramdisk)
        for path in (self.ramdisk, self.kernel, self.root)[: 3 if own_copies else 1]:
            path.chmod(0o644)
        self._disks: dict[str, asyncio.Task[Path]] = {}

    async def disks(self, spec: BoxSpec) -> Disks:
        """Disks of a sandbox's machine, each made once. Raises SandboxStartError."""
        template, runtime = await self._packed(spec.template, spec.template_dir), spec.runtime
        if runtime is None:
            return Disks(self.root, template, None)
        disk = await self._packed(runtime.digest, runtime.directory)
        return Disks(disk, template, None) if runtime.is_root else Disks(self.root, template, disk)

    async def _packed(self, digest: str, files: Path) -> Path:
        making = self._disks.get(digest)
        if making is None or (making.done() and (making.cancelled() or making.exception())):
            making = self._disks[digest] = asyncio.create_task(self._make(digest, files))
        return await asyncio.shield(making)

    def forget(self, digest: str) -> None:
        """Remove the disk of a template or a runtime; machines that have it open keep it."""
        if self._disks.pop(digest, None) is not None:
            self._disk(digest).unlink(missing_ok=True)

    def _disk(self, digest: str) -> Path:
        return self._directory / f"{digest[:32]}.squashfs"

    async def _make(self, digest: str, files: Path) -> Path:
        return await asyncio.to_thread(make_disk, files, self._disk(digest))

    def remove(self) -> None:
        """Remove the directory with all its files."""
        shutil.rmtree(self._directory, ignore_errors=True)


def make_disk(files: Path, target: Path) -> Path:
    """Pack a directory as uncompressed squashfs, which is fastest. Raises SandboxStartError."""
    plain = ("-noI", "-noD", "-noF", "-noX", "-no-xattrs", "-all-root", "-noappend", "-quiet", "-no-progress")
    draft = target.with_suffix(".draft")
    command: list[str | Path] = ["mksquashfs", files, draft, *plain, "-processors", "1", "-mkfs-time", _STAMP]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise SandboxStartError(f"mksquashfs did not pack {files.name[:12]} in {_PATIENCE_S:g} s") from error
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[-300:]
        raise SandboxStartError(f"mksquashfs can't pack {files.name[:12]} ({said}): check the space on {target.parent}")
    draft.chmod(0o644)
    draft.rename(target)  # atomic, so that no reader sees a partial disk
    return target
