"""Opening workspace paths that can't leave the workspace, whatever links it holds.

On Linux the kernel resolves (openat2, RESOLVE_IN_ROOT), so there is no gap between a check and its use. Elsewhere the
real path is checked first, which only stops honest mistakes; isolation is then the backend's business.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path, PurePosixPath

_SYS_OPENAT2 = 437
_RESOLVE_IN_ROOT = 0x10
_RESOLVE_NO_MAGICLINKS = 0x02
WORKSPACE = "/workspace"
"""Where a sandbox sees its workspace; absolute paths below it are understood, all others are taken from the root."""


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def relative(path: str) -> str:
    """A path as the tools print it: from the workspace root, without `.` and doubled slashes; the root is `.`."""
    if path == WORKSPACE or path.startswith(WORKSPACE + "/"):
        path = path[len(WORKSPACE) :]
    return str(PurePosixPath(path.lstrip("/") or "."))


def _has_openat2() -> bool:
    if os.uname().sysname != "Linux":
        return False
    _libc.syscall(_SYS_OPENAT2, -1, b".", None, 0)
    return ctypes.get_errno() not in (38, 1)  # ENOSYS, EPERM: an old kernel or a filter


_OPENAT2 = _has_openat2()


def open_in_root(root: Path, path: str, flags: int, mode: int = 0o644) -> int:
    """Open a path inside root and return the descriptor. Raises OSError as open(2) does."""
    flags |= os.O_CLOEXEC
    if not _OPENAT2:
        return _open_checked(root, path, flags, mode)
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = _OpenHow(flags, mode if flags & os.O_CREAT else 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        name = os.fsencode(relative(path))
        fd: int = _libc.syscall(_SYS_OPENAT2, root_fd, name, ctypes.byref(how), ctypes.sizeof(how))
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        return fd
    finally:
        os.close(root_fd)


def make_parents(root: Path, path: str) -> None:
    """Create the missing directories above a path inside root."""
    parents = PurePosixPath(relative(path)).parents
    for parent in list(reversed(parents))[1:]:
        above_fd = open_in_root(root, str(parent.parent), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.mkdir(parent.name, dir_fd=above_fd)
        except FileExistsError:
            pass
        finally:
            os.close(above_fd)


def _open_checked(root: Path, path: str, flags: int, mode: int) -> int:
    base = root.resolve()
    real = (base / relative(path)).resolve()
    if real != base and base not in real.parents:
        raise FileNotFoundError(2, os.strerror(2), path)
    return os.open(real, flags, mode)
