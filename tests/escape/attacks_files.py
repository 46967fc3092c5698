"""Attacks on paths: the server's file calls and tools must not leave the workspace, nor wait, nor read without
bound.
"""

from __future__ import annotations

import asyncio

from envd.client import ToolCall
from envd.errors import EnvdError, FileError
from envd.operations.client import ManagedSandbox
from tests.envd.harness import HIDDEN, TESTS
from tests.escape.arena import Arena, attempt
from tests.escape.attack import CONTAINED, KERNEL, OWN_KERNEL, Attack


async def dotdot(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    said = []
    for path in ("../etc/passwd", "a/../../etc/passwd", "../../../../../../" + str(arena.host.canary)):
        said.append(await attempt(f"read {path}", sandbox.files.read(path)))
        result = await sandbox.call(ToolCall("read", {"path": path}))
        said.append(f"{'BREACH' if result.ok else 'refused'} tool: {result.text}")
    return "\n".join(said)


async def absolute(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    said = [await attempt("read", sandbox.files.read(path)) for path in ("/etc/passwd", str(arena.host.canary))]
    said.append(await attempt("write", sandbox.files.write("/../etc/cron", b"x", make_parents=False)))
    result = await sandbox.call(ToolCall("write", {"path": str(arena.host.canary), "content": "tampered"}))
    return "\n".join([*said, f"a file of the workspace or none: {result.ok}"])


async def link_read(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    await sandbox.call(ToolCall("exec", {"command": "ln -s /etc out; ln -s /etc/passwd file; ln -s ../../../.. up"}))
    paths = ("out/passwd", "file", "up/etc/passwd")
    said = [await attempt(f"read {path}", sandbox.files.read(path)) for path in paths]
    for path in paths:
        result = await sandbox.call(ToolCall("read", {"path": path}))
        said.append(f"{'BREACH' if result.ok else 'refused'} tool {path}: {result.text}")
    return "\n".join(said)


async def link_write(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    await sandbox.call(
        ToolCall("exec", {"command": "mkdir /tmp/out; echo kept >/tmp/out/f; ln -s /tmp/out d; ln -s /tmp/out/f l"})
    )
    said = []
    for path in ("d/f", "d/new"):
        said.append(await attempt(f"write {path}", sandbox.files.write(path, b"gone")))
    said.append(await attempt("move", sandbox.files.move("attempts.py", "d/moved")))
    said.append(await attempt("remove", sandbox.files.remove("d/f")))
    await sandbox.call(ToolCall("write", {"path": "l", "content": "gone"}))
    left = (await sandbox.call(ToolCall("exec", {"command": "ls /tmp/out; cat /tmp/out/f"}))).text
    return "\n".join([*said, "outside is as it was" if left == "f\nkept\nexit 0" else f"BREACH {left}"])


async def magic_links(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    await sandbox.call(
        ToolCall(
            "exec",
            {
                "command": (
                    "ln -s /proc/1/root r; ln -s /proc/self/cwd/../etc c; ln -s /proc/self/fd f; ln -s"
                    " /proc/1/environ e"
                )
            },
        )
    )
    paths = ("r/etc/passwd", "c/passwd", "f/0", "e", "/proc/1/root/etc/passwd")
    return "\n".join([await attempt(f"read {path}", sandbox.files.read(path)) for path in paths])


def exchanging(one: str, other: str) -> bytes:
    """A program that exchanges two names as quickly as it can: at once, or in steps where the kernel knows no
    RENAME_EXCHANGE.
    """
    return (
        f"import ctypes, os\nlibc = ctypes.CDLL(None)\none, other = {one!r}, {other!r}\n"
        "while libc.renameat2(-100, one.encode(), -100, other.encode(), 2) == 0:\n    pass\n"
        "while True:\n    os.rename(one, 'aside')\n    os.rename(other, one)\n    os.rename('aside', other)\n"
    ).encode()


async def swapped_directory(arena: Arena) -> str:
    """A directory becomes a link to the outside and back, as quickly as the sandbox can, while the server reads, writes
    and lists.
    """
    sandbox = await arena.sandbox()
    await sandbox.call(
        ToolCall(
            "exec",
            {
                "command": (
                    "mkdir /tmp/outside; echo OUTSIDE >/tmp/outside/f; mkdir d; echo inside >d/f; ln -s /tmp/outside l"
                )
            },
        )
    )
    await sandbox.files.write("swap.py", exchanging("d", "l"))
    await sandbox.processes.start(["python3", "swap.py"])
    await asyncio.sleep(0.3)
    seen, refused, rounds = set(), 0, 0
    deadline = asyncio.get_running_loop().time() + 2.0
    while rounds < 300 and asyncio.get_running_loop().time() < deadline:
        rounds += 1
        try:
            seen.add(await sandbox.files.read("d/f"))
            await sandbox.files.write("d/w", b"x", make_parents=False)
            await sandbox.files.list("d")
        except FileError:
            refused += 1
        seen.add((await sandbox.call(ToolCall("read", {"path": "d/f"}))).text.encode())
    seen.add(await _read_where_the_link_stays(sandbox, "d", "l", "d/f"))
    left = (await sandbox.call(ToolCall("exec", {"command": "ls /tmp/outside"}))).text
    lost = any(b"OUTSIDE" in each for each in seen) or left != "f\nexit 0"
    return f"{'BREACH' if lost else 'never outside'} in {rounds} rounds, {refused} refused: {sorted(seen)} {left}"


async def swapped_file(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    await sandbox.call(
        ToolCall("exec", {"command": "mkdir s; echo inside >s/a; ln -s /etc/passwd s/b; echo OUT >/tmp/o"})
    )
    await sandbox.files.write("swap.py", exchanging("s/a", "s/b"))
    await sandbox.processes.start(["python3", "swap.py"])
    await asyncio.sleep(0.3)
    seen: set[bytes] = set()
    deadline = asyncio.get_running_loop().time() + 1.5
    while asyncio.get_running_loop().time() < deadline:
        try:
            seen.add(await sandbox.files.read("s/a"))
        except FileError as error:
            seen.add(f"refused {error.errno}".encode())
    seen.add(await _read_where_the_link_stays(sandbox, "s/a", "s/b", "s/a"))
    return f"{'BREACH' if any(b'root:' in each for each in seen) else 'never outside'} {sorted(seen)}"


async def _read_where_the_link_stays(sandbox: ManagedSandbox, one: str, two: str, path: str) -> bytes:
    """The exchange ends with the link in the place that is read: on a slow machine no read may have met it before."""
    end = (
        f"pkill -9 -f swap.py; until ! pgrep -f swap.p[y]; do sleep 0.1; done; [ -L {one} ] || {{ mv {one} x; mv {two}"
        f" {one}; }}"
    )
    await sandbox.call(ToolCall("exec", {"command": end}), timeout_s=30)
    try:
        return await sandbox.files.read(path)
    except FileError as error:
        return f"refused {error.errno}".encode()


async def fifo(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    await sandbox.call(ToolCall("exec", {"command": "mkfifo pipe; ln -s /dev/zero zero; ln -s /dev/tty tty"}))
    said = []
    for path in ("pipe", "zero", "tty"):
        async with asyncio.timeout(arena.patience_s):
            said.append(await attempt(f"read {path}", sandbox.files.read(path)))
            result = await sandbox.call(ToolCall("read", {"path": path}))
        said.append(f"{'BREACH' if result.ok else 'refused'} tool {path}: {result.text[:80]}")
    return "\n".join(said)


async def names(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    said = []
    for path in ("a\0b", "x" * 300, "y/" * 3000, "\udcff".encode("utf-8", "surrogatepass").decode("latin1"), "", "\n"):
        said.append(await attempt(f"read {path[:8]!r}", sandbox.files.read(path)))
    said.append(await attempt("remove the workspace", sandbox.files.remove(".", recursive=True)))
    said.append(await attempt("move the workspace", sandbox.files.move(".", "elsewhere")))
    return "\n".join(said)


async def hidden_file(arena: Arena) -> str:
    rules = "filesystem:\n  hidden: ['attempts.py', 'keys']\n"
    sandbox = await arena.sandbox(rules=rules)
    said = [
        await attempt(f"read {path}", sandbox.files.read(path))
        for path in ("attempts.py", "./keys/../attempts.py", "/attempts.py")
    ]
    result = await sandbox.call(
        ToolCall("exec", {"command": "cat attempts.py /.template/attempts.py; git show HEAD:attempts.py; true"})
    )
    said.append("BREACH it is in the sandbox" if "libc" in result.text else "not in the sandbox")
    return "\n".join(said)


async def diff_of_links(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    command = (
        f"ln -s /etc/passwd p; ln -s {arena.host.canary} q; ln -s /etc all; mkfifo pipe; rm attempts.py; ln -s"
        " /proc/self/environ attempts.py"
    )
    await sandbox.call(ToolCall("exec", {"command": command}))
    diff = await sandbox.diff()
    bad = [word for word in (b"root:x", b"PATH=", arena.host.secret.encode(), b"/etc/passwd\n+root") if word in diff]
    verdict = await arena.client.verify(arena.template, diff, HIDDEN, TESTS, timeout_s=20)
    return f"BREACH {bad}" if bad else f"links as links: {diff.count(b'120000')} {list(verdict.tampering)}"


async def _tree(sandbox: ManagedSandbox, script: str) -> None:
    await sandbox.files.write("make.py", script.encode())
    await sandbox.call(ToolCall("exec", {"command": "python3 make.py"}), timeout_s=30)


async def deep_tree(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    await _tree(
        sandbox, "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'w').write('x')\n"
    )
    async with asyncio.timeout(60):
        entries, _ = await sandbox.files.list(".", depth=100_000)
        said = [
            f"listed {len(entries)}",
            await _ended("diff", sandbox.diff()),
            await _ended("remove", sandbox.files.remove("d", recursive=True)),
        ]
    return "\n".join(["bounded", *said])


async def wide_tree(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    await _tree(sandbox, "import os\nos.mkdir('w')\nfor n in range(20000):\n    open(f'w/{n:x}' + 'x' * 200, 'w')\n")
    async with asyncio.timeout(60):
        entries, cut = await sandbox.files.list("w", limit=1000)
        result = await sandbox.call(ToolCall("list", {"path": "w"}), timeout_s=30)
    return f"bounded: {len(entries)} entries, cut {cut}, tool says {len(result.text)} characters"


async def _ended(what: str, work: object) -> str:
    try:
        await work  # type: ignore[misc]
        return f"{what} done"
    except EnvdError as error:
        return f"{what} refused: {error}"


async def overlay(arena: Arena) -> str:
    """The attributes are set, then looked through in the sandbox and, where it can be forked, in its copy: a snapshot
    must not make them real.
    """
    sandbox = await arena.sandbox()
    await sandbox.files.write("attack.py", f"from attempts import *\n{OVERLAY}".encode())
    said = (await sandbox.call(ToolCall("exec", {"command": "python3 attack.py"}), timeout_s=arena.patience_s)).text
    copy = arena.keep(await sandbox.fork())
    seen = (await copy.call(ToolCall("exec", {"command": "ls -A d e; cat f"}), timeout_s=arena.patience_s)).text
    same = seen == "d:\ninner\n\ne:\ninner\nx\nexit 0"
    return f"{said}\n{'the copy holds the same' if same else 'BREACH ' + seen}"


HARDLINK = """
for target in ("/etc/passwd", "/usr/bin/env", "/.template/attempts.py", "/proc/1/environ"):
    attempt("link " + target, os.link, target, "linked")
def link_of_a_descriptor():
    os.link(f"/proc/self/fd/{os.open('/etc/passwd', os.O_RDONLY)}", "linked2", follow_symlinks=True)
attempt("link of a descriptor", link_of_a_descriptor)
"""
READ_ONLY = """
import sys
places = [
    "/etc/x", "/usr/x", "/usr/bin/x", "/x", "/.template/x", sys.prefix + "/x",
    "/dev/x", "/run/x", "/root/x", "/var/x", "/proc/x",
]
for path in places:
    attempt("create " + path, os.open, path, os.O_WRONLY | os.O_CREAT)
for path in ("/etc/passwd", "/usr/bin/env", "/.template/attempts.py"):
    attempt("write " + path, writing, path, b"x")
    attempt("chmod " + path, os.chmod, path, 0o777)
    attempt("remove " + path, os.unlink, path)
"""
OVERLAY = """
import os
for name in ("d", "e"):
    os.makedirs(name + "/inner")
open("f", "w").write("x")
for name in ("redirect", "opaque", "metacopy", "origin", "upper", "impure", "whiteout"):
    for space in ("user", "trusted"):
        for path, target in (
            ("f", b"/etc/passwd"), ("d", b"/etc"), ("d", b"../../../../etc"), ("e", b"/proc/1/root"), (".", b"y"),
        ):
            try:
                os.setxattr(path, f"{space}.overlay.{name}", target)
            except OSError as error:
                print("refused", space, name, errno.errorcode[error.errno])
capability = struct.pack("IIIII", 0x2000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0)
attempt("security.capability", os.setxattr, "f", "security.capability", capability)
attempt("whiteout", os.mknod, "w", 0o020000, 0)
absent("where they point", [name for path in ("d", "e") for name in os.listdir(path) if name != "inner"])
absent("the file they name", open("f").read().replace("x", ""))
"""

ATTACKS = (
    Attack(
        "path-dotdot",
        "paths",
        "file calls and tools given `..` up to the host's canary",
        r"refused read.*\n.*refused tool",
        act=dotdot,
        audit=("path.escape",),
    ),
    Attack(
        "path-absolute",
        "paths",
        "absolute paths of the system and of the host",
        r"refused read",
        act=absolute,
        audit=("path.escape",),
    ),
    Attack(
        "path-link-read",
        "paths",
        "links in the workspace that lead to /etc",
        r"refused read.*[\s\S]*refused tool",
        act=link_read,
        audit=("path.escape",),
    ),
    Attack(
        "path-link-write",
        "paths",
        "writing, moving and removing through links to the outside",
        r"outside is as it was",
        act=link_write,
        audit=("path.escape",),
    ),
    Attack(
        "path-magic-link",
        "paths",
        "links through /proc/1/root, /proc/self/cwd and /proc/self/fd",
        r"refused read r/etc/passwd",
        act=magic_links,
        audit=("path.escape",),
    ),
    Attack(
        "path-swap-directory",
        "paths",
        "TOCTOU: a directory and a link to the outside exchanged in a loop while the server works in it",
        r"never outside",
        act=swapped_directory,
        audit=("path.escape",),
    ),
    Attack(
        "path-swap-file",
        "paths",
        "TOCTOU: a file and a link exchanged in a loop while the server reads it",
        r"never outside",
        act=swapped_file,
        audit=("path.escape",),
    ),
    Attack(
        "path-fifo",
        "paths",
        "a FIFO, an endless device and a terminal in place of a file",
        r"refused read pipe[\s\S]*refused tool",
        act=fifo,
        audit=("path.escape",),
    ),
    Attack(
        "path-names",
        "paths",
        "names with null bytes, of 300 bytes, 3,000 levels; the workspace itself removed and moved",
        r"refused read.*[\s\S]*refused remove[\s\S]*refused move",
        act=names,
        audit=("request.refused",),
    ),
    Attack(
        "path-hidden",
        "paths",
        "a file that the rules hide, by other spellings and from git's history",
        r"refused read[\s\S]*not in the sandbox",
        act=hidden_file,
        audit=("path.escape",),
    ),
    Attack(
        "path-diff-links",
        "paths",
        "links and FIFOs in what the final diff reads, and its verdict",
        r"links as links: [2-4] .*link:outside",
        act=diff_of_links,
        audit=("verify.tampered",),
    ),
    Attack(
        "path-deep-tree",
        "paths",
        "1,500 nested directories to list, compare and remove",
        r"bounded",
        act=deep_tree,
        unseen=CONTAINED,
        mark="python3 make.py",
    ),
    Attack(
        "path-wide-tree",
        "paths",
        "20,000 entries with long names in one directory",
        r"bounded: 1000 entries, cut True",
        act=wide_tree,
        audit=("limit.output",),
    ),
    Attack(
        "path-hard-link",
        "paths",
        "hard links to files of the system and of the template",
        r"refused link /etc/passwd",
        script=HARDLINK,
        unseen=KERNEL,
    ),
    Attack(
        "system-read-only",
        "paths",
        "creating, changing and removing what belongs to the system, the template and the Python",
        r"refused create /etc/x E(ROFS|ACCES|PERM)",
        script=READ_ONLY,
        unseen=KERNEL,
        harmless_on={"qemu": OWN_KERNEL},
    ),
    Attack(
        "overlay-attributes",
        "paths",
        "overlayfs's own attributes, to redirect a directory to elsewhere, now and in a fork",
        r"nothing of where they point",
        act=overlay,
        unseen=KERNEL,
        mark="attack.py",
        harmless_on={"qemu": OWN_KERNEL},
    ),
)
