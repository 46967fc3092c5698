"""What backends run on in tests: the real programs where they are installed, else stand-ins for foreign systems.

The stand-in for Firecracker speaks the API of v1.13 and runs the real agent without a virtual machine
(firecracker_server.py); the one for Kubernetes serves the paths and the exec protocol that pods need
(kubernetes_server.py).
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from envd.images import initramfs
from envd.images.build import VERSION as IMAGE_VERSION
from envd.images.build import build, default_directory, load
from envd.images.packages import ImageError
from envd.native import guest_binary
from tests.envd import firecracker_server
from tests.envd.kubernetes_server import Cluster, serving
from tests.needs import require

SERVER = Path(firecracker_server.__file__)
FIRECRACKER_NEEDS = ("mksquashfs", "unsquashfs", "setpriv", "unshare", "root")
"""Programs that the stand-in for Firecracker runs."""


@dataclass
class Installed:
    """A stand-in for a host with Firecracker."""

    program: Path
    image: Path
    log: Path

    def requests(self) -> list[dict[str, object]]:
        """What was asked since the last call, without the waiting for an API's socket."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        self.log.write_text("")
        return [line for line in lines if line["method"] != "GET"]


@contextmanager
def firecracker_host(base: Path) -> Iterator[Installed]:
    """A host with the stand-in below an empty directory."""
    command = f'exec {sys.executable} -S {SERVER} firecracker "$@"'
    (base / "firecracker").write_text(f"#!/bin/sh\n{command}\n")
    # the real one needs no /proc; the stand-in looks its guest's processes up there
    jailed = (
        f"exec unshare --mount sh -c 'mount -t proc proc /proc && exec \"$@\"' sh {sys.executable} -S {SERVER} jailer"
        ' "$@"'
    )
    (base / "jailer").write_text(f"#!/bin/sh\n{jailed}\n")
    for name in ("firecracker", "jailer"):
        (base / name).chmod(0o755)
    image = base / "image"
    image.mkdir()
    (image / "vmlinux").write_bytes(b"\x7fELF and no more")
    (image / "rootfs.squashfs").write_bytes(b"hsqs")
    initramfs.write_archive(image / "initramfs", [initramfs.directory("bin"), initramfs.file("init", b"older", 0o755)])
    files = dict.fromkeys(("vmlinux", "rootfs.squashfs", "initramfs"), "")
    (image / "image.json").write_text(json.dumps({"version": IMAGE_VERSION, "digest": "d" * 64, "files": files}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPLANE_ENVD_FIRECRACKER", str(base / "firecracker"))
        patch.setenv("FAKE_FIRECRACKER_LOG", str(base / "log"))
        yield Installed(base / "firecracker", image, base / "log")


@contextmanager
def pods_cluster(containers: Path, channel: str = "v5.channel.k8s.io", tls: Path | None = None) -> Iterator[Cluster]:
    """A cluster whose containers are processes here. channel: the newest protocol of `exec` that it speaks. tls: see
    `serving`.
    """
    agent = guest_binary()
    assert agent is not None
    made = Cluster(containers, agent, channel)
    with serving(made, tls) as config, pytest.MonkeyPatch.context() as patch:
        patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        patch.setenv("KUBECONFIG", config)
        patch.setenv("TRIPLANE_ENVD_PODS_IMAGE", "registry.example/sandbox:1")
        patch.setenv("TRIPLANE_ENVD_PODS_RUNTIME_CLASS", "sandboxed")
        yield made


def qemu_image() -> Path:
    """The guest image, built where there is none. Skips where a program for it or for QEMU is not installed."""
    require("qemu-system-x86_64", "mksquashfs", "apt-get")
    where = default_directory()
    where.parent.mkdir(parents=True, exist_ok=True)
    with (where.parent / ".guest-image.lock").open("w") as lock:  # test processes may want it at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            load(where)
        except ImageError:
            build(where)
    return where
