"""Attacks by quantity: processes, memory, disk, descriptors, what the kernel counts by user; and processes that try to
outlive their time.
"""

from __future__ import annotations

import asyncio
import time

from envd.client import Limits, ToolCall
from tests.escape.arena import Arena
from tests.escape.attack import CONTAINED, KERNEL, OWN_KERNEL, Attack

FORKS = """
n = 0
try:
    while n < 3000:
        if os.fork() == 0:
            signal.pause()
        n += 1
    print("BREACH", n, "processes")
except OSError as error:
    print("refused after", n, errno.errorcode[error.errno], flush=True)
os.killpg(0, signal.SIGKILL) if n < 3000 else None
"""
THREADS = """
threading.stack_size(65536)
n = 0
try:
    while n < 3000:
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
        n += 1
    print("BREACH", n, "threads")
except (OSError, RuntimeError) as error:
    print("refused after", n, type(error).__name__, flush=True)
os._exit(0)
"""
ZOMBIES = """
n = 0
try:
    while n < 3000:
        if os.fork() == 0:
            os._exit(0)
        n += 1
    print("BREACH", n, "zombies")
except OSError as error:
    print("refused after", n, errno.errorcode[error.errno], flush=True)
"""
MEMORY = """
blocks = []
for n in range(512):
    block = bytearray(1 << 20)
    block[::4096] = b"x" * 256
    blocks.append(block)
print("BREACH", len(blocks), "MiB")
"""
MEMFD = """
fds = []
for n in range(512):
    fd = os.memfd_create("x")
    os.write(fd, bytes(1 << 20))
    fds.append(fd)
print("BREACH", len(fds), "MiB of memory files")
"""
SHARED = """
held = 0
for n in range(512):
    found = call("shmget", 0, 1 << 20, 0o1600)
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(found, None, 0)
    ctypes.memset(address, 1, 1 << 20)
    held += 1
print("BREACH", held, "MiB of shared memory")
"""
PIPES = """
import fcntl
held, ends = 0, []
try:
    for n in range(2000):
        r, w = os.pipe2(os.O_NONBLOCK)
        ends += [r, w]
        try:
            fcntl.fcntl(w, 1031, 1 << 20)
        except OSError:
            pass
        try:
            while True:
                held += os.write(w, bytes(65536))
        except BlockingIOError:
            pass
except OSError as error:
    print("refused after", held >> 20, "MiB", errno.errorcode[error.errno], flush=True)
if held > 400 << 20:
    print("BREACH", held >> 20, "MiB in pipes")
print("held", held >> 20, "MiB", flush=True)
"""
SOCKET_BUFFERS = """
held, ends = 0, []
try:
    for n in range(3000):
        a, b = socket.socketpair()
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        a.setblocking(False)
        ends += [a, b]
        try:
            while True:
                held += a.send(bytes(65536))
        except BlockingIOError:
            pass
except OSError as error:
    print("refused after", held >> 20, "MiB", errno.errorcode[error.errno], flush=True)
if held > 400 << 20:
    print("BREACH", held >> 20, "MiB in sockets")
print("held", held >> 20, "MiB", flush=True)
"""
DISK = """
for path in ("/workspace/fill", "/tmp/fill", "/dev/shm/fill", "/var/tmp/fill"):
    written = 0
    try:
        with open(path, "wb", buffering=0) as file:
            while written < 64 << 20:
                written += file.write(bytes(1 << 20))
        print("BREACH", written, path)
    except OSError as error:
        print("refused", path, "after", written >> 20, errno.errorcode[error.errno], flush=True)
"""
ALLOCATE = """
for size in (1 << 30, 1 << 40):
    with open("/workspace/big", "wb") as file:
        attempt(f"fallocate {size}", os.posix_fallocate, file.fileno(), 0, size)
        try:
            file.truncate(size)
            print("sparse", size, "holds", os.fstat(file.fileno()).st_blocks * 512)
        except OSError as error:
            print("refused truncate", errno.errorcode[error.errno])
os.unlink("/workspace/big")
print("done")
"""
INODES = """
made = 0
os.makedirs("/tmp/i")
try:
    for n in range(200_000):
        os.close(os.open(f"/tmp/i/{n}", os.O_CREAT | os.O_WRONLY))
        made += 1
    print("BREACH", made, "files")
except OSError as error:
    print("refused after", made, errno.errorcode[error.errno], flush=True)
"""
DESCRIPTORS = """
held = []
try:
    while len(held) < 1_000_000:
        held.append(os.open("/dev/null", os.O_RDONLY))
    print("BREACH", len(held))
except OSError as error:
    print("refused after", len(held), errno.errorcode[error.errno], flush=True)
import resource
attempt("raise the limit", resource.setrlimit, resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))
"""
INOTIFY = """
held = []
libc.inotify_init1.restype = ctypes.c_int
while len(held) < 5000:
    fd = libc.inotify_init1(0)
    if fd < 0:
        break
    held.append(fd)
print("made", len(held), "then", errno.errorcode.get(ctypes.get_errno()), flush=True)
"""
WATCHES = """
fd, n = libc.inotify_init1(0), 0
os.makedirs("/tmp/w", exist_ok=True)
while n < 60000:
    path = f"/tmp/w/{n}"
    try:
        os.mkdir(path)
    except OSError as error:
        print("refused directory", errno.errorcode[error.errno]); break
    if libc.inotify_add_watch(fd, path.encode(), 2) < 0:
        print("refused watch", errno.errorcode[ctypes.get_errno()]); break
    n += 1
print("made", n, flush=True)
"""
SIGNALS = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
n = 0
while n < 500_000:
    if libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), None) < 0:
        break
    n += 1
print("queued", n, "then", errno.errorcode.get(ctypes.get_errno()), flush=True)
"""
TERMINALS = """
held = []
def hold():
    try:
        while True:
            held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        print(len(held), errno.errorcode[error.errno], flush=True)
for _ in range(8):
    if os.fork() == 0:
        held.clear()
        hold()
        time.sleep(60)
hold()
time.sleep(1)
"""
IN_FLIGHT = """
import array
held = []
file = os.open("/dev/null", os.O_RDONLY)
try:
    while len(held) < 8000:
        a, b = socket.socketpair()
        held += [a, b]
        for _ in range(20):
            a.setblocking(False)
            a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file] * 250))])
except OSError as error:
    print(len(held), errno.errorcode.get(error.errno, error), flush=True)
"""
EPOLL = """
import select
n, held = 0, []
pipes = [os.pipe()[0] for _ in range(400)]
until = time.monotonic() + 4
try:
    while n < 3_000_000 and time.monotonic() < until:
        poll = select.epoll()
        held.append(poll)
        for fd in pipes:
            poll.register(fd)
            n += 1
except OSError as error:
    print(n, errno.errorcode.get(error.errno, error), flush=True)
"""
LOCKS = """
import resource
attempt("raise memlock", resource.setrlimit, resource.RLIMIT_MEMLOCK, (1 << 34, 1 << 34))
import mmap
held = 0
for n in range(600):
    page = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if libc.mlock(ctypes.c_void_p(address), 1 << 20) < 0:
        print("refused mlock after", n, errno.errorcode[ctypes.get_errno()], flush=True)
        break
    held += 1
    globals()[f"page{n}"] = page
else:
    print("BREACH locked", held, "MiB")
"""
BURN = "import os\nfor _ in range(8):\n    if os.fork() == 0:\n        while True:\n            pass\n"


async def burn(arena: Arena) -> str:
    sandbox = await arena.sandbox(limits=Limits(memory_mb=128, pids=32, cpu=0.5, disk_mb=16, lifetime_s=120))
    await sandbox.files.write("burn.py", BURN.encode())
    await sandbox.call(ToolCall("exec", {"command": "python3 burn.py &"}))
    before, began = (await sandbox.status()).cpu_s, time.monotonic()
    await asyncio.sleep(1.5)
    used = ((await sandbox.status()).cpu_s - before) / (time.monotonic() - began)
    took = await arena.neighbour.look()
    return f"{'BREACH' if used > 1.0 else 'held'} at {used:.2f} cores of 0.5; the neighbour answered in {took:.3f} s"


async def neighbour_needs(arena: Arena) -> list[str]:
    """What a neighbour and the host still can, of what the kernel counts by user."""
    code = (
        "import ctypes, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\nprint('inotify', libc.inotify_init1(0) >="
        " 0)\nt = ctypes.c_void_p()\nprint('timer', libc.timer_create(0, None, ctypes.byref(t)) == 0)\nprint('queue',"
        " libc.sigqueue(os.getpid(), 0, None) == 0)\nimport array, pty, select, socket\na, b ="
        " socket.socketpair()\ntry:\n    a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]"
        " * 8))])\n    print('pass descriptors', True)\nexcept OSError as error:\n    print('pass descriptors False',"
        " error)\ntry:\n    select.epoll().register(a.fileno())\n    print('epoll', True)\nexcept OSError as error:\n  "
        "  print('epoll False', error)\nif os.path.exists('/dev/ptmx'):\n    try:\n        pty.openpty()\n       "
        " print('terminal', True)\n    except OSError as error:\n        print('terminal False', error)\np ="
        " libc.shmget(0, 4096, 0o1600)\nprint('shm', p >= 0)\nprint('fork', os.fork() >= 0)\n"
    )
    return await arena.neighbour.run(code)


_HOLDING = "hold.py"


def exhausting(code: str, words: str) -> object:
    """An attack that holds what it took while the neighbour tries to get some."""

    async def act(arena: Arena) -> str:
        sandbox = await arena.sandbox(limits=Limits(memory_mb=256, pids=32, cpu=1, disk_mb=64, lifetime_s=120))
        held = f"from attempts import *\n{code}\nopen('ready', 'w').close()\ntime.sleep(60)\n"
        await sandbox.files.write(_HOLDING, held.encode())
        process = await sandbox.processes.start(["python3", _HOLDING])
        for _ in range(int(arena.patience_s * 10)):
            listed, _ = await sandbox.files.list(".")
            if any(each.path == "ready" for each in listed) or (await sandbox.processes.list())[-1].state != "running":
                break
            await asyncio.sleep(0.1)
        held_now = "held" if (await sandbox.processes.list())[-1].state == "running" else "ended by its limit"
        lines = await neighbour_needs(arena)
        broken = [line for line in lines if "True" not in line]
        host = arena.host.needs()
        return (
            f"{'BREACH' if broken or host else 'the neighbour has its own'} ({held_now}, {words}) {broken} {host}"
            f" process {process.process}"
        )

    return act


async def daemon_after_timeout(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    code = (
        "import os, signal, time\nfor s in range(1, 32):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n   "
        " except OSError:\n        pass\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while"
        " True:\n            open('/tmp/beat', 'w').write(str(time.time()))\n            time.sleep(0.05)\n   "
        " os._exit(0)\ntime.sleep(100)\n"
    )
    await sandbox.files.write("daemon.py", code.encode())
    result = await sandbox.call(
        ToolCall("exec", {"command": "python3 daemon.py", "timeout_s": arena.short_s}), timeout_s=30
    )
    looks = "cat /tmp/beat; sleep 0.5; echo; cat /tmp/beat; echo; ps ax -o args | grep -c '^python3 daemon'"
    first, second, count = (await sandbox.call(ToolCall("exec", {"command": looks}), timeout_s=30)).text.split("\n")[:3]
    alive = first != second or count.strip() != "0"
    return (
        f"{'BREACH it lives' if alive or not first else 'killed'} timed_out={result.timed_out} {first} {second} {count}"
    )


async def daemon_after_end(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    command = (
        "for i in 1 2 3 4; do (setsid nohup sleep 98765 >/dev/null 2>&1 &); done; trap '' TERM HUP; sleep 98765 &"
        " disown; echo started"
    )
    said = (await sandbox.call(ToolCall("exec", {"command": command}))).text
    await sandbox.close()
    return f"{said}\n{'BREACH ' + left if (left := await arena.left_of(['98765'])) else 'nothing lives on'}"


async def stopped(arena: Arena) -> str:
    """Stopped processes can't be asked to end, and a shell that stops itself answers nothing."""
    sandbox = await arena.sandbox()
    result = await sandbox.call(
        ToolCall("exec", {"command": "kill -STOP $$; sleep 60", "timeout_s": arena.short_s}), timeout_s=30
    )
    after = await sandbox.call(ToolCall("exec", {"command": "echo alive"}), timeout_s=30)
    return f"timed_out={result.timed_out} then {after.text!r}"


async def lifetime(arena: Arena) -> str:
    sandbox = await arena.sandbox(
        limits=Limits(memory_mb=128, pids=32, cpu=1, disk_mb=16, lifetime_s=2 * arena.short_s)
    )
    await sandbox.call(ToolCall("exec", {"command": "(setsid sleep 87654 &) ; trap '' TERM"}))
    deadline = time.monotonic() + arena.patience_s
    while time.monotonic() < deadline and any(each.id == sandbox.id for each in await arena.client.list()):
        await asyncio.sleep(0.2)
    left = await arena.left_of(["87654"])
    gone = not any(each.id == sandbox.id for each in await arena.client.list())
    return "ended in time" if gone and not left else f"BREACH gone={gone} left={left}"


_BOUNDED = r"refused|exit 137|exit 1$|gone|Killed|MemoryError"
# gVisor ends a process that the host kills a part of with code 1, and without a word.
_OOM = r"gone|exit 137|Killed|MemoryError|refused|Cannot allocate|\Aexit 1\n"
_BY_USER = "the kernel counts it by user and name space; the server does not see it"
_GVISOR_COUNTS = "its kernel refuses at the sandbox's own limit, which the host's groups do not count as hit"
ATTACKS = (
    Attack(
        "fork-bomb",
        "bombs",
        "processes without end",
        r"refused after \d+|gone",
        script=FORKS,
        audit=("limit.pids",),
        unseen_on={"gvisor": _GVISOR_COUNTS},
    ),
    Attack(
        "thread-bomb",
        "bombs",
        "threads without end",
        r"refused after \d+|gone",
        script=THREADS,
        audit=("limit.pids",),
        unseen_on={"gvisor": _GVISOR_COUNTS},
    ),
    Attack(
        "zombie-bomb",
        "bombs",
        "dead processes that nobody waits for",
        r"refused after \d+|gone",
        script=ZOMBIES,
        audit=("limit.pids",),
        unseen_on={"gvisor": _GVISOR_COUNTS},
    ),
    Attack(
        "memory-bomb",
        "bombs",
        "512 MiB of memory in a sandbox of 128",
        _OOM,
        script=MEMORY,
        audit=("limit.memory", "sandbox.died"),
    ),
    Attack(
        "memory-files", "bombs", "512 MiB in memory files", _OOM, script=MEMFD, audit=("limit.memory", "sandbox.died")
    ),
    Attack(
        "memory-shared",
        "bombs",
        "512 MiB of System V shared memory",
        _OOM,
        script=SHARED,
        audit=("limit.memory", "sandbox.died"),
    ),
    Attack(
        "memory-pipes",
        "bombs",
        "memory of the kernel's held in pipes",
        r"held|" + _OOM,
        script=PIPES,
        unseen="its limit refuses or ends it; which, the kernel decides",
    ),
    Attack(
        "memory-sockets",
        "bombs",
        "memory of the kernel's held in socket buffers",
        r"held|" + _OOM,
        script=SOCKET_BUFFERS,
        unseen="its limit refuses or ends it; which, the kernel decides",
    ),
    Attack(
        "memory-locked",
        "bombs",
        "memory locked against its limit",
        r"refused|" + _OOM,
        script=LOCKS,
        unseen="its limit refuses or ends it; which, the kernel decides",
        harmless_on={"qemu": OWN_KERNEL},
    ),
    Attack(
        "disk-bomb",
        "bombs",
        "64 MiB into each of the workspace, /tmp, /dev/shm and /var/tmp of a sandbox with 16",
        r"refused /workspace/fill[\s\S]*refused /tmp/fill",
        script=DISK,
        audit=("limit.disk",),
    ),
    Attack(
        "disk-allocate",
        "bombs",
        "a file of 1 GiB and one of 1 TiB allocated without writing",
        r"refused fallocate 1073741824",
        script=ALLOCATE,
        unseen=KERNEL,
    ),
    Attack(
        "inode-bomb",
        "bombs",
        "200,000 empty files",
        r"refused after|gone|exit 137",
        script=INODES,
        audit=("limit.disk", "limit.memory"),
        timeout_s=60,
    ),
    Attack(
        "descriptor-bomb",
        "bombs",
        "a million descriptors, and the limit raised",
        r"refused after[\s\S]*refused raise|refused after",
        script=DESCRIPTORS,
        unseen=KERNEL,
    ),
    Attack(
        "inotify-instances",
        "bombs",
        "inotify instances, which kernels count by user, held while a neighbour and the host need one",
        r"the neighbour has its own",
        act=exhausting(INOTIFY, "inotify"),
        unseen=_BY_USER,
        mark=_HOLDING,
    ),
    Attack(
        "inotify-watches",
        "bombs",
        "60,000 watches, which kernels count by user",
        r"the neighbour has its own",
        act=exhausting(WATCHES, "watches"),
        unseen=_BY_USER,
        mark=_HOLDING,
    ),
    Attack(
        "queued-signals",
        "bombs",
        "half a million queued signals, which kernels count by user",
        r"the neighbour has its own",
        act=exhausting(SIGNALS, "signals"),
        unseen=_BY_USER,
        mark=_HOLDING,
    ),
    Attack(
        "terminals",
        "bombs",
        "pseudo-terminals, which kernels count over all",
        r"the neighbour has its own",
        act=exhausting(TERMINALS, "terminals"),
        unseen=_BY_USER,
        mark=_HOLDING,
    ),
    Attack(
        "descriptors-in-flight",
        "bombs",
        "descriptors sent and never received, which kernels count by user",
        r"the neighbour has its own",
        act=exhausting(IN_FLIGHT, "in flight"),
        unseen=_BY_USER,
        mark=_HOLDING,
    ),
    Attack(
        "epoll-watches",
        "bombs",
        "epoll watches without end, which kernels count by user",
        r"the neighbour has its own",
        act=exhausting(EPOLL, "epoll"),
        unseen=_BY_USER,
        mark=_HOLDING,
    ),
    Attack(
        "cpu-hog",
        "bombs",
        "eight busy loops with half a core",
        r"held at",
        act=burn,
        unseen="a scheduler's limit is kept, not hit",
        mark="python3 burn.py",
    ),
    Attack(
        "daemon-after-timeout",
        "time",
        "a daemon that ignores every signal and left its session outlives its command's timeout",
        r"killed timed_out=True",
        act=daemon_after_timeout,
        audit=("limit.time",),
    ),
    Attack(
        "daemon-after-end",
        "time",
        "daemons outlive their sandbox",
        r"nothing lives on",
        act=daemon_after_end,
        unseen=CONTAINED,
        mark="sleep 98765",
    ),
    Attack(
        "stopped-shell",
        "time",
        "a shell that stops itself",
        r"timed_out=True then 'alive",
        act=stopped,
        audit=("limit.time",),
    ),
    Attack(
        "lifetime", "time", "a sandbox that nobody closes", r"ended in time", act=lifetime, audit=("lifetime.expired",)
    ),
)
