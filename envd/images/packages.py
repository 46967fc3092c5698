"""Debian packages without installing them: apt resolves and downloads into a private folder, dpkg-deb unpacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from envd.errors import EnvdError

MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Debian keeps these as links into /usr."""
_LISTS = Path("/var/lib/apt/lists")


class ImageError(EnvdError):
    """A guest image that can't be built, or that is not one."""


def download(names: Sequence[str], into: Path) -> list[Path]:
    """Download packages with all that they need, as if nothing were installed. Returns the .deb files.

    Uses the machine's package sources and lists, and changes nothing of the machine's own state.
    """
    if shutil.which("apt-get") is None or not _LISTS.is_dir():
        raise ImageError(
            "guest images are made of Debian packages: build on a Debian machine with apt-get, and copy the folder"
        )
    archives, status = into / "archives", into / "status"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    status.touch()
    options = {
        "Dir::State::status": status,
        "Dir::Cache": into,
        "Dir::Cache::archives": archives,
        "Dir::Log": into,
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "",
    }
    given = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    # Debian's own apt hooks look at what is installed, which nothing here is
    run(
        [
            "apt-get",
            "-q",
            *given,
            "-o",
            "DPkg::Post-Invoke=",
            "-y",
            "--no-install-recommends",
            "--download-only",
            "install",
            *names,
        ]
    )
    return sorted(archives.glob("*.deb"))


def unpack(package: Path, root: Path) -> None:
    """Unpack one package over a root whose /bin, /lib ... may be links into /usr. Maintainer scripts do not run."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as archive:
        run(["tar", "-x", "-C", str(root), "--keep-directory-symlink", "--no-same-owner"], stdin=archive.stdout)
    if archive.returncode:
        raise ImageError(f"{package.name} can't be unpacked: remove it and build again")


def field(package: Path, name: str) -> str:
    """A field of a package's control file."""
    return run(["dpkg-deb", "--field", str(package), name]).strip()


def run(command: Sequence[str | os.PathLike[str]], stdin: object = None) -> str:
    """Run a program to its end and return what it printed. Raises ImageError with its last words."""
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            list(command),
            stdin=stdin or subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError as error:
        raise ImageError(
            f"{command[0]} is not installed: see docs/sandboxes-vm.md for what building an image needs"
        ) from error
    if done.returncode:
        said = " ".join(str(done.stderr or done.stdout).split())[-500:]
        raise ImageError(f"{command[0]} failed ({said}): after `apt-get update`, with room on the disk, build again")
    return str(done.stdout)
