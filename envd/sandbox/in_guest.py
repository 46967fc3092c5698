"""A verification inside a sandbox of another kind than namespaces: what the server runs there by the guest's own
Python.

    BOOT          reads a bundle of packages and the request from standard input, unpacks the first, and runs `main`
    main  P0      runs nothing of the agent's; has the key; prints the signed result
      fork P1     envd.sandbox.verifier, as in namespaces: prepares, forks the runner, judges

P0 and P1 speak over a socket, which no other process can open, unlike pipes under gVisor. The key comes after P1 was
forked and before it begins, so no process that ever runs the agent's code has it: what anybody else writes to P0's
output is not believed.

Where the guest's root has its capabilities (virtual machines), P1 gets a user namespace whose users are no users of the
guest's: one for the tests, to whom the workspace belongs, and the supervisor. Where it has some (gVisor), the tests are
the guest's root without any, and the supervisor another user. Elsewhere all are one user, as where envd is unprivileged
(docs/threat-model.md).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from envd.sandbox import linux, wire
from envd.sandbox.place import Place
from envd.tools.paths import WORKSPACE

KEY_BYTES = 32
BOOT = """
import os, struct, sys, tempfile
def take(count):
    data = bytearray()
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            os._exit(3)
        data += piece
    return bytes(data)
size, request = struct.unpack('<QQ', take(16))
os.umask(0o022)
above = tempfile.mkdtemp(prefix='.judge-', dir='/tmp')
os.chmod(above, 0o755)
packages = above + '/site-packages'
bundle = take(size)
at = 0
while at < len(bundle):
    name, length = struct.unpack_from('<HI', bundle, at)
    path = packages + '/' + bundle[at + 6 : at + 6 + name].decode()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    at += 6 + name
    with open(path, 'wb') as file:
        file.write(bundle[at : at + length])
    at += length
sys.path.insert(0, packages)
from envd.sandbox.in_guest import main
main(take(request), above)
"""
_TWO_USERS, _SYS_ADMIN = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7, 1 << 21
"""CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID; and what a machine's root has beside them."""


def main(request: bytes, above: str) -> NoReturn:
    """Verify, print the signed result and exit. request: a frame of `envd.sandbox.wire`. above: a directory of this
    process's own.
    """
    linux.hide_from_ptrace()
    linux.adopt_orphans()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    has = _capabilities()
    two_users = has & _TWO_USERS == _TWO_USERS
    namespace = two_users and bool(has & _SYS_ADMIN)
    if namespace:
        _hand_over(Path(WORKSPACE))
    go_read, go_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.close(go_write)
        _judge(theirs, go_read, Path(above), two_users, namespace)
    theirs.close()
    key = _read_key()
    if namespace:
        _wait_for_namespace(pid)
        users = f"0 {linux.SANDBOX_USER} 1\n{linux.SUPERVISOR} {linux.SANDBOX_USER + linux.SUPERVISOR} 1\n"
        for name in ("gid_map", "uid_map"):
            Path(f"/proc/{pid}/{name}").write_text(users)
    os.write(go_write, b"g")
    ours.sendall(request)
    frame = wire.receive(ours)
    header: dict[str, Any] = {"failed": "the verifier ended without a verdict"} if frame is None else frame[0]
    said = wire.pack(header, b"")
    print(f"\n{hmac.new(key, said, hashlib.sha256).hexdigest()} {said.hex()}", flush=True)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    linux.leave(0)


def _judge(sock: socket.socket, go: int, above: Path, two_users: bool, namespace: bool) -> NoReturn:
    """P1."""
    try:
        linux.die_with_parent()
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        if namespace:
            linux.unshare(linux.CLONE_NEWUSER)
        if os.read(go, 1) != b"g":
            linux.leave(1)
        if namespace:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        if two_users:
            linux.become_supervisor()
        linux.no_new_privileges()
        linux.hide_from_ptrace()
        linux.die_with_parent()  # again: a change of user undoes it
        from envd.sandbox.verifier import serve_verification

        scratch = Path(f"{above}-scratch")
        scratch.mkdir(mode=0o700)
        os.chdir(WORKSPACE)
        serve_verification(sock, Place(Path(WORKSPACE), Path("/.template"), scratch), supervised=two_users)
    except BaseException as error:  # noqa: BLE001 - whatever it was is the server's to know
        with suppress(OSError):
            wire.send(sock, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        linux.leave(0)


def _capabilities() -> int:
    """Those of root in this guest; 0 for other users."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return effective if os.geteuid() == 0 else 0


def _hand_over(workspace: Path) -> None:
    """Make the tests' user the owner of the workspace."""
    for path in [workspace, *workspace.rglob("*")]:
        os.chown(path, linux.SANDBOX_USER, linux.SANDBOX_USER, follow_symlinks=False)


def _read_key() -> bytes:
    key = b""
    while len(key) < KEY_BYTES:
        piece = os.read(0, KEY_BYTES - len(key))
        if not piece:
            linux.leave(3)
        key += piece
    os.close(0)
    return key


def _wait_for_namespace(pid: int) -> None:
    """Until the child has a user namespace of its own."""
    ours, theirs = Path("/proc/self/ns/user").readlink(), Path(f"/proc/{pid}/ns/user")
    while theirs.readlink() == ours:
        os.sched_yield()
