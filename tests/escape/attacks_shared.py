"""Attacks on what sandboxes share although they see nothing of each other: memory that the kernel charges to nobody,
counters of the whole host, inodes of system files; and on process 1 and the limits of a sandbox's own, so that its
episode can't be graded.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path

from envd.client import EnvdError, Limits, SandboxGone, ToolCall
from envd.operations.client import ManagedSandbox
from tests.escape.arena import Arena
from tests.escape.attack import OWN_KERNEL, UNTOLD, Attack

_FILE = "shared.py"
_MIB = 1 << 20
_MOST = 160 * _MIB
_LATELY, _TRIES = 100, 3
_OWN = {"qemu": OWN_KERNEL}
_OWN_USER = {**_OWN, "gvisor": "gVisor's own kernel serves it: the host's is never asked"}
_SHARED = [
    "/",
    "/etc",
    "/etc/passwd",
    "/usr",
    "/usr/bin/env",
    "/dev/null",
    "/dev/urandom",
    "/var",
    "/.template/calc.py",
    "/workspace/calc.py",
]

HOLD_SOCKETS = """
BIG = bytes(60_000)
def fill(sock):
    sock.setblocking(False)
    try:
        while True:
            sock.send(BIG)
    except OSError:
        pass
def streams(kept):
    listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
    while len(kept) < 900:
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        fill(near)
        fill(far)
        kept += [near, far]
def backlog(kept):
    kept.append(socket.create_server(("127.0.0.1", 0), backlog=4096))
    for _ in range(2000):
        near = socket.socket()
        near.connect(kept[0].getsockname())
        fill(near)
        near.close()
def datagrams(kept):
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    while len(kept) < 900:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        sock.bind(("127.0.0.1", 0))
        kept.append(sock)
        for _ in range(150):
            out.sendto(BIG, sock.getsockname())
def pairs(kept):
    while len(kept) < 900:
        kind = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)[len(kept) % 3]
        a, b = socket.socketpair(socket.AF_UNIX, kind)
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        fill(a)
        kept += [a, b]
def routes(kept):
    one = struct.pack("IHHII", 32, 18, 1, 1, 0) + struct.pack("BxHiII", 0, 0, 1, 0, 0)
    while len(kept) < 100:
        sock = socket.socket(16, socket.SOCK_RAW, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        sock.bind((0, 0))
        sock.setblocking(False)
        kept.append(sock)
        try:
            for _ in range(4000):
                sock.send(one)
        except OSError:
            pass
kept = []
try:
    kinds = {"streams": streams, "backlog": backlog, "datagrams": datagrams, "pairs": pairs, "routes": routes}
    kinds[sys.argv[1]](kept)
except OSError as error:
    print(error)
open("held-" + sys.argv[1], "w").close()
time.sleep(60)
"""
KINDS = ("streams", "datagrams", "pairs", "routes", "backlog")
"""The last one ends its sandbox."""


class Memory:
    """What the host gave up since this was made, in bytes, looked at while an attack goes on."""

    def __init__(self) -> None:
        self._free, self._buffers = _free(), _buffers()
        self._lately: deque[int] = deque(maxlen=_LATELY)
        self.most_buffers = 0
        """The most that buffers of TCP and UDP held."""

    @property
    def held(self) -> int:
        """The least of the last samples: other programs of the machine take memory, too, and mostly give it back."""
        return min(self._lately, default=0)

    def look(self) -> None:
        """Take the present into account."""
        self._lately.append(self._free - _free())
        self.most_buffers = max(self.most_buffers, _buffers() - self._buffers)


def _free() -> int:
    lines = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(lines["MemAvailable:"])


def _buffers() -> int:
    """What TCP and UDP hold on the whole host, of all namespaces."""
    pages = [
        int(line.rsplit(" mem ", 1)[1])
        for line in Path("/proc/net/sockstat").read_text().splitlines()
        if " mem " in line
    ]
    return os.sysconf("SC_PAGE_SIZE") * sum(pages)


async def held_sockets(arena: Arena) -> str:
    """Two sandboxes of 64 MiB, each kind of socket in turn."""
    words = []
    for kind in KINDS:
        for _ in range(_TRIES):
            memory = await _held(arena, kind)
            bad = max(memory.most_buffers, memory.held) > _MOST
            if not bad:
                break
        said = f"{memory.most_buffers >> 20} MiB of buffers, {memory.held >> 20} MiB of the host's"
        words.append(f"{'BREACH' if bad else 'held'} {kind} {said}")
    return "\n".join(words)


async def _held(arena: Arena, kind: str) -> Memory:
    boxes = [await arena.sandbox(limits=Limits(64, 32, 1, 16, 120)) for _ in range(2)]
    memory = Memory()
    holding = [asyncio.create_task(_hold(box, kind, arena.patience_s)) for box in boxes]
    while not all(task.done() for task in holding):
        memory.look()
        await asyncio.sleep(0.01)
    for _ in range(_LATELY):
        memory.look()
        await asyncio.sleep(0.01)
    await asyncio.gather(*holding)
    await asyncio.gather(*(box.close() for box in boxes))
    return memory


async def _hold(sandbox: ManagedSandbox, kind: str, patience_s: float) -> None:
    """Return once it holds what it can, or was ended."""
    until = asyncio.get_running_loop().time() + patience_s / 2
    try:
        await sandbox.files.write(_FILE, f"from attempts import *\n{HOLD_SOCKETS}".encode())
        await sandbox.processes.start(["python3", _FILE, kind])
        while asyncio.get_running_loop().time() < until and (await sandbox.processes.list())[-1].state == "running":
            if any(each.path == f"held-{kind}" for each in (await sandbox.files.list("."))[0]):
                break
            await asyncio.sleep(0.1)
    except SandboxGone:
        return


ASYNC_IO = """
context, made = ctypes.c_long(), 0
for n in range(200):
    if libc.syscall(NUMBERS["io_setup"], 4096, ctypes.byref(context)) < 0:
        print("refused io_setup after", made, errno.errorcode[ctypes.get_errno()], flush=True)
        break
    made, context = made + 4096, ctypes.c_long()
else:
    print("BREACH", made, "of fs.aio-max-nr")
"""


async def async_io(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    await sandbox.files.write(_FILE, f"from attempts import *\n{ASYNC_IO}\ntime.sleep(2)".encode())
    calling = asyncio.ensure_future(sandbox.call(ToolCall("exec", {"command": f"python3 {_FILE}"})))
    await asyncio.sleep(1)
    taken = int(Path("/proc/sys/fs/aio-nr").read_text())
    return f"{(await calling).text}\n{'BREACH the host counts' if taken > 1024 else 'of the host'} {taken}"


HOLD_LOCKS = f"""
import fcntl, resource
fds = [os.open(path, os.O_RDONLY) for path in {_SHARED!r}]
for fd in fds:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        fcntl.fcntl(fd, 38, struct.pack("hhqqi", fcntl.F_RDLCK, 0, 0, 0, 0))  # F_OFD_SETLKW
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        print("refused", errno.errorcode[error.errno], flush=True)
open("ready", "w").close()
time.sleep(60)
"""
TRY_LOCKS = f"""
import errno, fcntl, os, sys
for path in {_SHARED!r}:
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        free = error.errno == errno.ENOLCK and path.startswith("/dev/")  # gVisor's devices take no locks
        print("takes no locks:" if free else "BREACH locked:", path, error)
print("all are free")
"""
HEAR = f"""
import fcntl
attempt("F_NOTIFY", fcntl.fcntl, os.open("/usr", os.O_RDONLY), fcntl.F_NOTIFY, 0x8000003F)
attempt("fanotify", call, "fanotify_init", 4, 0)
fd, heard = libc.inotify_init1(os.O_NONBLOCK), {_SHARED!r}
for path in heard:
    libc.inotify_add_watch(fd, path.encode(), 0x0FFF)
open("ready", "w").close()
time.sleep(float(sys.argv[1]))
try:
    print("BREACH heard", len(os.read(fd, 65536)), "bytes of events")
except BlockingIOError:
    print("nothing heard")
"""
TOUCH = f"""
import os
for path in {_SHARED!r}:
    fd = os.open(path, os.O_RDONLY)
    os.read(fd, 1) if not os.path.isdir(path) else os.listdir(fd)
    os.close(fd)
open("/dev/null", "w").write("x")
print("touched")
"""


async def _begin(
    arena: Arena, code: str, *arguments: str
) -> tuple[ManagedSandbox, asyncio.Task[tuple[object, bytes, bytes]]]:
    """A sandbox in which this runs, once it is ready."""
    sandbox = await arena.sandbox()
    await sandbox.files.write(_FILE, f"from attempts import *\n{code}".encode())
    running = asyncio.create_task(sandbox.processes.run(["python3", _FILE, *arguments]))
    for _ in range(int(arena.patience_s * 10)):
        if running.done() or any(each.path == "ready" for each in (await sandbox.files.list("."))[0]):
            break
        await asyncio.sleep(0.1)
    return sandbox, running


async def locks(arena: Arena) -> str:
    """The neighbour, and a verifier, need the same files."""
    _, running = await _begin(arena, HOLD_LOCKS)
    said = await arena.neighbour.run(TRY_LOCKS)
    tests = {"test_hidden.py": _as_test(TRY_LOCKS.replace('print("takes', 'assert free, print("takes'))}
    verdict = await arena.verified({}, hidden=tests, tests=("test_hidden.py::test_it",))
    running.cancel()
    return "\n".join([*said, "a verifier: " + verdict])


async def notices(arena: Arena) -> str:
    """What the neighbour and a verifier do with the same files is not heard."""
    _, running = await _begin(arena, HEAR, str(4 * arena.slow))
    await arena.neighbour.run(TOUCH)
    await arena.verified({}, hidden={"test_hidden.py": _as_test(TOUCH)}, tests=("test_hidden.py::test_it",))
    _, said, error = await running
    return said.decode() + error.decode()


def _as_test(code: str) -> bytes:
    return b"def test_it():\n" + b"".join(b"    " + line + b"\n" for line in code.encode().splitlines())


PAIRS = """
for name, family in (("tipc", 30), ("inet", 2), ("netlink", 16), ("vsock", 40), ("bluetooth", 31), ("alg", 38)):
    attempt("pair of " + name, socket.socketpair, family, socket.SOCK_SEQPACKET)
"""
FIRST = """
import resource
for name in ("NOFILE", "NPROC", "AS", "FSIZE", "CPU", "STACK", "DATA", "MEMLOCK"):
    attempt("limit " + name, resource.prlimit, 1, getattr(resource, "RLIMIT_" + name), (1, 1))
attempt("nice", os.setpriority, os.PRIO_PROCESS, 1, 19)
attempt("nice by user", os.setpriority, os.PRIO_USER, 0, 19)
attempt("idle class", os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))
attempt("processor", os.sched_setaffinity, 1, {0})
attempt("disk class", call, "ioprio_set", 1, 1, 3 << 13)
attempt("oom", writing, "/proc/1/oom_score_adj", b"1000")
attempt("slack", writing, "/proc/1/timerslack_ns", b"1000000000")
"""


async def first_process(arena: Arena) -> str:
    """Its final state is still told."""
    sandbox = await arena.sandbox()
    await sandbox.files.write(_FILE, f"from attempts import *\n{FIRST}".encode())
    said = (await sandbox.call(ToolCall("exec", {"command": f"python3 {_FILE}"}), timeout_s=arena.patience_s)).text
    try:
        diff = await sandbox.finish()
    except EnvdError as error:
        await (await arena.sandbox()).finish()  # by which rollouts know whose fault it is
        return f"{said}\nBREACH no diff: {error}"
    return f"{said}\n{'its diff is told' if b'attempt' in diff else 'BREACH no diff: ' + repr(diff[:80])}"


async def hard_links(arena: Arena) -> str:
    """A large file of many names is as many large files in a patch."""
    sandbox = await arena.sandbox(limits=Limits(memory_mb=128, pids=32, cpu=1, disk_mb=64, lifetime_s=120))
    command = "head -c 60000000 /dev/urandom > big; for i in $(seq 60); do ln big big$i; done; ls big* | wc -l"
    said = (await sandbox.call(ToolCall("exec", {"command": command}), timeout_s=arena.patience_s)).text
    began = asyncio.get_running_loop().time()
    diff = await sandbox.finish()
    took = asyncio.get_running_loop().time() - began
    result = await arena.client.verify(arena.template, diff, {}, ["test_calc.py::test_add"], timeout_s=20)
    bad = took > arena.patience_s / 3 or len(diff) > _MIB or any(each.status == "passed" for each in result.outcomes)
    return f"{said}\n{'BREACH' if bad else 'a verdict'} {result.exit} after {took:.1f} s for {len(diff)} bytes"


UNKNOWN = """
for number in (180, 184, 336, 500, 511, 512, 600, 1 << 20):
    attempt(f"call {number}", call, number, 0, 0, 0)
attempt("huge file", call, "memfd_create", b"x", 4)
attempt("secret memory", call, "memfd_secret", 0)
attempt("huge shared memory", call, "shmget", 0, 1 << 21, 0o5600)
"""
_SOCKETS_COUNTED = {
    "gvisor": "its network is gVisor's own, whose memory is the sandbox's",
    "qemu": "its network is its own kernel's, whose memory is the machine's",
}
ATTACKS = (
    Attack(
        "sockets-held",
        "neighbours",
        "two sandboxes of 64 MiB full of sockets: streams, unread and unaccepted ones, datagrams, pairs, routing"
        " sockets",
        r"held streams[\s\S]*held datagrams[\s\S]*held pairs[\s\S]*held routes[\s\S]*held backlog",
        act=held_sockets,
        audit=("limit.sockets",),
        unseen_on=_SOCKETS_COUNTED,
        mark=_FILE,
    ),
    Attack(
        "async-io",
        "neighbours",
        "io_setup until fs.aio-max-nr, which kernels count over all, is used up",
        r"refused io_setup|of the host 0",
        act=async_io,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        mark=_FILE,
        harmless_on=_OWN_USER,
    ),
    Attack(
        "shared-locks",
        "neighbours",
        "flock, open file description locks and leases on system files and devices, while a neighbour and a verifier"
        " want them",
        r"all are free[\s\S]*passed",
        act=locks,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        mark=_FILE,
    ),
    Attack(
        "shared-notices",
        "neighbours",
        "inotify, dnotify and fanotify on system files and devices that a neighbour and a verifier use",
        r"nothing heard",
        act=notices,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        mark=_FILE,
        harmless_on=_OWN_USER,
    ),
    Attack(
        "socket-pairs",
        "calls",
        "socketpair of families that socket is refused",
        r"refused pair of tipc[\s\S]*refused pair of vsock",
        script=PAIRS,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "first-process",
        "privileges",
        "limits, priorities and processors of process 1 lowered, so that nobody can grade what it serves",
        r"refused limit NOFILE[\s\S]*its diff is told",
        act=first_process,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        mark=_FILE,
        harmless_on={
            **_OWN,
            "gvisor": "process 1 is the agent of this sandbox alone: its episode fails, by its own fault",
        },
    ),
    Attack(
        "hard-links",
        "output",
        "sixty names of a file of 60 MB, each of which would be read",
        r"a verdict",
        act=hard_links,
        unseen="nothing is refused: a patch that would be too large is marked so, and applies to nothing",
        mark="head -c 60000000",
    ),
    Attack(
        "unknown-calls",
        "calls",
        "numbers that no review has seen; huge pages and secret memory, which no limit counts",
        r"refused call 500 ENOSYS[\s\S]*refused huge file",
        script=UNKNOWN,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN_USER,
    ),
)
