"""Attacks on the kernel's walls from inside: /proc, ptrace, devices, mounts, privileges, control groups, and system
calls that were ways out before.
"""

from __future__ import annotations

import asyncio

from envd.client import ToolCall
from tests.escape.arena import Arena
from tests.escape.attack import KERNEL, NOWHERE, OWN_KERNEL, UNTOLD, Attack

_OWN = {"qemu": OWN_KERNEL}
_GVISOR_AGENT = {
    **_OWN,
    "gvisor": (
        "gVisor shows each process what the others have mapped and open; the agent's environment holds no secret, and"
        " what it has open are sockets, which nobody can open again"
    ),
}
_GVISOR_OWN = {
    **_OWN,
    "gvisor": "an object of gVisor's own kernel, of no use without capabilities: the host's is never asked",
}
_OWN_USER = {**_OWN, "gvisor": "gVisor's own kernel serves it: the host's is never asked"}

AGENT_FILES = """
for name in ("environ", "mem", "maps", "fd", "cwd", "root", "exe", "io", "auxv", "stack", "syscall"):
    path = "/proc/1/" + name
    if name == "fd":
        attempt(path, os.listdir, path)
    elif name in ("cwd", "root", "exe"):
        attempt(path, os.readlink, path)
    else:
        attempt(path, lambda: reading(path) or (_ for _ in ()).throw(PermissionError(13, "empty")))
"""
AGENT_STREAM = """
frame = struct.pack(">I", 32) + bytes(32)
for fd in range(64):
    for flags in (os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY | os.O_NONBLOCK):
        path = f"/proc/1/fd/{fd}"
        try:
            kind = os.readlink(path)
        except OSError as error:
            print("refused", path, errno.errorcode[error.errno])
            continue
        if "null" in kind or "out-" in kind:
            continue
        try:
            found = os.open(path, flags)
        except OSError as error:
            print("refused", path, errno.errorcode[error.errno])
            continue
        if ("host:" in kind or "socket:" in kind) and flags & os.O_WRONLY:
            attempt("write to the agent's stream", os.write, found, frame)
for device in ("/dev/vport0p1", "/dev/vport1p1", "/dev/virtio-ports/envd"):
    absent_or = os.path.exists(device) and attempt(device, writing, device, frame)
"""
FORKS_OF_THE_AGENT = """
frame = struct.pack("<I", 32) + bytes(32)
until, found, STREAMS = time.monotonic() + 3, 0, ("host:", "socket:")
while time.monotonic() < until:
    for pid in [name for name in os.listdir("/proc") if name.isdigit() and name != str(os.getpid())]:
        for fd in range(8):
            path = f"/proc/{pid}/fd/{fd}"
            try:
                found += os.readlink(path).startswith(STREAMS)
                held = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                continue
            kind = os.readlink(f"/proc/self/fd/{held}")  # the number may stand for something else by now
            if kind.startswith(STREAMS):
                print("BREACH wrote", os.write(held, frame), kind, flush=True)
            os.close(held)
print("never opened, of", found, flush=True)
"""


async def forks_of_the_agent(arena: Arena) -> str:
    """A forked child has the agent's descriptors until it executes its program."""
    sandbox = await arena.sandbox()
    await sandbox.files.write("attack.py", f"from attempts import *\n{FORKS_OF_THE_AGENT}".encode())
    looking = asyncio.ensure_future(sandbox.processes.run(["python3", "attack.py"]))
    while not looking.done():
        await sandbox.processes.run(["true"])
        await sandbox.call(ToolCall("exec", {"command": "true"}))
    _, said, _ = await looking
    return said.decode()


SYSCTL = """
for path, value in (
    ("/proc/sysrq-trigger", b"h"), ("/proc/sys/kernel/core_pattern", b"|/tmp/x"),
    ("/proc/sys/kernel/modprobe", b"/tmp/x"), ("/proc/sys/vm/overcommit_memory", b"1"),
    ("/proc/sys/kernel/hostname", b"x"), ("/proc/sys/net/ipv4/ip_forward", b"1"),
    ("/proc/sys/fs/binfmt_misc/register", b":x:M::x::/x:"), ("/proc/1/oom_score_adj", b"-1000"),
    ("/proc/self/oom_score_adj", b"-1000"), ("/sys/kernel/uevent_helper", b"/tmp/x"), ("/sys/power/state", b"x"),
    ("/proc/self/uid_map", b"0 0 1"),
    ("/proc/self/gid_map", b"0 0 1"), ("/proc/timer_list", b"x"), ("/proc/sys/user/max_user_namespaces", b"1000"),
):
    attempt("write " + path, writing, path, value)
"""
MEMORY_FILES = """
for path in (
    "/proc/kcore", "/dev/mem", "/dev/kmem", "/dev/port", "/proc/kmsg", "/dev/kmsg", "/sys/kernel/debug",
    "/proc/vmallocinfo", "/proc/slabinfo", "/sys/firmware/efi",
):
    attempt(path, reading, path, 16)
try:
    addresses = {line.split()[0] for line in open("/proc/kallsyms")} - {"0000000000000000"}
except OSError as error:
    addresses = set()
absent("the kernel's addresses", addresses)
"""
OTHER_PIDS = """
mine = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
if len(mine) > 40:
    print("BREACH sees", len(mine), "processes")
mine += [
    int(thread)
    for pid in mine
    for thread in os.listdir(f"/proc/{pid}/task")
    if os.path.exists(f"/proc/{pid}/task")
]
reached = []
for pid in range(2, 40000):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        continue
    except PermissionError:
        pass
    if pid not in mine and pid != os.getpid():
        reached.append(pid)
absent("processes of others", reached)
"""
EXECUTABLE = """
for path in ("/proc/1/exe", "/proc/self/exe", "/usr/bin/bash"):
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        attempt(f"open {path} {flags}", os.open, path, flags)
fd = os.open("/proc/self/exe", os.O_PATH)
attempt("reopen by descriptor", os.open, f"/proc/self/fd/{fd}", os.O_WRONLY)
"""
NAMESPACES = """
for kind in ("mnt", "user", "net", "pid", "ipc", "uts", "cgroup"):
    for pid in (1, os.getpid()):
        fd = attempt_open = None
        try:
            fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        except OSError as error:
            print("refused open", kind, errno.errorcode[error.errno])
            continue
        attempt(f"setns {kind} of {pid}", call, "setns", fd, 0)
"""
NEW_NAMESPACES = """
for name, flag in (
    ("user", 0x10000000), ("mount", 0x20000), ("pid", 0x20000000), ("net", 0x40000000),
    ("ipc", 0x8000000), ("uts", 0x4000000), ("cgroup", 0x2000000), ("time", 0x80),
):
    def child(flag=flag):
        pid = os.fork()
        if pid == 0:
            try:
                call("unshare", flag)
            except OSError as error:
                os._exit(error.errno)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            raise OSError(code, "")
    attempt("unshare " + name, child)
def cloned():
    pid = call("clone", 0x10000000 | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
attempt("clone user", cloned)
arguments = ctypes.create_string_buffer(struct.pack("Q", 0x10000000) + bytes(24) + struct.pack("Q", 17) + bytes(48))
def cloned3():
    pid = call("clone3", arguments, 88)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
attempt("clone3 user", cloned3)
"""
PTRACE = """
for name, request in (("attach", 16), ("seize", 0x4206)):
    attempt(f"{name} 1", call, "ptrace", request, 1, 0, 0)
    attempt(f"{name} shell", call, "ptrace", request, os.getppid(), 0, 0)
if len(sys.argv) > 1:
    attempt("traceme", call, "ptrace", 0, 0, 0, 0)
"""
PEER_MEMORY = """
buffer = ctypes.create_string_buffer(16)
local = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(buffer), 16))
remote = ctypes.create_string_buffer(struct.pack("QQ", 0x400000, 16))
for name in ("process_vm_readv", "process_vm_writev"):
    attempt(name + " of 1", call, name, 1, local, 1, remote, 1, 0)
attempt("/proc/1/mem", os.open, "/proc/1/mem", os.O_RDWR)
attempt("kcmp", call, "kcmp", 1, os.getpid(), 0, 0, 0)
"""
STEAL = """
try:
    fd = os.pidfd_open(1)
except OSError as error:
    print("refused descriptor 3 of 1:", error)
    sys.exit()
for number in range(16):
    attempt(f"descriptor {number} of 1", call, "pidfd_getfd", fd, number, 0)
"""
KILL_AGENT = """
for number in (
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS,
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT,
):
    os.kill(1, number)
print("signals sent, and process 1 is there:", os.path.exists("/proc/1/status"), flush=True)
"""
KNOWN_DEVICES = """
import glob
for path in sorted({
    *glob.glob("/dev/sd*"), *glob.glob("/dev/vd*"), *glob.glob("/dev/nvme*"), *glob.glob("/dev/dm-*"),
    *glob.glob("/dev/loop*"), "/dev/vda", "/dev/sda", "/dev/kvm",
    "/dev/vhost-net", "/dev/vsock", "/dev/loop-control", "/dev/mapper/control", "/dev/snapshot",
    "/dev/cpu/0/msr", "/dev/uinput", "/dev/rtc0", "/dev/hwrng", "/dev/ppp",
}):
    attempt(path, os.open, path, os.O_RDWR)
"""
MAKE_DEVICES = """
import stat
for name, kind, major, minor in (
    ("disk", stat.S_IFBLK, 254, 0), ("sda", stat.S_IFBLK, 8, 0), ("mem", stat.S_IFCHR, 1, 1),
    ("kmsg", stat.S_IFCHR, 1, 11), ("fuse", stat.S_IFCHR, 10, 229),
):
    for place in ("/tmp", "/workspace"):
        def use(path=f"{place}/{name}"):
            os.mknod(path, kind | 0o666, os.makedev(major, minor))
            return os.open(path, os.O_RDWR)
        attempt(f"device {name} in {place}", use)
"""
MOUNTS = """
os.makedirs("/tmp/m", exist_ok=True)
for what in (
    (b"tmpfs", b"tmpfs", 0), (b"proc", b"proc", 0), (b"sysfs", b"sysfs", 0), (b"/dev/vda", b"ext4", 1),
    (b"cgroup", b"cgroup2", 0), (b"none", b"overlay", 0), (b"x", b"fuse", 0),
    (b"/etc", b"none", 4096), (b"devtmpfs", b"devtmpfs", 0), (b"debugfs", b"debugfs", 0),
):
    attempt("mount " + what[1].decode(), call, "mount", what[0], b"/tmp/m", what[1], what[2], b"")
for place in (b"/", b"/usr", b"/.template"):
    attempt("remount " + place.decode(), call, "mount", b"none", place, b"", 4096 | 32, b"")
for place in (b"/workspace", b"/proc", b"/tmp", b"/dev/pts"):
    attempt("umount " + place.decode(), call, "umount2", place, 2)
"""
NEW_MOUNTS = """
attempt("fsopen tmpfs", call, "fsopen", b"tmpfs", 0)
attempt("fsopen proc", call, "fsopen", b"proc", 0)
attempt("open_tree /", call, "open_tree", -100, b"/", 1)
attributes = ctypes.create_string_buffer(struct.pack("QQQQ", 0, 1, 0, 0))
attempt("mount_setattr /usr", call, "mount_setattr", -100, b"/usr", 0, attributes, 32)
attempt("move_mount", call, "move_mount", -100, b"/tmp", -100, b"/workspace", 0)
"""
ROOTS = """
os.makedirs("/tmp/r/old", exist_ok=True)
attempt("chroot", call, "chroot", b"/tmp/r")
attempt("pivot_root", call, "pivot_root", b"/tmp/r", b"/tmp/r/old")
attempt("chroot /proc/1/root", call, "chroot", b"/proc/1/root")
fd = os.open("/", os.O_RDONLY)
os.fchdir(fd)
for _ in range(64):
    os.chdir("..")
python = {path.split("/")[1] for path in (sys.prefix, sys.base_prefix)}  # where it is seen, wherever it lies
hosts = {"home", "boot", "lost+found", "media", "srv"} - python
absent("the host above /", [name for name in os.listdir(".") if name in hosts])
"""
HANDLES = """
handle = ctypes.create_string_buffer(struct.pack("II", 8, 1) + struct.pack("II", 2, 0) + bytes(112))
for place in ("/usr", "/workspace", "/tmp", "/.template", "/etc"):
    fd = os.open(place, os.O_RDONLY)
    attempt("handle of inode 2 by " + place, call, "open_by_handle_at", fd, handle, os.O_RDONLY)
"""
SETUID = """
import shutil, stat
shutil.copy("/bin/bash", "/tmp/suid")
os.chmod("/tmp/suid", 0o6755)
before = open("/proc/self/status").read()
command = ["/tmp/suid", "-p", "-c", "cat /proc/self/status; cat /proc/self/uid_map"]
inside = subprocess.run(command, capture_output=True, text=True).stdout
effective = [line.split()[1] for line in inside.splitlines() if line.startswith("CapEff")]
if effective and int(effective[0], 16):
    print("BREACH capabilities", effective)
for user in (1, 65534, 231072, 1000):
    attempt(f"setresuid {user}", os.setresuid, user, user, user)
    attempt(f"chown {user}", os.chown, "/tmp/suid", user, user)
attempt("setgroups", os.setgroups, [0, 4, 6])
for program in ("su", "mount", "ping", "newgrp", "passwd", "sudo"):
    path = shutil.which(program)
    if path and os.stat(path).st_mode & stat.S_ISUID:
        said = subprocess.run([path, "--help"], capture_output=True, text=True)
print("setuid gives nothing:", effective)
"""
CAPABILITIES = """
header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
attempt("capset all", call, "capset", header, ctypes.create_string_buffer(b"\\xff" * 24))
capability = struct.pack("IIIII", 0x2000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0)
attempt("security.capability", os.setxattr, "/tmp", "security.capability", capability)
kept = [line for line in open("/proc/self/status") if line.startswith(("Cap", "NoNewPrivs"))]
status = {line.split(":")[0]: line.split()[1] for line in kept}
have = {key: value for key, value in status.items() if key.startswith("Cap") and int(value, 16)}
absent("capabilities", have)
attempt("realtime", call, "sched_setscheduler", 0, 1, ctypes.create_string_buffer(struct.pack("i", 50)))
attempt("nice -20", os.nice, -20)
attempt("ioprio", call, "ioprio_set", 1, 0, 1 << 13)
"""
CGROUPS = """
import glob
for name in (
    "cgroup.procs", "tasks", "release_agent", "memory.max", "memory.limit_in_bytes", "pids.max",
    "cgroup.subtree_control", "cgroup.kill", "notify_on_release",
):
    for base in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified"):
        attempt(f"write {base}/{name}", writing, f"{base}/{name}", b"0")
attempt("make a group", os.mkdir, "/sys/fs/cgroup/mine")
attempt("mount v1", call, "mount", b"cgroup", b"/tmp", b"cgroup", 0, b"memory")
attempt("mount v2", call, "mount", b"cgroup2", b"/tmp", b"cgroup2", 0, b"")
seen = [line.strip() for line in open("/proc/self/cgroup") if "envd" in line or "box" in line]
absent("the group's place on the host", seen)
"""
KEYRINGS = """
attempt("add_key", call, "add_key", b"user", b"escape", b"secret", 6, -3)
attempt("add to the user's keyring", call, "add_key", b"user", b"escape", b"secret", 6, -4)
attempt("request_key", call, "request_key", b"user", b"escape", None, -3)
attempt("join a session", call, "keyctl", 1, b"escape", 0, 0, 0)
attempt("read the user's keyring", call, "keyctl", 11, -4, 0, 0, 0)
attempt("/proc/keys", lambda: reading("/proc/keys") or (_ for _ in ()).throw(PermissionError(13, "")))
"""
IO_URING = """
parameters = ctypes.create_string_buffer(120)
attempt("io_uring_setup", call, "io_uring_setup", 8, parameters)
attempt("io_uring_register", call, "io_uring_register", -1, 0, 0, 0)
"""
RARE_CALLS = """
attempt("bpf", call, "bpf", 0, ctypes.create_string_buffer(struct.pack("IIII", 1, 4, 4, 1) + bytes(112)), 128)
attributes = ctypes.create_string_buffer(struct.pack("II", 1, 112) + bytes(104))
attempt("perf_event_open", call, "perf_event_open", attributes, 0, -1, -1, 0)
attempt("userfaultfd", call, "userfaultfd", 0)
attempt("init_module", call, "init_module", b"x", 1, b"")
attempt("finit_module", call, "finit_module", 0, b"", 0)
attempt("kexec_load", call, "kexec_load", 0, 0, None, 0)
attempt("swapon", call, "swapon", b"/tmp/x", 0)
attempt("acct", call, "acct", b"/tmp/x")
attempt("quotactl", call, "quotactl", 0x80000100, b"/dev/vda", 0, None)
attempt("fanotify_init", call, "fanotify_init", 4, 0)
attempt("syslog", call, "syslog", 3, ctypes.create_string_buffer(4096), 4096)
attempt("vhangup", call, "vhangup")
"""
CLOCK = """
attempt("settimeofday", call, "settimeofday", ctypes.create_string_buffer(struct.pack("qq", 1, 0)), None)
attempt("clock_settime", call, "clock_settime", 0, ctypes.create_string_buffer(struct.pack("qq", 1, 0)))
attempt("adjtimex", call, "adjtimex", ctypes.create_string_buffer(struct.pack("I", 1) + bytes(252)))
attempt("sethostname", call, "sethostname", b"escaped", 7)
attempt("reboot", call, "reboot", 0xFEE1DEAD, 672274793, 0, None)
"""
TERMINAL = """
import fcntl, pty, termios
try:
    ours, theirs = pty.openpty()
except OSError as error:
    print("refused TIOCSTI and refused TIOCLINUX: there are no terminals", error)
    sys.exit()
os.setsid() if os.getpid() != os.getsid(0) else None
try:
    fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
except OSError as error:
    print("no controlling terminal", errno.errorcode[error.errno])
attempt("TIOCSTI", fcntl.ioctl, theirs, termios.TIOCSTI, b"x")
attempt("TIOCLINUX", fcntl.ioctl, theirs, 0x541C, b"\\x03")
attempt("line discipline", fcntl.ioctl, theirs, 0x5423, struct.pack("i", 21))
attempt("TIOCCONS", fcntl.ioctl, theirs, 0x541D)
attempt("/dev/tty", os.open, "/dev/tty", os.O_RDWR)
attempt("/dev/console", os.open, "/dev/console", os.O_RDWR)
attempt("/dev/tty1", os.open, "/dev/tty1", os.O_RDWR)
"""
OTHER_ABI = """
import mmap
def machine_code(code):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_long)(address)()
def in_child(what, code):
    pid = os.fork()
    if pid == 0:
        result = ctypes.c_int(machine_code(code)).value
        os._exit(0 if result >= 0 else min(-result, 200))
    status = os.waitpid(pid, 0)[1]
    ended = os.waitstatus_to_exitcode(status)
    print("BREACH" if ended == 0 else "refused", what, ended)
if platform.machine() == "x86_64":
    # unshare(CLONE_NEWUSER) by int 0x80, and by its x32 number
    in_child("32-bit unshare", bytes.fromhex("53b836010000bb00000010cd805bc3"))
    in_child("x32 unshare", bytes.fromhex("b810010040bf000000100f05c3"))
    in_child("32-bit ptrace", bytes.fromhex("53b81a000000bb00000000cd805bc3"))
else:
    print("refused: this machine has no other ABI")
"""
SOCKETS = """
for name, family, kind, protocol in (
    ("vsock", 40, socket.SOCK_STREAM, 0), ("alg", 38, socket.SOCK_SEQPACKET, 0), ("packet", 17, socket.SOCK_RAW, 768),
    ("bluetooth", 31, socket.SOCK_RAW, 1), ("can", 29, socket.SOCK_RAW, 1),
    ("xdp", 44, socket.SOCK_RAW, 0), ("tipc", 30, socket.SOCK_DGRAM, 0), ("rds", 21, socket.SOCK_SEQPACKET, 0),
    ("key", 15, socket.SOCK_RAW, 2), ("audit", 16, socket.SOCK_RAW, 9),
    ("netfilter", 16, socket.SOCK_RAW, 12), ("uevent", 16, socket.SOCK_RAW, 15), ("diag", 16, socket.SOCK_RAW, 4),
    ("generic netlink", 16, socket.SOCK_RAW, 16), ("raw", 2, socket.SOCK_RAW, 255),
    ("raw icmp", 2, socket.SOCK_RAW, 1), ("raw6", 10, socket.SOCK_RAW, 58), ("sctp", 2, socket.SOCK_STREAM, 132),
    ("mptcp", 2, socket.SOCK_STREAM, 262), ("smc", 43, socket.SOCK_STREAM, 0),
):
    attempt("socket " + name, socket.socket, family, kind, protocol)
"""

_REFUSED = r"refused "
ATTACKS = (
    Attack(
        "proc-agent-files",
        "proc",
        "memory, environment, descriptors and root of the agent by /proc/1",
        r"refused /proc/1/mem",
        script=AGENT_FILES,
        unseen=KERNEL,
        harmless_on=_GVISOR_AGENT,
    ),
    Attack(
        "proc-agent-stream",
        "proc",
        "the agent's stream opened by /proc/1/fd or its device, to forge answers",
        _REFUSED,
        script=AGENT_STREAM,
        unseen=KERNEL,
        harmless_on=_OWN,
    ),
    Attack(
        "proc-agent-forks",
        "proc",
        "the agent's stream opened by what it has just forked, while it starts programs",
        r"never opened",
        act=forks_of_the_agent,
        mark="attack.py",
        unseen=KERNEL,
        harmless_on=_OWN,
    ),
    Attack(
        "proc-settings",
        "proc",
        "core_pattern, modprobe, sysrq-trigger, binfmt_misc, oom_score_adj, uid_map and other settings written",
        r"refused write /proc/sys/kernel/core_pattern",
        script=SYSCTL,
        unseen=KERNEL,
        harmless_on=_OWN_USER,
    ),
    Attack(
        "proc-kernel-memory",
        "proc",
        "/proc/kcore, /dev/mem, the kernel's log and addresses read",
        r"nothing of the kernel's addresses",
        script=MEMORY_FILES,
        unseen=KERNEL,
        harmless_on=_OWN,
    ),
    Attack(
        "proc-other-pids",
        "proc",
        "every pid up to 40,000 signalled",
        r"nothing of processes of others",
        script=OTHER_PIDS,
        unseen=NOWHERE,
        harmless_on=_OWN,
    ),
    Attack(
        "proc-executable",
        "proc",
        "the running program overwritten through /proc/1/exe and /proc/self/exe (as CVE-2019-5736)",
        r"refused open /proc/self/exe",
        script=EXECUTABLE,
        unseen=KERNEL,
        harmless_on=_OWN,
    ),
    Attack(
        "proc-enter-namespaces",
        "proc",
        "setns into the namespaces of process 1",
        _REFUSED,
        script=NAMESPACES,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN_USER,
    ),
    Attack(
        "ptrace-agent",
        "ptrace",
        "ptrace of the agent and of the shell",
        r"refused attach 1",
        script=PTRACE,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
        timeout_s=5,
    ),
    Attack(
        "ptrace-peer-memory",
        "ptrace",
        "process_vm_readv, process_vm_writev, kcmp and /proc/1/mem",
        r"refused process_vm_readv of 1",
        script=PEER_MEMORY,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "ptrace-steal-descriptors",
        "ptrace",
        "pidfd_getfd of the agent's descriptors",
        r"refused descriptor 3 of 1",
        script=STEAL,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "kill-agent",
        "ptrace",
        "nine signals to process 1",
        r"process 1 is there: True|^gone",
        script=KILL_AGENT,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
    ),
    Attack(
        "device-nodes",
        "devices",
        "disks, /dev/kvm, loop devices, MSRs and other known devices opened",
        _REFUSED,
        script=KNOWN_DEVICES,
        unseen=KERNEL,
        harmless_on=_OWN,
    ),
    Attack(
        "device-make",
        "devices",
        "block and character devices made and opened",
        r"refused device disk in /tmp",
        script=MAKE_DEVICES,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_GVISOR_OWN,
    ),
    Attack(
        "mount-old",
        "mounts",
        "mounting, binding, remounting and unmounting",
        r"refused mount tmpfs",
        script=MOUNTS,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "mount-new",
        "mounts",
        "fsopen, open_tree, mount_setattr, move_mount",
        r"refused fsopen tmpfs",
        script=NEW_MOUNTS,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "mount-roots",
        "mounts",
        "chroot, pivot_root, and climbing above /",
        r"nothing of the host above /",
        script=ROOTS,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "mount-handles",
        "mounts",
        "open_by_handle_at of inode 2 (as the shocker exploit)",
        r"refused handle of inode 2 by /usr",
        script=HANDLES,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "setuid-programs",
        "privileges",
        "a setuid copy of bash, other user ids, owners and groups",
        r"setuid gives nothing",
        script=SETUID,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN_USER,
    ),
    Attack(
        "capabilities",
        "privileges",
        "capset, file capabilities, real-time scheduling, negative nice",
        r"refused capset all[\s\S]*nothing of capabilities",
        script=CAPABILITIES,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN_USER,
    ),
    Attack(
        "user-namespaces",
        "privileges",
        "eight kinds of new namespaces by unshare, clone and clone3",
        r"refused unshare user[\s\S]*refused clone3 user",
        script=NEW_NAMESPACES,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN_USER,
    ),
    Attack(
        "cgroup-escape",
        "privileges",
        "release_agent, cgroup.procs and limits written; cgroup file systems mounted",
        r"refused write /sys/fs/cgroup/cgroup.procs",
        script=CGROUPS,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "keyrings",
        "calls",
        "keys added, requested and read",
        r"refused add_key",
        script=KEYRINGS,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_GVISOR_OWN,
    ),
    Attack(
        "io-uring",
        "calls",
        "io_uring_setup and io_uring_register",
        r"refused io_uring_setup",
        script=IO_URING,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "rare-calls",
        "calls",
        "bpf, perf, userfaultfd, modules, kexec, swap, accounting, quotas, fanotify, syslog",
        r"refused bpf[\s\S]*refused finit_module[\s\S]*refused syslog",
        script=RARE_CALLS,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_GVISOR_OWN,
    ),
    Attack(
        "clock-and-reboot",
        "calls",
        "the clock set, the host renamed, the machine restarted",
        r"refused settimeofday[\s\S]*refused sethostname[\s\S]*refused reboot",
        script=CLOCK,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        not_on={"qemu": "root of a virtual machine of its own may set its clock, and may end it"},
    ),
    Attack(
        "terminal-injection",
        "calls",
        "TIOCSTI, TIOCLINUX, line disciplines and consoles",
        r"refused TIOCSTI[\s\S]*refused TIOCLINUX",
        script=TERMINAL,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "other-abi",
        "calls",
        "forbidden calls by their 32-bit and x32 numbers",
        r"refused.*32",
        script=OTHER_ABI,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_OWN,
    ),
    Attack(
        "socket-families",
        "calls",
        "vsock, AF_ALG, packet, raw, netlink and other families",
        r"refused socket vsock[\s\S]*refused socket packet",
        script=SOCKETS,
        audit=("syscall.refused",),
        unseen_on=UNTOLD,
        harmless_on=_GVISOR_OWN,
    ),
)
