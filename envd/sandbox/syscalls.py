"""A filter of system calls for what the Python zygote forks: the verifier, and sandboxes where there is no native helper.

It refuses what the native one refuses (envd/native/spawn_walls.c): calls that programs under test do not need, and through which faults of
kernels have been reached. Source of the numbers: the kernel's arch/x86/entry/syscalls and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable, Mapping

_REFUSED: Mapping[str, Iterable[int]] = {
    "x86_64": (
        101, 103, 134, 153, 154, 155, 159, 161, 163, 164, 165, 166, 167, 168, 169, 172, 173, 175, 176, 179, 227, 246, 248, 249, 250, 298, 300, 304,
        305, 308, 310, 311, 312, 313, 320, 321, 323,
    ),
    "aarch64": (
        39, 40, 41, 51, 58, 60, 89, 104, 105, 106, 112, 116, 117, 142, 170, 171, 217, 218, 219, 224, 225, 241, 262, 265, 266, 268, 270, 271, 272,
        273, 280, 282, 294,
    ),
}  # fmt: skip
"""ptrace, mounts, chroot, modules, clocks, kexec, swap, quotas, keys, bpf, userfaultfd, perf, fanotify, setns, process_vm, kcmp, file handles."""
_REFUSED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 440, 442, 443, 467)
"""io_uring, the new mount calls, pidfd_getfd, process_madvise, quotactl_fd: the same number on all machines."""
_CLONE3 = 435
_CLONE = {"x86_64": 56, "aarch64": 220}
_UNSHARE = {"x86_64": 272, "aarch64": 97}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_PROTOCOLS = (0, 1, 6, 17, 58)
"""The family's usual one, ICMP, TCP, UDP, ICMPv6."""
_TERMINALS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX type into a terminal in its user's name; TIOCSETD has modules loaded."""
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def filter_calls() -> None:
    """Install the filter for this process and all that it starts. After no_new_privs. Raises OSError.

    Machines whose numbers are not listed go without, as they have no namespaces backend either.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURE:
        return
    code = b"".join(struct.pack("=HBBI", *each) for each in _program(machine))
    libc = ctypes.PyDLL(None, use_errno=True)
    program = _Program(len(code) // 8, code)
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.byref(program), 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, "the filter of system calls can't be installed")


def _program(machine: str) -> list[_Instruction]:
    refuse, missing, allow = _answer(errno.EPERM), _answer(errno.ENOSYS), (_RETURN, 0, 0, _ALLOW)
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _ARCHITECTURE[machine]), missing,
        (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), missing,
    ]  # fmt: skip
    for number in (*_REFUSED[machine], *_REFUSED_EVERYWHERE):
        code += [(_EQUAL, 0, 1, number), refuse]
    code += [
        (_EQUAL, 0, 1, _CLONE3),
        missing,
    ]  # its flags are out of a filter's sight: the C library takes clone instead
    for calls, body in (
        (_CLONE, _refusing(0, _ANY_BIT, (_NAMESPACES,))),
        (_UNSHARE, _refusing(0, _ANY_BIT, (_NAMESPACES | 0x80,))),  # here the lowest byte is CLONE_NEWTIME, too
        (_SOCKET, _sockets()),
        (_IOCTL, _refusing(1, _EQUAL, _TERMINALS)),
    ):
        code += [(_EQUAL, 0, len(body), calls[machine]), *body]
    return [*code, allow]


def _refusing(argument: int, test: int, values: Iterable[int]) -> list[_Instruction]:
    """Refuse these values of an argument, allow all others."""
    refusals = [each for value in values for each in ((test, 0, 1, value), _answer(errno.EPERM))]
    return [_argument(argument), *refusals, (_RETURN, 0, 0, _ALLOW)]


def _sockets() -> list[_Instruction]:
    """Sockets of the families that programs use, and of those only the protocols that need no module loaded."""
    allow = (_RETURN, 0, 0, _ALLOW)
    code: list[_Instruction] = [
        _argument(0), (_EQUAL, 0, 1, _UNIX), allow,
        (_EQUAL, 0, 3, _NETLINK), _argument(2), (_EQUAL, 0, 1, 0), allow,  # NETLINK_ROUTE
        _argument(0), (_EQUAL, 2, 0, _INET), (_EQUAL, 1, 0, _INET6), _answer(errno.EAFNOSUPPORT), _argument(2),
    ]  # fmt: skip
    for protocol in _PROTOCOLS:
        code += [(_EQUAL, 0, 1, protocol), allow]
    return [*code, _answer(errno.EPROTONOSUPPORT)]


def _argument(number: int) -> _Instruction:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * number


def _answer(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)
