"""Landlock for the zygote's sandboxes: a second barrier in addition to the read-only mounts.

envd/native/spawn_walls.c restricts the spawner's sandboxes in the same way. Source of rights and numbers: the kernel's
include/uapi/linux/landlock.h. The three calls have the same numbers on all architectures.
"""

from __future__ import annotations

import ctypes
import os
import struct

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_DEVICES = 1 << 6 | 1 << 11
_ABI_1, _REFER, _TRUNCATE = (1 << 13) - 1, 1 << 13, 1 << 14
_SCOPES = 1 << 0 | 1 << 1
"""Abstract unix sockets and signals."""
_REFER_ABI, _TRUNCATE_ABI, _SCOPES_ABI = 2, 3, 6
_WRITABLE = ("/workspace", "/tmp")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def restrict_files() -> int:
    """Restrict writes of this process and all that it starts to the workspace, /tmp and a few devices; allow all reads.

    Call after no_new_privs.

    Returns the kernel's Landlock ABI; 0, without a restriction, if there is none or the first, which forbids every
    rename between directories. Raises OSError.
    """
    abi = _call(_CREATE_RULESET, None, 0, _VERSION, missing=0)
    if abi < _REFER_ABI:
        return 0
    everything = _ABI_1 | _REFER | (_TRUNCATE if abi >= _TRUNCATE_ABI else 0)
    wanted = struct.pack("=QQQ", everything, 0, _SCOPES) if abi >= _SCOPES_ABI else struct.pack("=Q", everything)
    ruleset = _call(_CREATE_RULESET, wanted, len(wanted), 0)
    try:
        _allow(ruleset, "/", _EXECUTE | _READ_FILE | _READ_DIR)
        for path in _WRITABLE:
            _allow(ruleset, path, everything & ~_MAKE_DEVICES)
        for path in _DEVICES:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE | (everything & _TRUNCATE))
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)


def _call(number: int, *arguments: int | bytes | None, missing: int | None = None) -> int:
    """Make a system call. missing: the result if the call fails; None: raise OSError."""
    libc = ctypes.PyDLL(None, use_errno=True)
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *given))
    if result >= 0:
        return result
    if missing is not None:
        return missing
    raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
