"""What code under test may not ask of the kernel, and what it still may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.envd.harness import FILES
from tests.envd.verifying import Verifying

PREPARE = """
import ctypes, errno, fcntl, os, platform, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
LANDLOCK = libc.syscall(444, None, 0, 1) >= 2
def fails(call, *numbers):
    ctypes.set_errno(0)
    return call() < 0 and ctypes.get_errno() in numbers
def raises(call, *numbers):
    try:
        call()
    except OSError as error:
        return error.errno in numbers
    return False
"""
REFUSED = {
    "io_uring": "fails(lambda: libc.syscall(425, 4, None), errno.EPERM)",
    "keyctl": "fails(lambda: libc.syscall(250 if X86 else 219, 0, -3, 1), errno.EPERM)",
    "bpf": "fails(lambda: libc.syscall(321 if X86 else 280, 0, None, 0), errno.EPERM)",
    "ptrace": "fails(lambda: libc.ptrace(0, 0, 0, 0), errno.EPERM)",
    "userfaultfd": "fails(lambda: libc.syscall(323 if X86 else 282, 1), errno.EPERM)",
    "mount": "fails(lambda: libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), errno.EPERM)",
    "user namespace": "fails(lambda: libc.unshare(0x10000000), errno.EPERM)",
    "time namespace": "fails(lambda: libc.unshare(0x80), errno.EPERM)",
    "clone into a namespace": "fails(lambda: libc.syscall(56 if X86 else 220, 0x10000011, 0, 0, 0, 0), errno.EPERM)",
    "clone3": "fails(lambda: libc.syscall(435, None, 0), errno.ENOSYS)",
    "vsock": "raises(lambda: socket.socket(40, socket.SOCK_STREAM), errno.EAFNOSUPPORT)",
    "alg": "raises(lambda: socket.socket(38, socket.SOCK_SEQPACKET), errno.EAFNOSUPPORT)",
    "generic netlink": "raises(lambda: socket.socket(16, socket.SOCK_RAW, 16), errno.EAFNOSUPPORT)",
    "mptcp": "raises(lambda: socket.socket(2, socket.SOCK_STREAM, 262), errno.EPROTONOSUPPORT)",
    "typing into a terminal": (
        "raises(lambda: fcntl.ioctl(os.openpty()[1] if os.path.exists('/dev/ptmx') else 0, 0x5412, b'x'), errno.EPERM)"
    ),
    "a pair of another family": "raises(lambda: socket.socketpair(30, socket.SOCK_SEQPACKET), errno.EAFNOSUPPORT)",
    "a routing socket": "raises(lambda: socket.socket(16, socket.SOCK_RAW, 0), errno.EAFNOSUPPORT)",
    "asynchronous I/O": (
        "fails(lambda: libc.syscall(206 if X86 else 0, 8, ctypes.byref(ctypes.c_long())), errno.ENOSYS)"
    ),
    "an unknown number": "fails(lambda: libc.syscall(500), errno.ENOSYS)",
    "limits of process 1": "raises(lambda: __import__('resource').prlimit(1, 7, (9, 9)), errno.EPERM)",
    "the priority of process 1": "raises(lambda: os.setpriority(0, 1, 19), errno.EPERM)",
    "the processors of process 1": "raises(lambda: os.sched_setaffinity(1, {0}), errno.EPERM)",
    "a directory's notices": "raises(lambda: fcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, 1), errno.EPERM)",
    "a lease": "raises(lambda: fcntl.fcntl(os.open('/tmp/l', os.O_CREAT), 1024, 0), errno.EPERM)",
    "huge pages": "fails(lambda: libc.memfd_create(b'x', 4), errno.ENOMEM)",
    "a pipe outside the workspace": "raises(lambda: os.mkfifo('/dev/pipe'), errno.EACCES, errno.EROFS, errno.EPERM)",
    "a device in the workspace": (
        "raises(lambda: os.mknod('device', 0o20600, 0), errno.EACCES, errno.EPERM) or not LANDLOCK"
    ),
    "the x32 way in": "not X86 or fails(lambda: libc.syscall(0x40000000 + 39), errno.ENOSYS)",
}
ALLOWED = {
    "a subprocess": "subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout == b'1\\n'",
    "a shell": "subprocess.check_output('echo a | tr a b', shell=True) == b'b\\n'",
    "a thread": "(lambda t: (t.start(), t.join(), True)[2])(threading.Thread(target=print))",
    "a fork": "(lambda pid: os._exit(0) if pid == 0 else os.waitpid(pid, 0)[1] == 0)(os.fork())",
    "a socket pair and the loopback": "bool(socket.socketpair()) and bool(socket.create_server(('127.0.0.1', 0)))",
    "the names of hosts": "bool(socket.getaddrinfo('localhost', 80))",
    "its own limits": "__import__('resource').setrlimit(7, (512, 1024)) is None",
    "its own priority": "os.setpriority(0, 0, 19) is None and os.sched_setaffinity(0, os.sched_getaffinity(0)) is None",
    "a rename between directories": (
        "os.mkdir('d') is None and os.rename('calc.py', 'd/c.py') is None and os.rename('d/c.py', 'calc.py') is None"
    ),
    "devices": "open('/dev/null', 'w').write('x') and open('/dev/zero', 'rb').read(1) == bytes(1)",
    "locks": "fcntl.flock(os.open('/tmp/lock', os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX) is None",
    "a receive buffer": "socket.socketpair()[0].setsockopt(1, 8, 1 << 20) is None",
    "git": "subprocess.check_output(['git', 'log', '--format=%s']) == b'template\\n'",
}


@pytest.fixture(scope="module")
def verifying() -> Iterator[Verifying]:
    with Verifying("namespaces") as found:
        yield found


@pytest.mark.parametrize("case", [*REFUSED, *ALLOWED], ids=lambda name: name.replace(" ", "-"))
def test_what_the_kernel_is_asked(verifying: Verifying, case: str) -> None:
    hidden = {"test_s.py": f"{PREPARE}\ndef test_it():\n    assert {({**REFUSED, **ALLOWED})[case]}\n".encode()}
    result = verifying.verify({}, files=FILES, hidden=hidden, tests=("test_s.py::test_it",))
    assert (result.outcomes[0].status, result.outcomes[0].message) == ("passed", "")
