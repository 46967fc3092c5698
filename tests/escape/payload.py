"""The module `attempts` that attacks import inside a sandbox: system calls by number, and attempts that say how they
ended.
"""

from __future__ import annotations

SOURCE = r'''
import ctypes, errno, os, platform, signal, socket, struct, subprocess, sys, threading, time

libc = ctypes.CDLL(None, use_errno=True)
_X86, _ARM = {}, {}
for line in """
mount 165 40|umount2 166 39|pivot_root 155 41|chroot 161 51
ptrace 101 117|keyctl 250 219|add_key 248 217|request_key 249 218|bpf 321 280
perf_event_open 298 241|userfaultfd 323 282|process_vm_readv 310 270
process_vm_writev 311 271|kcmp 312 272|setns 308 268|unshare 272 97
clone 56 220|name_to_handle_at 303 264|open_by_handle_at 304 265
init_module 175 105|finit_module 313 273|kexec_load 246 104
reboot 169 142|swapon 167 224|settimeofday 164 170|clock_settime 227 112
acct 163 89|quotactl 179 60|fanotify_init 300 262|syslog 103 116
sethostname 170 161|setdomainname 171 162|capset 126 91|mknodat 259 33
pidfd_getfd 438 438|pidfd_open 434 434|clone3 435 435|io_uring_setup 425 425
io_uring_register 427 427|open_tree 428 428|move_mount 429 429
fsopen 430 430|fsmount 432 432|mount_setattr 442 442|memfd_create 319 279
shmget 29 194|shmat 30 196|msgget 68 186|msgsnd 69 189
semget 64 190|mq_open 240 180|sched_setscheduler 144 119|setpriority 141 140|ioprio_set 251 30
vhangup 153 58|adjtimex 159 171|memfd_secret 447 447
landlock_create_ruleset 444 444|timer_create 222 107|add_watch 254 27|io_setup 206 0
""".replace("\n", "|").split("|"):
    if line.strip():
        name, x86, arm = line.split()
        _X86[name], _ARM[name] = int(x86), int(arm)
NUMBERS = _ARM if platform.machine() == "aarch64" else _X86


def call(name, *arguments):
    """A system call; raises OSError as Python's own do."""
    number = NUMBERS[name] if isinstance(name, str) else name
    known = (bytes, ctypes.Array, ctypes.Structure)
    given = [a if isinstance(a, known) or a is None else ctypes.c_long(a) for a in arguments]
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(number), *given)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def attempt(what, action, *arguments):
    """Try it and say how it ended. Returns what it gave, None when it was refused."""
    try:
        result = action(*arguments)
    except OSError as error:
        print("refused", what, errno.errorcode.get(error.errno, error.errno or type(error).__name__), flush=True)
        return None
    except (ValueError, MemoryError, RuntimeError, subprocess.SubprocessError) as error:
        print("refused", what, type(error).__name__, flush=True)
        return None
    print("BREACH", what, repr(result)[:300], flush=True)
    return result


def absent(what, found):
    """Say whether something that must not be there was found."""
    print(("BREACH found " if found else "nothing of ") + what, repr(found)[:300] if found else "", flush=True)


def reading(path, size=4096):
    with open(path, "rb") as file:
        return file.read(size)


def writing(path, data):
    fd = os.open(path, os.O_WRONLY)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)
'''
