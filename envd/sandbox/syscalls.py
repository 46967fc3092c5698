"""System call filter for the zygote's sandboxes. The native spawner generates the filter (envd/native/spawn_filter.c)
for its own sandboxes and for these.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import subprocess

from envd.native import spawner_binary

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER = 1
_INSTRUCTION_BYTES = 8


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


@functools.cache
def prepare_filter() -> bytes:
    """Return the filter as an array of struct sock_filter, cached in this process and its later forks.

    Raises OSError if the spawner is not built.
    """
    program = spawner_binary()
    if program is None:
        raise OSError("the system call filter needs envd-spawn: run `python -m envd.native.build`")
    return subprocess.run([program, "--print-filter"], stdout=subprocess.PIPE, check=True, timeout=30).stdout


def filter_calls() -> None:
    """Install the filter for this process and all that it starts; filtered system calls fail.

    Call after no_new_privs. Raises OSError.
    """
    code = prepare_filter()
    libc = ctypes.PyDLL(None, use_errno=True)
    program = _Program(len(code) // _INSTRUCTION_BYTES, code)
    arguments = (ctypes.c_ulong(_SET_MODE_FILTER), ctypes.c_ulong(0), ctypes.byref(program))
    if libc.syscall(ctypes.c_long(_SECCOMP[platform.machine()]), *arguments) < 0:
        raise OSError(ctypes.get_errno(), "the filter of system calls can't be installed")
