"""Properties of a virtual machine under any VMM: its shape, its kernel's command line, its snapshots' metadata."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envd.backends.base import BoxSpec
from envd.errors import EnvdError, SandboxStartError
from envd.sandbox.place import sandbox_environment

ABOUT = "machine.json"
OVERHEAD_MB = 64
"""Memory in MiB of a machine beyond its sandbox's limit, for its kernel."""
VSOCK_PORT = 1024
"""Port on which the agent listens in a machine with a vsock."""
VERSION = 2
GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BOUNDS = {"memory_mb": (32, 1 << 20), "vcpus": (1, 32), "disk_mb": (1, 1 << 20), "pids": (2, 1 << 22)}


@dataclass(frozen=True)
class Shape:
    """Properties fixed while a machine runs. Machines of one template and shape can start from one snapshot."""

    memory_mb: int
    """The sandbox's memory; the machine has OVERHEAD_MB more."""
    vcpus: int
    disk_mb: int
    pids: int
    read_only: bool
    runtime: str = ""
    """Digest of the packages, or of the root, that it has instead of the guest image's; empty: those."""

    @classmethod
    def of(cls, spec: BoxSpec) -> Shape:
        """Shape that a sandbox requests. Raises SandboxStartError for a network or values out of bounds."""
        if spec.network:
            raise SandboxStartError(
                "virtual machines have no network: remove network.allow from the rules, or choose another backend"
            )
        limits = spec.limits
        sizes = (limits.memory_mb, max(1, math.ceil(limits.cpu)), limits.disk_mb, limits.pids)
        shape = cls(*sizes, spec.read_only, spec.runtime_digest)
        for name, (least, most) in _BOUNDS.items():
            if not least <= getattr(shape, name) <= most:
                raise SandboxStartError(f"{name}={getattr(shape, name)}: a virtual machine supports {least} to {most}")
        return shape

    @property
    def machine_mb(self) -> int:
        """Total memory of the machine, in MiB."""
        return self.memory_mb + OVERHEAD_MB


def kernel_arguments(shape: Shape, stream: str, *more: str) -> str:
    """The kernel's command line. stream: `serial`, or `vsock:PORT`; see envd/images/init.sh."""
    settings = {"disk_mb": shape.disk_mb, "pids": shape.pids, "read_only": int(shape.read_only), "stream": stream}
    given = [f"envd.{key}={value}" for key, value in settings.items()]
    # A panic ends the machine; INIT sets the clock; the kernel does not probe for absent hardware.
    usual = [
        "console=ttyS0",
        "loglevel=4",
        "panic=-1",
        "no_timer_check",
        "tsc=reliable",
        "cryptomgr.notests",
        "random.trust_cpu=on",
    ]
    return " ".join([*usual, "8250.nr_uarts=1", "i8042.noaux", "i8042.nokbd", *more, *given])


def environment(spec: BoxSpec) -> dict[str, str]:
    """Environment of a sandbox's processes in a guest, with Debian's default PATH."""
    return {**sandbox_environment("/tmp"), "PATH": GUEST_PATH, **spec.env}


@dataclass(frozen=True)
class About:
    """Metadata of a snapshot on disk."""

    backend: str
    vmm: str
    """Program, version and other properties that must be equal to restore the state."""
    image: str
    """Digest of the guest image: a restored machine continues to read the disk that it was booted from."""
    template: str
    shape: Shape


def write_about(directory: Path, about: About) -> None:
    """Write a snapshot's metadata. Call last, so that a partial snapshot has none and is not valid."""
    (directory / ABOUT).write_text(json.dumps({"version": VERSION, **asdict(about)}, indent=1) + "\n")


def read_about(directory: Path, *, backend: str, vmm: str, image: str, spec: BoxSpec) -> About:
    """Read a snapshot's metadata and check that it can be restored here as `spec`.

    Raises SandboxStartError with the first mismatch.
    """
    try:
        found: dict[str, Any] = json.loads((directory / ABOUT).read_text())
        shape = Shape(**found["shape"])
        about = About(str(found["backend"]), str(found["vmm"]), str(found["image"]), str(found["template"]), shape)
        whole = all(
            isinstance(getattr(shape, name), int) and a <= getattr(shape, name) <= b for name, (a, b) in _BOUNDS.items()
        )
        if (
            found["version"] != VERSION
            or not whole
            or not isinstance(shape.read_only, bool)
            or not isinstance(shape.runtime, str)
        ):
            raise ValueError("another version, or bounds exceeded")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SandboxStartError(f"{directory.name} holds no snapshot of a virtual machine of this version") from error
    for what, has, wants in (
        ("is of the backend", about.backend, backend),
        ("was taken by", about.vmm, vmm),
        ("needs the guest image", about.image[:12], image[:12]),
        ("is of the template", about.template[:12], spec.template[:12]),
        ("needs the runtime", about.shape.runtime[:12], spec.runtime_digest[:12]),
        ("has the memory, in MiB,", shape.memory_mb, spec.limits.memory_mb),
    ):
        if has != wants:
            raise SandboxStartError(f"the snapshot {what} {has}, here is {wants}: restore it where they are the same")
    return about


class MachineError(EnvdError):
    """A virtual machine failed to perform an operation."""
