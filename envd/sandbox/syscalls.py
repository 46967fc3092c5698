"""A filter of system calls for what the Python zygote forks: the verifier, and sandboxes where there is no native helper.

It stops what the native one stops (envd/native/spawn_calls.c): calls that programs under test do not need, and through which faults of kernels
have been reached; and calls that the kernel itself gives nobody without a capability, and that hardly any program makes in good faith: these are
shown to whoever watches, and the kernel answers. Source of the numbers: the kernel's arch/x86/entry/syscalls and
include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_REFUSED: Mapping[str, tuple[int, int]] = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "bpf": (321, 280), "userfaultfd": (323, 282), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "perf_event_open": (298, 241),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "move_mount": (429, 429), "open_tree": (428, 428),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "chroot": (161, 51), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "syslog": (103, 116),
    "vhangup": (153, 58), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "setgroups": (116, 159),
}  # fmt: skip
"""By name: the numbers on x86_64 and on aarch64."""
_REFUSED_ON_X86 = {"iopl": 172, "ioperm": 173, "uselib": 134, "modify_ldt": 154}
_NO_SUCH = {"clone3": (435, 435)}
"""Refused, and told to nobody: its flags are out of a filter's sight, and the C library takes clone instead."""
_BY_ARGUMENTS = {"clone": (56, 220), "unshare": (272, 97), "socket": (41, 198), "ioctl": (16, 29)}
_SHOWN = {
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147), "setresgid": (119, 149),
    "mknodat": (259, 33), "sched_setscheduler": (144, 119), "kill": (62, 129),
}  # fmt: skip
_SHOWN_ON_X86 = {"mknod": 133}
_IDS = {"setuid": 1, "setgid": 1, "setreuid": 2, "setregid": 2, "setresuid": 3, "setresgid": 3}
"""How many of their arguments are users or groups."""
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_PROTOCOLS = (0, 1, 6, 17, 58)
"""The family's usual one, ICMP, TCP, UDP, ICMPv6."""
_MPTCP = 262
"""Told to nobody: Go's runtime asks for it of its own accord, and takes TCP then."""
_TERMINALS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX type into a terminal in its user's name; TIOCSETD has modules loaded."""
_KINDS_OF_FILES, _BLOCK_DEVICE, _CHARACTER_DEVICE = 0xF000, 0x6000, 0x2000
_FIFO, _ROUND_ROBIN, _RESET_ON_FORK = 1, 2, 0x40000000
_X32 = 0x40000000

_LOAD, _ADD, _AND, _EQUAL, _MORE, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x04, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOWED, _ERRNO, _NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
_SET_MODE_FILTER, _NEW_LISTENER, _WAIT_KILLABLE = 1, 8, 32
_ALLOW, _STOP = -1, -2
"""Where a jump may lead beside so many instructions on: to one of the two answers at the end."""
_Instruction = tuple[int, int, int, int]
_PASS: list[_Instruction] = [(_RETURN, 0, 0, _ALLOWED)]


class Refusal(NamedTuple):
    """What becomes of a call that the filter stopped."""

    call: str
    error: int
    """What it is answered; 0: the kernel answers it."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def filter_calls() -> None:
    """Install the filter for this process and all that it starts; what it stops fails. After no_new_privs. Raises OSError.

    Machines whose numbers are not listed go without, as they have no namespaces backend either.
    """
    if platform.machine() in _ARCHITECTURE and _install(watched=False, flags=0) < 0:
        raise OSError(ctypes.get_errno(), "the filter of system calls can't be installed")


def filter_calls_watched() -> int:
    """The same; whoever has the listener that this returns answers what it stops. -1 where kernels can't do that: it fails then. Raises OSError."""
    if platform.machine() in _ARCHITECTURE:
        listener = _install(watched=True, flags=_NEW_LISTENER | _WAIT_KILLABLE)
        if listener >= 0:
            return listener
    filter_calls()
    return -1


def refusal_of(architecture: int, number: int, arguments: Sequence[int]) -> Refusal:
    """What to answer to a call that the watched filter stopped."""
    machine = platform.machine()
    if architecture != _ARCHITECTURE[machine]:
        return Refusal("32-bit call", errno.ENOSYS)
    name = _names(machine).get(number)
    if name is None:
        return Refusal("x32 call", errno.ENOSYS)
    if name == "socket":
        known = arguments[0] & 0xFFFFFFFF in (_INET, _INET6)
        return Refusal(name, errno.EPROTONOSUPPORT if known else errno.EAFNOSUPPORT)
    return Refusal(name, 0 if name in _SHOWN or name in _SHOWN_ON_X86 else errno.EPERM)


def prepare_filters() -> None:
    """Put them together once: what forks inherits them."""
    if platform.machine() in _ARCHITECTURE:
        for watched in (False, True):
            _code(platform.machine(), watched)


def _install(*, watched: bool, flags: int) -> int:
    """The listener, or 0; -1 with errno."""
    machine = platform.machine()
    code = _code(machine, watched)
    libc = ctypes.PyDLL(None, use_errno=True)
    program = _Program(len(code) // 8, code)
    arguments = (ctypes.c_ulong(_SET_MODE_FILTER), ctypes.c_ulong(flags), ctypes.byref(program))
    return int(libc.syscall(ctypes.c_long(_SECCOMP[machine]), *arguments))


@functools.cache
def _names(machine: str) -> dict[int, str]:
    """Of all calls that the filter may stop."""
    column = ("x86_64", "aarch64").index(machine)
    tables = (_REFUSED, _NO_SUCH, _BY_ARGUMENTS, _SHOWN)
    found = {numbers[column]: name for table in tables for name, numbers in table.items()}
    if machine == "x86_64":
        found |= {number: name for name, number in (_REFUSED_ON_X86 | _SHOWN_ON_X86).items()}
    return found


@functools.cache
def _code(machine: str, watched: bool) -> bytes:
    return b"".join(struct.pack("=HBBI", *each) for each in _program(machine, watched))


def _program(machine: str, watched: bool) -> list[_Instruction]:
    """The whole filter: a binary search for the number, since the kernel tries all numbers when it is installed."""
    bodies = {number: _body(name, watched) for number, name in _names(machine).items()}
    starts: list[tuple[int, list[_Instruction]]] = []
    for number in range(max(bodies) + 2):
        body = bodies.get(number, _PASS)
        if not starts or body != starts[-1][1]:
            starts.append((number, body))
    starts.append((_X32, [_refusal(errno.ENOSYS, watched)]))
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _ARCHITECTURE[machine]), _refusal(errno.ENOSYS, watched), (_LOAD, 0, 0, _NUMBER),
        *_search(starts),
    ]  # fmt: skip
    ends = {_ALLOW: len(code), _STOP: len(code) + 1}
    code += [*_PASS, _refusal(errno.EPERM, watched)]

    def linked(at: int, where: int) -> int:
        return ends[where] - at - 1 if where < 0 else where

    return [(kind, linked(at, yes), linked(at, no), value) for at, (kind, yes, no, value) in enumerate(code)]


def _search(starts: Sequence[tuple[int, list[_Instruction]]]) -> list[_Instruction]:
    if len(starts) == 1:
        return starts[0][1]
    half = len(starts) // 2
    below, above = _search(starts[:half]), _search(starts[half:])
    no, below = (_ALLOW, []) if below == _PASS else (0, below)
    yes, above = (_ALLOW, []) if above == _PASS else (len(below), above)
    return [(_AT_LEAST, yes, no, starts[half][0]), *below, *above]


def _body(name: str, watched: bool) -> list[_Instruction]:
    """What is done about a call, its number known."""
    if name in _NO_SUCH:
        return [_answer(errno.ENOSYS)]
    if name in _SHOWN or name in _SHOWN_ON_X86:
        return _shown(name) if watched else _PASS
    if name == "clone":
        return [_argument(0), (_ANY_BIT, _STOP, _ALLOW, _NAMESPACES)]
    if name == "unshare":  # here the lowest byte is CLONE_NEWTIME, too
        return [_argument(0), (_ANY_BIT, _STOP, _ALLOW, _NAMESPACES | 0x80)]
    if name == "ioctl":
        return [_argument(1), *((_EQUAL, _STOP, 0, each) for each in _TERMINALS), *_PASS]
    return _sockets(watched) if name == "socket" else [_refusal(errno.EPERM, watched)]


def _shown(name: str) -> list[_Instruction]:
    """Show a call for those arguments for which the kernel refuses it to everybody in a sandbox."""
    if name in ("mknod", "mknodat"):
        # a character device 0 is what overlays say a removed file by, and needs no capability
        mode = 1 if name == "mknod" else 2
        return [
            _argument(mode), (_AND, 0, 0, _KINDS_OF_FILES), (_EQUAL, _STOP, 0, _BLOCK_DEVICE), (_EQUAL, 0, _ALLOW, _CHARACTER_DEVICE),
            _argument(mode + 1), (_EQUAL, _ALLOW, _STOP, 0),
        ]  # fmt: skip
    if name == "sched_setscheduler":
        plain = (_AND, 0, 0, 0xFFFFFFFF & ~_RESET_ON_FORK)
        return [_argument(1), plain, (_EQUAL, _STOP, 0, _FIFO), (_EQUAL, _STOP, _ALLOW, _ROUND_ROBIN)]
    if name == "kill":  # of process 1, which takes no signal; 0 asks whether it is there
        return [_argument(0), (_EQUAL, 0, _ALLOW, 1), _argument(1), (_EQUAL, _ALLOW, _STOP, 0)]
    others = [each for n in range(_IDS[name]) for each in (_argument(n), (_ADD, 0, 0, 1), (_MORE, _STOP, 0, 1))]
    return [*others, *_PASS]  # users and groups other than 0, which is the only one, and -1, which leaves it


def _sockets(watched: bool) -> list[_Instruction]:
    """Sockets of the families that programs use, and of those only the protocols that need no module loaded."""
    return [
        _argument(0), (_EQUAL, _ALLOW, 0, _UNIX), (_EQUAL, 5, 0, _INET), (_EQUAL, 4, 0, _INET6),
        (_EQUAL, 0, 2, _NETLINK), _argument(2), (_EQUAL, _ALLOW, 0, 0),  # NETLINK_ROUTE
        _refusal(errno.EAFNOSUPPORT, watched), _argument(2), *((_EQUAL, _ALLOW, 0, protocol) for protocol in _PROTOCOLS),
        (_EQUAL, 0, 1, _MPTCP), _answer(errno.EPROTONOSUPPORT), _refusal(errno.EPROTONOSUPPORT, watched),
    ]  # fmt: skip


def _argument(number: int) -> _Instruction:
    """Its low half: both architectures are little-endian."""
    return _LOAD, 0, 0, _ARGUMENTS + 8 * number


def _answer(number: int) -> _Instruction:
    return _RETURN, 0, 0, _ERRNO | number


def _refusal(number: int, watched: bool) -> _Instruction:
    """Of a watched call the one who answers gives the same error (`refusal_of`)."""
    return (_RETURN, 0, 0, _NOTIFY) if watched else _answer(number)
