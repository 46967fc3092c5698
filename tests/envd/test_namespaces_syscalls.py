"""System calls in the namespaces backend: which are refused and how, which of them are told, and that honest programs
never notice.
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from envd.backends.namespaces.backend import NamespacesBackend, NamespacesBox
from envd.native.build import SOURCES
from envd.sandbox import syscalls
from tests.envd.boxes import sh, spec, with_namespaces

Told = list[tuple[str, int]]
X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
PREPARE = """
import ctypes, os, socket, stat, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *[ctypes.c_long(each) if isinstance(each, int) else each for each in arguments])
    return ctypes.get_errno()
def family(*arguments):
    try:
        socket.socket(*arguments).close()
        return 0
    except OSError as error:
        return error.errno
def within(number, *arguments):
    pid = os.fork()
    if pid == 0:
        os._exit(call(number, *arguments))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
BLOCK, CHARACTER, one = stat.S_IFBLK | 0o600, stat.S_IFCHR | 0o600, ctypes.c_int * 1
"""
ERRORS = (
    ("[call(number, 0, 0, 0, 0, 0) for number in NUMBERS]", [1] * 51),
    ("[call(435, 0, 0), call(56, 0x10000000, 0, 0, 0, 0), call(272, 0x10000000), call(272, 0x80)]", [38, 1, 1, 1]),
    ("[call(16, 0, 0x5412, 0), call(16, 0, 0x541C, 0), call(16, 0, 0x5423, 0), call(16, 99, 0x5401, 0)]", [1, 1, 1, 9]),
    ("[call(206, 8, 0), call(209, 0, 0, 0), call(500), call(335 + 60)]", [38] * 4),
    ("[call(302, 1, 7, one(1), 0), call(302, 1, 7, 0, 0), call(302, 0, 7, 0, 0)]", [1, 0, 0]),
    ("[call(203, 1, 8, one(1)), call(142, 1, one(0)), call(314, 1, 0, 0), call(144, 1, 0, one(0))]", [1, 1, 1, 1]),
    (
        (
            "[call(141, 0, 1, 19), call(141, 1, 1, 19), call(141, 2, 0, 19), call(141, 0, 0, 19), call(251, 1, 1, 0),"
            " call(251, 3, 0, 0)]"
        ),
        [1, 1, 1, 0, 1, 1],
    ),
    ("[call(53, each, 1, 0, 0) for each in (2, 16, 30, 40)]", [97] * 4),
    (
        (
            "[call(9, 0, 4096, 3, 0x40022, -1, 0), call(319, b'x', 4), call(29, 0, 4096, 0o5600), call(135, 0x40000),"
            " call(135, 0)]"
        ),
        [12, 12, 12, 1, 0],
    ),
    ("[call(72, 0, 1024, 0), call(72, 0, 1026, 1)]", [1, 1]),
    ("[call(0x40000000 + 39), call(0x40000000 + 272, 0x10000000), call(511), call(600)]", [38] * 4),
    ("[family(*each) for each in ((40, 1), (38, 5), (17, 3), (16, 3, 9), (99, 1))]", [97] * 5),
    ("[family(*each) for each in ((2, 1, 132), (2, 1, 262), (10, 3, 255), (2, 3, 1))]", [93, 93, 93, 1]),
    ("[family(*each) for each in ((1, 1), (2, 1), (2, 2), (10, 1), (16, 3, 0))]", [0] * 5),
    ("[within(number, *[0] * count) for number, count in IDS]", [0] * 6),
    ("[within(number, *[user] * count) for number, count in IDS for user in (1, 65534, 231072)]", [22] * 18),
    ("[within(number, *[-1] * count) for number, count in IDS]", [22, 22, 0, 0, 0, 0]),
    ("[within(number, *[-1] * (count - 1), 7) for number, count in IDS]", [22] * 6),
    ("[call(116, 0, None), call(116, 1, None)]", [1, 1]),
    ("[call(144, 0, kind, one(5)) for kind in (1, 2, 0x40000001, 6, 9)]", [1, 1, 1, 22, 22]),
    (
        "[call(144, 0, 1, one(0)), call(144, 99999, 1, one(5)), call(144, 0, 0, one(0)), call(144, 0, 3, one(0))]",
        [22, 3, 0, 0],
    ),
    ("[call(62, 1, number) for number in (0, 15, 9, 99)]", [0, 0, 0, 22]),
    (
        (
            "[call(133, b'/tmp/f', stat.S_IFIFO | 0o600, 0), call(133, b'/tmp/s', stat.S_IFSOCK, 0), call(259, -100,"
            " b'/tmp/r', 0o600, 0)]"
        ),
        [0] * 3,
    ),
    (
        "[call(133, b'/tmp/f', BLOCK, 1), call(133, b'/no/x', BLOCK, 1), call(259, -100, b'/usr/x', CHARACTER, 1)]",
        [17, 2, 30],
    ),
    ("[call(133, b'/tmp/b', BLOCK, 1) in (1, 13), call(259, -100, b'/tmp/c', CHARACTER, 1) in (1, 13)]", [True] * 2),
)
"""What Python says in a sandbox, by `errno`: what the kernel says by itself where it is the kernel that refuses. 13:
Landlock's.
"""
IDS = "IDS = ((105, 1), (106, 1), (113, 2), (114, 2), (117, 3), (119, 3))\n"
NUMBERS = (
    "NUMBERS = (425, 426, 427, 250, 248, 249, 321, 323, 101, 310, 311, 440, 438, 312, 298, 308, 165, 166, 155, 429,"
    " 428, 430, 431, 432, 433, 442, 467, 161, 246, 320, 175, 313, 176, 169, 167, 168, 163, 179, 443, 304, 300, 103,"
    " 153, 164, 227, 305, 159, 172, 173, 134, 154)\n"
)
TOLD = (
    (
        {
            "socket": "family(40, 1)",
            "32-bit call": "",
            "x32 call": "call(0x40000000 + 272, 0x10000000)",
            "setgroups": "call(116, 0, None)",
        }
    ),
    (
        {
            "setuid": "call(105, 1000)",
            "setgid": "call(106, 5)",
            "setreuid": "call(113, -1, 5)",
            "setresgid": "call(119, 0, -1, 5)",
        }
    ),
    (
        {
            "mknod": "call(133, b'/tmp/b', BLOCK, 1)",
            "mknodat": "call(259, -100, b'/tmp/c', CHARACTER, 1)",
            "kill": "os.kill(1, 15)",
            "ptrace": "call(101, 0)",
        }
    ),
    (
        {
            "sched_setscheduler": "call(144, 0, 1, one(5))",
            "chroot": "call(161, b'/')",
            "unshare": "call(272, 0x80)",
            "ioctl": "call(16, 0, 0x5412, 0)",
        }
    ),
)
"""Calls that are told, by the names that they are told by: four of a sandbox at a time, as many as are told in a
second.
"""
INT_80 = """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("53b836010000bb00000010cd805bc3"))
print(ctypes.c_int(ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()).value)
"""
QUIET = (
    "family(2, 1, 262)",
    "call(435, 0, 0)",
    "os.kill(1, 0)",
    "os.kill(os.getpid(), 0)",
    "within(105, 0)",
    "within(117, 0, 0, -1)",
    "call(133, b'/tmp/f', stat.S_IFIFO, 0)",
    "call(144, 0, 3, one(0))",
    "call(272, 0x200)",
)
"""Calls of honest programs."""


def in_box(run_dir: Path, job: Callable[[NamespacesBox], Awaitable[None]]) -> None:
    async def whole(backend: NamespacesBackend) -> None:
        box = await backend.create(spec(run_dir))
        await job(box)
        await box.destroy()

    with_namespaces(run_dir, whole)


def told_of(box: NamespacesBox) -> Told:
    told: Told = []
    box.tell_refusals(lambda call, count: told.append((call, count)))
    return told


async def python(box: NamespacesBox, code: str) -> list[str]:
    return (await sh(box, f"python3 -S -u - <<'END'\n{PREPARE}{IDS}{NUMBERS}{code}\nEND")).splitlines()


@X86
def test_calls_that_no_program_needs_fail_as_the_kernel_says_it(run_dir: Path) -> None:
    async def job(box: NamespacesBox) -> None:
        said = await python(box, "\n".join(f"print({code})" for code, _ in ERRORS))
        assert said == [*(str(wanted) for _, wanted in ERRORS), "exit 0"]

    in_box(run_dir, job)


@X86
@pytest.mark.parametrize("wanted", TOLD, ids=lambda wanted: next(iter(wanted)))
def test_what_is_refused_is_told_by_name(run_dir: Path, wanted: dict[str, str]) -> None:
    async def job(box: NamespacesBox) -> None:
        told = told_of(box)
        for name, code in wanted.items():
            said = await python(box, code or INT_80)
            assert said[-1] == "exit 0", said
            assert told[-1:] == [(name, 1)], name
        assert len(told) == len(wanted)

    in_box(run_dir, job)


@X86
def test_what_honest_programs_ask_is_not_told(run_dir: Path) -> None:
    async def job(box: NamespacesBox) -> None:
        told = told_of(box)
        assert await python(box, "\n".join(QUIET)) == ["exit 0"]
        assert told == []

    in_box(run_dir, job)


def test_a_flood_of_refused_calls_is_told_a_few_times_a_second(run_dir: Path) -> None:
    many = (
        "import os, ctypes; libc = ctypes.CDLL(None); [libc.chroot(b'/') for _ in range(3000)];"
        " libc.unshare(0x10000000)"
    )

    async def job(box: NamespacesBox) -> None:
        told = told_of(box)
        assert (await sh(box, "chroot / true")).endswith("exit 125")
        assert told == [("chroot", 1)]
        await asyncio.sleep(1.1)
        assert await sh(box, f'python3 -S -c "{many}"') == "exit 0"
        seconds_at_most = 20
        assert 2 <= len(told) < 4 * seconds_at_most and {call for call, _ in told} <= {"chroot", "unshare"}
        assert sum(count for _, count in told) <= 3002

    in_box(run_dir, job)


TOOLS = (
    (
        (
            "git init -q . && git add -A && git -c user.name=a -c user.email=b commit -qm one && git mv calc.py sum.py"
            " && git gc -q && git status --short"
        ),
        "R  calc.py -> sum.py\n",
    ),
    (
        (
            'printf \'def test_it(tmp_path):\\n    (tmp_path / "f").write_text("x")\\n\' > test_a.py; python -m'
            " pytest -q test_a.py | tail -n 1 | cut -d' ' -f1,2"
        ),
        "1 passed\n",
    ),
    ("python -c 'import multiprocessing as m; print(m.get_context(\"fork\").Pool(2).map(abs, [-1, -2]))'", "[1, 2]\n"),
    (
        (
            "printf '#include <stdio.h>\\nint main(void) { puts(\"c\"); }\\n' > a.c && printf 'a: a.c\\n\\tcc a.c -o"
            " a\\n' > Makefile && make -sj2 && ./a"
        ),
        "c\n",
    ),
    (
        (
            "mkdir -p t/d && mkfifo t/p && ln -s d t/l && tar cf t.tar t && tar xf t.tar -C /tmp && tar xpf t.tar"
            " --same-owner -C /tmp && ls -F /tmp/t"
        ),
        "d/\nl@\np|\n",
    ),
    (
        (
            "python -m pip --disable-pip-version-check install -q --no-index --no-deps --target /tmp/site"
            " /tmp/one-1-py3-none-any.whl && ls /tmp/site/one.py"
        ),
        "/tmp/site/one.py\n",
    ),
    (
        (
            "kill -0 1; nice -n 5 id -un; chown root:root sum.py; chown 1000 sum.py 2>&1 | grep -o Invalid; (sleep 9 &"
            " kill $!); echo $?"
        ),
        "root\nInvalid\n0\n",
    ),
)
WHEEL = """
import zipfile
with zipfile.ZipFile("/tmp/one-1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("one.py", "")
    wheel.writestr("one-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: one\\nVersion: 1\\n")
    wheel.writestr("one-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr("one-1.dist-info/RECORD", "")
"""


def test_the_tools_of_the_trade_work_and_nothing_is_told_of_them(run_dir: Path) -> None:
    async def job(box: NamespacesBox) -> None:
        told = told_of(box)
        assert await python(box, WHEEL) == ["exit 0"]
        for command, wanted in TOOLS:
            assert (await sh(box, command), told) == (f"{wanted}exit 0", []), command

    in_box(run_dir, job)


def test_numbers_of_the_table_are_the_kernels() -> None:
    headers = {
        "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        "aarch64": Path("/usr/include/asm-generic/unistd.h"),
    }
    if not all(path.exists() for path in headers.values()):
        pytest.skip("no headers of both machines here")
    table = re.findall(r"CALL\((\w+), (\w+), (\w+), \w+\)", (SOURCES / "spawn_calls_table.h").read_text())
    assert len({name for name, *_ in table}) == len(table) > 350
    for column, path in enumerate(headers.values(), start=1):
        words = [line.split() for line in path.read_text().splitlines() if line.startswith("#define __NR")]
        known = {
            int(each[2]): each[1].removeprefix("__NR3264_").removeprefix("__NR_")
            for each in words
            if each[2:] and each[2].isdigit() and not each[1].endswith("syscalls")
        }
        known = {number: {"fstatat": "newfstatat"}.get(name, name) for number, name in known.items()}
        found = {int(each[column]): each[0] for each in table if each[column] != "NONE" and int(each[column]) in known}
        assert found == {number: known[number] for number in found} and len(found) >= 280


def test_verifier_and_sandboxes_have_one_filter() -> None:
    code = syscalls.prepare_filter()
    assert len(code) % 8 == 0 and 300 < len(code) // 8 < 1024
    instructions = list(struct.iter_unpack("=HBBI", code))
    for at, (kind, yes, no, _) in enumerate(instructions):
        jumps = kind & 7 == 5 and kind != 5
        assert not jumps or at + 1 + max(yes, no) < len(instructions)
    assert instructions[-1][0] == 6
