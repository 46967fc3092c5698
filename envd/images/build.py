"""Builds a guest image: `python -m envd.images.build [--out DIR]`.

    DIR/kernel            bzImage, for QEMU
    DIR/vmlinux           the same kernel uncompressed, for Firecracker
    DIR/initramfs         busybox and drivers
    DIR/rootfs.squashfs   /usr and /etc of a small Debian, read-only
    DIR/image.json        what went in, and the digest of all

Takes about a minute and 400 MB of disk. Needs Debian's apt-get, dpkg-deb, tar and mksquashfs (package squashfs-tools),
and root or unprivileged user namespaces (byte code is compiled by the image's own Python, in a chroot).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.errors import TriplaneError
from envd.images import initramfs, kernel
from envd.images.packages import MERGED, ImageError, download, field, run, unpack

PACKAGES = (
    *(
        "bash",
        "coreutils",
        "findutils",
        "grep",
        "sed",
        "gawk",
        "diffutils",
        "tar",
        "gzip",
        "patch",
        "procps",
        "dash",
        "debianutils",
        "hostname",
        "libc-bin",
        "ncurses-base",
        "util-linux",
        "less",
    ),
    *("git", "ripgrep", "make", "python3", "python3-pytest", "python3-venv"),
)
"""What a guest offers, unless --packages names others."""
_DIRECTORIES = (
    "proc",
    "sys",
    "dev",
    "tmp",
    "run",
    "var",
    "root",
    "workspace",
    ".template",
    ".scratch",
    ".agent",
    "mnt",
)
_PASSWD = "root:x:0:0:root:/tmp:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
_LINKS = {
    "usr/bin/sh": "dash",
    "usr/bin/python": "python3",
    "usr/bin/awk": "gawk",
    "usr/bin/which": "which.debianutils",
}
"""What maintainer scripts would have made."""
VERSION = 1


def build(out: Path, packages: Sequence[str] = PACKAGES) -> dict[str, object]:
    """Build an image and put it in place of what is at `out`. Returns its image.json."""
    out = out.absolute()
    if out.exists() and not (out / "image.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ImageError(f"{out} holds files that are not a guest image: choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        draft = Path(scratch, "image")
        draft.mkdir()
        about = _build(draft, Path(scratch), packages)
        (draft / "image.json").write_text(json.dumps(about, indent=1) + "\n")
        for path in (draft, *draft.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)  # machines are run by another user
        if out.exists():
            out.rename(Path(scratch, "old"))
        draft.rename(out)
    return about


def _build(draft: Path, scratch: Path, packages: Sequence[str]) -> dict[str, object]:
    root, tree = scratch / "root", scratch / "kernel"
    tree.mkdir()
    versions = {}
    for package in download([kernel.PACKAGE], scratch / "kernel-packages"):
        if package.name.startswith("linux-image-6") or "-cloud-amd64_" in package.name:
            unpack(package, tree)
            versions[field(package, "Package")] = field(package, "Version")
    tools = scratch / "tools"
    tools.mkdir()
    for package in download(["busybox-static", "lz4"], scratch / "tool-packages"):
        unpack(package, tools)
    _skeleton(root)
    for package in download(packages, scratch / "packages"):
        unpack(package, root)
        versions[field(package, "Package")] = field(package, "Version")
    versions |= _linter(root)
    _finish_root(root)
    run(
        [
            "mksquashfs",
            root,
            draft / "rootfs.squashfs",
            "-all-root",
            "-noappend",
            "-quiet",
            "-no-progress",
            "-comp",
            "lz4",
            "-reproducible",
        ]
    )
    (found,) = (tree / "boot").glob("vmlinuz-*")
    shutil.copyfile(found, draft / "kernel")
    kernel.extract_elf(found, next(tools.rglob("bin/lz4")), draft / "vmlinux")
    modules = kernel.drivers(tree)
    order = "".join(f"{each.name}\n" for each in modules)
    entries = [initramfs.directory(name) for name in ("bin", "modules", "dev", "proc", "sys", "new")]
    entries += [initramfs.file("bin/busybox", next(tools.rglob("bin/busybox")).read_bytes(), 0o755)]
    entries += [initramfs.file(f"modules/{each.name}", each.read_bytes()) for each in modules]
    entries += [initramfs.file("modules/order", order.encode())]
    initramfs.write_archive(draft / "initramfs", entries)
    files = {path.name: _digest(path) for path in sorted(draft.iterdir())}
    whole = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return {"version": VERSION, "digest": whole, "files": files, "packages": versions}


def _linter(root: Path) -> dict[str, str]:
    """Bring in the ruff of the Python that builds, which the `lint` tool runs and Debian has no package of.

    Its version, where there is one.
    """
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.is_file():
        return {}
    (root / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ruff, root / "usr/local/bin/ruff")
    (root / "usr/local/bin/ruff").chmod(0o755)
    return {"ruff": subprocess.run([ruff, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]}


def _skeleton(root: Path) -> None:
    for name in ("usr", "etc", *_DIRECTORIES):
        (root / name).mkdir(parents=True)
    for name in MERGED:
        (root / "usr" / name).mkdir()
        (root / name).symlink_to(f"usr/{name}")


def _finish_root(root: Path) -> None:
    """Do what the packages' maintainer scripts would have done for what we need."""
    shutil.rmtree(root / "var")
    (root / "var").mkdir()
    (root / "var/tmp").symlink_to("/tmp")
    for name, text in (("passwd", _PASSWD), ("group", _GROUP), ("hosts", _HOSTS)):
        (root / "etc" / name).write_text(text)
    for name, target in _LINKS.items():
        link = root / name
        if not link.exists() and not link.is_symlink() and (link.parent / target).exists():
            link.symlink_to(target)
    for heavy in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian"):
        shutil.rmtree(root / heavy, ignore_errors=True)
    enter = [] if os.geteuid() == 0 else ["unshare", "--map-root-user"]
    run(["ldconfig" if shutil.which("ldconfig") else "/sbin/ldconfig", "-r", root])
    # a guest's root is read-only: without byte code every import would compile anew, slowest of all where the processor
    # is emulated
    run(
        [
            *enter,
            "chroot",
            root,
            "/usr/bin/python3",
            "-m",
            "compileall",
            "-q",
            *(f"/usr/lib/{each.name}" for each in sorted((root / "usr/lib").glob("python3*"))),
        ]
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def default_directory() -> Path:
    """Where an image is looked for when nobody names one: $TRIPLANE_ENVD_IMAGE, else the user's cache."""
    named = os.environ.get("TRIPLANE_ENVD_IMAGE")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(cache, "triplane", "guest-image")


def load(directory: Path) -> dict[str, Any]:
    """The image.json of an image. Raises ImageError, with the fix, where there is none."""
    fix = f"build one with `python -m envd.images.build --out {directory}`"
    try:
        about = json.loads((directory / "image.json").read_text())
    except (OSError, ValueError) as error:
        raise ImageError(f"no guest image in {directory}: {fix}") from error
    missing = [name for name in about.get("files", {}) if not (directory / name).is_file()]
    if about.get("version") != VERSION or missing or not about.get("files"):
        raise ImageError(f"the guest image in {directory} is of another version or lacks files: {fix}")
    return dict(about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m envd.images.build", description="Build a guest image from Debian packages."
    )
    where = default_directory()
    parser.add_argument(
        "--out", type=Path, default=where, help=f"folder of the image, replaced as a whole; default: {where}"
    )
    parser.add_argument("--packages", help=f"what is in the guest, instead of: {' '.join(PACKAGES)}")
    given = parser.parse_args(arguments)
    try:
        about = build(given.out, given.packages.split() if given.packages else PACKAGES)
    except (TriplaneError, OSError) as error:
        print(f"envd.images.build: {error}", file=sys.stderr)
        return 1
    print(f"{given.out}: image {str(about['digest'])[:12]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
