"""Runs a program as `docker run` confines one: `python -m tests.envd.confined UID PROGRAM...`.

Docker's default capabilities (none for another user than root), no new privileges, and of its seccomp profile the part
that namespaces need: unshare, setns, mount and clone with namespaces are refused with EPERM, clone3 with ENOSYS.
Source: moby's profiles/seccomp/default.json.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

from envd.sandbox import linux

DOCKER = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD,
AUDIT_WRITE, SETFCAP.
"""
_NEW_NAMESPACES = 0x7E020000
_NUMBERS = {
    "x86_64": {"clone": 56, "clone3": 435, "refused": (272, 308, 165, 166, 155, 428, 429, 430, 442)},
    "aarch64": {"clone": 220, "clone3": 435, "refused": (97, 268, 40, 39, 41, 428, 429, 430, 442)},
}
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _FILTER, _PR_CAPBSET_DROP = 22, 2, 24


def confine(user: int) -> None:
    """Confine this process for good, as that user."""
    libc = ctypes.CDLL(None, use_errno=True)
    kept = DOCKER if user == 0 else ()
    for capability in range(41):
        if capability not in kept:
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if os.geteuid() == 0:
        linux.set_capabilities(kept)
    linux.no_new_privileges()
    _filter(libc)


def _filter(libc: ctypes.CDLL) -> None:
    numbers = _NUMBERS[platform.machine()]
    refused: tuple[int, ...] = numbers["refused"]  # type: ignore[assignment]
    lines = [(_LOAD, 0, 0, 0)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    lines += [(_EQUAL, 0, 1, numbers["clone3"]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += [(_EQUAL, 0, 3, numbers["clone"]), (_LOAD, 0, 0, 16), (_ANY_BIT, 0, 1, _NEW_NAMESPACES)]
    lines += [(_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the filter is refused")


if __name__ == "__main__":
    confine(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
