"""The guest's kernel out of Debian's package: the compressed one for QEMU, the plain ELF for Firecracker, and the
drivers it boots with.
"""

from __future__ import annotations

import re
from pathlib import Path

from envd.images.packages import ImageError, run

PACKAGE = "linux-image-cloud-amd64"
DRIVERS = (
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "virtio-rng",
    "squashfs",
    "overlay",
    "vmw_vsock_virtio_transport",
)
"""What the initial ramdisk loads, each after what it needs."""
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
_LZ4_LEGACY = b"\x02\x21\x4c\x18"


def drivers(tree: Path) -> list[Path]:
    """The files of DRIVERS and of what they need, in the order to load them."""
    files = {_plain(path.stem): path for path in tree.rglob("*.ko")}
    ordered: list[Path] = []

    def add(name: str) -> None:
        path = files.get(_plain(name))
        if path is None:
            raise ImageError(f"the kernel in {PACKAGE} lacks the driver {name}: this envd does not support it")
        found = _DEPENDS.search(path.read_bytes())
        for needed in found[1].decode().split(",") if found and found[1] else []:
            add(needed)
        if path not in ordered:
            ordered.append(path)

    for name in DRIVERS:
        add(name)
    return ordered


def extract_elf(bzimage: Path, lz4: Path, target: Path) -> None:
    """Write the uncompressed kernel, which Firecracker boots, out of a bzImage whose payload is LZ4 (as Debian's cloud
    kernel's).
    """
    whole = bzimage.read_bytes()
    start = whole.find(_LZ4_LEGACY)
    if start < 0:
        raise ImageError(f"{bzimage.name} is not compressed with LZ4: provide the uncompressed kernel for Firecracker")
    packed = target.with_suffix(".lz4")
    packed.write_bytes(whole[start:])
    try:
        # the payload is followed by other data, at which lz4 complains after having written all
        run(["sh", "-c", '"$0" -d -c -q "$1" >"$2" 2>/dev/null || true', lz4, packed, target])
    finally:
        packed.unlink()
    with target.open("rb") as unpacked:
        if unpacked.read(4) != b"\x7fELF":
            raise ImageError(f"{bzimage.name} holds no ELF kernel")


def _plain(name: str) -> str:
    return name.replace("-", "_")
