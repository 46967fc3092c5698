"""Checks of isolation: start a sandbox with envd's backends, and test features of the kernel and other programs."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
from collections.abc import Callable
from pathlib import Path

from envd.backends import BackendName
from envd.sandbox.cgroups import Cgroups
from resources.sandboxes_config import ENVD_VARIABLE
from triplane_dagster.doctor.findings import Check, Finding, ask, broken, missing, ok, trial, version_of

SANDBOX_S = 60.0
_KVM_GET_API_VERSION = 0xAE00
_LANDLOCK_CREATE_RULESET, _LANDLOCK_VERSION = 444, 1
_NAMESPACES_FIX = (
    "as root `sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000"
    " kernel.apparmor_restrict_unprivileged_userns=0`; in a container see docs/deploy.md"
)


def checks() -> list[Check]:
    """Checks of isolation."""
    return [
        Check("sandboxes", "episodes and their tests", sandboxes, required=True, timeout_s=2 * SANDBOX_S),
        Check("isolation", "policies that are not trusted", backend("namespaces", namespaces), timeout_s=SANDBOX_S),
        Check("overlayfs", "isolation", overlay),
        Check("cgroups", "limits of memory, processes and cores a sandbox", cgroups),
        Check("seccomp", "containers with a profile of their own", seccomp),
        Check("Landlock", "isolation", landlock),
        Check(
            "gVisor",
            "stronger isolation: `sandboxes.backend: gvisor`",
            backend("gvisor", gvisor),
            timeout_s=SANDBOX_S,
        ),
        Check("KVM", "fast virtual machines as sandboxes", kvm),
        Check(
            "Firecracker",
            "virtual machines as sandboxes: `sandboxes.backend: firecracker`",
            backend("firecracker", firecracker),
            timeout_s=SANDBOX_S,
        ),
        Check(
            "QEMU",
            "virtual machines as sandboxes: `sandboxes.backend: qemu`",
            backend("qemu", qemu),
            timeout_s=SANDBOX_S,
        ),
    ]


def sandboxes() -> Finding:
    """Start the envd server as a run would, and run a command in one of its sandboxes."""
    address = os.environ.get(ENVD_VARIABLE)
    said = trial("sandbox", address or "auto", timeout_s=SANDBOX_S)
    if said.code == 0:
        return ok(said.out.strip())
    if address:
        return broken(said.last_words, f"start `python -m envd serve --listen {address}`, or unset {ENVD_VARIABLE}")
    return broken(said.last_words, _NAMESPACES_FIX)


def backend(name: BackendName, here: Callable[[], Finding]) -> Callable[[], Finding]:
    """Check of a backend: on the servers that $TRIPLANE_ENVD names, which runs ask for it, else on this machine."""

    def look() -> Finding:
        address = os.environ.get(ENVD_VARIABLE)
        if not address:
            return here()
        said = trial("sandbox", address, name, timeout_s=SANDBOX_S)
        fix = f"start the server with `--backend {name}`; in the chart `envd.backend`"
        return ok(said.out.strip()) if said.code == 0 else missing(said.last_words, fix)

    return look


def namespaces() -> Finding:
    """Try the namespaces backend."""
    said = trial("sandbox", "namespaces", timeout_s=SANDBOX_S)
    return ok(said.out.strip()) if said.code == 0 else broken(said.last_words, _NAMESPACES_FIX)


def overlay() -> Finding:
    """Mount an overlay in new namespaces."""
    script = (
        "mount -t tmpfs none /mnt && cd /mnt && mkdir l u w m && mount -t overlay -o"
        " lowerdir=l,upperdir=u,workdir=w,userxattr none m"
    )
    try:
        said = ask(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script])
    except FileNotFoundError:
        return missing("no unshare in PATH", "`apt-get install util-linux mount`")
    if said.code == 0:
        return ok("mounted in a user namespace")
    return broken(said.last_words, "Linux 5.11 or newer; `modprobe overlay`; " + _NAMESPACES_FIX)


def cgroups() -> Finding:
    """Create and remove a control group."""
    made = Cgroups(f"triplane-doctor-{os.getpid()}")
    try:
        enforced = made.enforced
    finally:
        made.close()
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    versions = " and ".join(sorted({"v2" if line.startswith("0::") else "v1" for line in lines}))
    if set(enforced) == {"memory", "pids", "cpu"}:
        return ok(f"{versions}: {', '.join(enforced)} can be limited")
    without = sorted({"memory", "pids", "cpu"} - set(enforced))
    return missing(
        f"{versions}: {', '.join(without)} can't be limited by this user, resource limits take their place",
        "run envd as root, or in a delegated group: `systemd-run --user --scope -p Delegate=yes ...`",
    )


def seccomp() -> Finding:
    """Read the kernel's seccomp support, and whether this process is filtered."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    if "Seccomp" not in fields:
        return missing("the kernel has none", "a kernel with CONFIG_SECCOMP_FILTER")
    return ok({"0": "no filter here", "1": "strict here", "2": "this process is filtered"}[fields["Seccomp"].strip()])


def landlock() -> Finding:
    """Ask the kernel for its Landlock version."""
    if platform.machine() not in ("x86_64", "aarch64"):
        return missing(f"not tried on {platform.machine()}", "x86_64 or aarch64")
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_long(_LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION)]
    version = libc.syscall(*arguments)
    if version < 0:
        return missing(os.strerror(ctypes.get_errno()), "boot a kernel of 5.13 or newer with `lsm=landlock,...`")
    return ok(f"ABI {version}")


def gvisor() -> Finding:
    """Ask runsc for its version."""
    return version_of("runsc", "--version", fix="`deploy/install-runsc.sh`")


def kvm() -> Finding:
    """Open /dev/kvm and query it; whether a guest boots is not tested."""
    device = "/dev/kvm"
    if not Path(device).exists():
        return missing(
            f"no {device}", "enable virtualization in the firmware, or nested virtualization of this machine"
        )
    try:
        descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return broken(f"{device}: {error.strerror}", "`usermod -aG kvm $USER`, then log in again")
    try:
        return ok(f"API {fcntl.ioctl(descriptor, _KVM_GET_API_VERSION)}; whether a guest boots was not tried")
    finally:
        os.close(descriptor)


def firecracker() -> Finding:
    """Ask Firecracker for its version."""
    return version_of("firecracker", "--version", fix="put a release's `firecracker` into PATH")


def qemu() -> Finding:
    """Ask QEMU for its version."""
    machine = platform.machine()
    package = {"x86_64": "qemu-system-x86", "aarch64": "qemu-system-arm"}.get(machine, "qemu-system")
    return version_of(f"qemu-system-{machine}", "--version", fix=f"`apt-get install {package}`")
