"""Linux calls that the standard library of Python 3.11 lacks, through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
SANDBOX_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 0x20, 0x1000, 0x4000, 0x40000, 0x80000
MNT_DETACH = 0x2

SANDBOX_USER = 231072
"""Host uid of a sandbox's root if envd runs as root. This user owns nothing on the host."""

MAKERS, MOST_MAKERS = 0x30000000, 0x10000000
"""First uid and number of the host users that create sandboxes' user namespaces, one user each.

The kernel charges what it counts by user (inotify instances, queued signals, processes) to the creator too, so that no
sandbox uses up the share of another, or the host's. These users own nothing.
"""

SUPERVISOR = 1
"""Uid inside a sandbox (SANDBOX_USER + 1 on the host) of the user that supervises the sandbox's root."""
_SUPERVISORS = (0, 1, 3, 5, 6, 7)
"""CAP_CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID; of the sandbox's user namespace only."""

_PR_SET_KEEPCAPS = 8
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 40

# PyDLL keeps the GIL: a cloned child must return to the interpreter without waiting for the lock.
_libc = ctypes.PyDLL(None, use_errno=True)
_SYSCALLS = {"x86_64": {"clone": 56, "pivot_root": 155}, "aarch64": {"clone": 220, "pivot_root": 41}}
_numbers = _SYSCALLS.get(platform.machine(), {})


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def sandbox_owner() -> int:
    """Return the host uid that owns sandbox and template files."""
    return SANDBOX_USER if os.geteuid() == 0 else os.geteuid()


def clone(namespaces: int) -> int:
    """Fork into new namespaces. Returns 0 in the child. Only for a single-threaded process."""
    if "clone" not in _numbers:
        raise OSError(38, f"no namespaces backend for {platform.machine()} machines")
    flags = ctypes.c_ulong(namespaces | signal.SIGCHLD)
    zero = ctypes.c_ulong(0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _libc.syscall(ctypes.c_long(_numbers["clone"]), flags, zero, zero, zero, zero)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check(pid, "clone")


def clone_as(maker: int, namespaces: int) -> int:
    """Call `clone` as user `maker`, to whom the kernel charges the new user namespace.

    The child's user is nobody until its user map is written.
    """
    with contextlib.suppress(OSError):  # in a container without that uid, root is charged
        os.seteuid(maker)
    pid = -1
    try:
        pid = clone(namespaces)
    finally:
        if pid != 0:
            os.seteuid(0)
    return pid


def unshare(namespaces: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(namespaces), "unshare")


def own_mounts() -> None:
    """Give this process its own mount namespace; if it is not root, in a user namespace where it becomes root."""
    if os.geteuid() != 0:
        uid, gid = os.geteuid(), os.getegid()
        unshare(CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", name).write_text(text)
    unshare(CLONE_NEWNS)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    options = data.encode() if data else None
    result = _libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options)
    _check(result, f"mount {kind or source} on {target}")


def unmount(target: str, flags: int = MNT_DETACH) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), f"unmount {target}")


def pivot_into(root: str) -> None:
    """Make a mount the root and unmount everything else."""
    os.chdir(root)
    _check(_libc.syscall(ctypes.c_long(_numbers["pivot_root"]), b".", b"."), "pivot_root")
    mount("", ".", flags=MS_SLAVE | MS_REC)
    unmount(".")
    os.chdir("/")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))


def hide_from_ptrace() -> None:
    """Refuse ptrace and /proc/<pid>/{mem,fd} to processes of the same user."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0)), "prctl dumpable")


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def no_new_privileges() -> None:
    """Disable setuid programs and file capabilities for this process and its children."""
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, one, zero, zero, zero), "prctl no_new_privs")


def drop_capabilities() -> None:
    """Drop every capability, for this process and all that it runs."""
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability))
    set_capabilities(())


def set_capabilities(kept: Iterable[int], inherited: Iterable[int] = ()) -> None:
    """Set the permitted and effective, and the inheritable capabilities. Dropped capabilities can't be regained."""
    mask, passed = (sum(1 << capability for capability in each) for each in (kept, inherited))
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("=6I", low, low, passed, high, high, 0)), "capset")


def become_supervisor(*, lasting: bool = False) -> None:
    """Become a sandbox's supervisor.

    The supervisor can act as the sandbox's root, kill its processes and override its file permissions. lasting: so can
    the next program that this process executes, which calls this again.
    """
    passed = _SUPERVISORS if lasting else ()
    if lasting:  # only what is inheritable before may be so afterwards
        set_capabilities(range(_LAST_CAPABILITY + 1), passed)
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability))
    _libc.prctl(_PR_SET_KEEPCAPS, ctypes.c_ulong(1))
    act_as(SUPERVISOR, passed)
    for capability in passed:
        raised = _libc.prctl(_PR_CAP_AMBIENT, *map(ctypes.c_ulong, (_PR_CAP_AMBIENT_RAISE, capability, 0, 0)))
        _check(raised, "prctl ambient capability")


def act_as(user: int, inherited: Iterable[int] = ()) -> None:
    """Act as this user of the sandbox, reversibly. Only for the supervisor. inherited: see `set_capabilities`."""
    os.setresgid(user, user, SUPERVISOR)
    os.setresuid(user, user, SUPERVISOR)
    set_capabilities(_SUPERVISORS, inherited)


def raise_loopback() -> None:
    """Bring `lo` up in a fresh network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        flags = struct.pack("16sH14s", b"lo", 0x1 | 0x40, b"")  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(sock, 0x8914, flags)  # SIOCSIFFLAGS


def limit_process(*, files: int, file_bytes: int, processes: int | None, memory: int | None) -> None:
    """Set the resource limits of this process and its children. None: enforced elsewhere."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(files, hard) if hard != resource.RLIM_INFINITY else files
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    for kind in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):  # the server may have higher limits
        resource.setrlimit(kind, (0, 0))
    if processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def leave(code: int) -> NoReturn:
    """Exit at once, without the exit handlers that a forked child inherits from its parent."""
    os._exit(code)
