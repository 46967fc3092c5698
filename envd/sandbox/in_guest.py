"""Verification by a fresh interpreter inside a sandbox: of other backends than namespaces, or with a runtime that has
another pytest than the zygote.

    BOOT          reads a bundle of packages and the request from standard input, unpacks the bundle, and runs `main`
    main  P0      runs none of the agent's code; has the key; prints the signed result
      fork P1     envd.sandbox.verifier, as in namespaces: prepares, forks the runner, grades

P0 and P1 communicate over a socket, which no other process can open, unlike pipes under gVisor. P0 reads the key after
the fork of P1 and before P1 begins, so that no process that runs the agent's code ever has the key. The server ignores
output without a valid signature.

Where the guest's root has all capabilities (virtual machines), P1 gets a user namespace with two users that do not
exist in the guest: the tests' user, who owns the workspace, and the supervisor. Where root has some capabilities
(gVisor), the tests run as the guest's root without any, and the supervisor is another user. Elsewhere there is one
user, as where envd is unprivileged (docs/threat-model.md).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from envd.sandbox import linux, wire
from envd.sandbox.place import Place
from envd.sandbox.python_inside import bin_directory
from envd.tools.paths import WORKSPACE

KEY_BYTES = 32
_UNPACK = """
import os, struct, sys, tempfile
def take(count):
    data = bytearray()
    while len(data) < count:
        piece = os.read(FROM, count - len(data))
        if not piece:
            os._exit(3)
        data += piece
    return bytes(data)
def unpack(bundle):
    os.umask(0o022)
    above = tempfile.mkdtemp(prefix='.judge-', dir='/tmp')
    os.chmod(above, 0o755)
    packages = above + '/site-packages'
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
    return above
"""
BOOT = f"""FROM = 0{_UNPACK}
size, request = struct.unpack('<QQ', take(16))
above = unpack(take(size))
from envd.sandbox.in_guest import main
main(take(request), above)
"""
_SOCKET = 3
_BOOT_COLD = f"""FROM = {_SOCKET}{_UNPACK}
above = unpack(take(int(sys.argv[1])))
from envd.sandbox.in_guest import serve_cold
serve_cold(above)
"""
_TWO_USERS, _SYS_ADMIN = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7, 1 << 21
"""CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID; and the capability that only a virtual machine's root has."""


def main(request: bytes, above: str) -> NoReturn:
    """Verify, print the signed result and exit.

    request: a frame of `envd.sandbox.wire`. above: a private directory of this process.
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
        _judge(theirs, go_read, above, two_users, namespace)
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
    print(f"\n{signed(header, key)}", flush=True)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    linux.leave(0)


def signed(reply: dict[str, Any], key: bytes) -> str:
    """A reply as one line: its signature, and its compressed frame. The largest fits what the guest's agent keeps."""
    import zlib

    said = zlib.compress(wire.pack(reply), 1)
    return f"{hmac.new(key, said, hashlib.sha256).hexdigest()} {base64.b64encode(said).decode()}"


def exec_cold(sock: socket.socket, size: int, *, own_root: bool) -> NoReturn:
    """Replace this process, in its sandbox, by a fresh interpreter that reads a bundle of `size` bytes from the socket
    and then serves verifications on it. A lasting supervisor stays the supervisor.

    own_root: the sandbox has a root file system of its own, whose python3 is used. Raises OSError.
    """
    os.dup2(sock.fileno(), _SOCKET, inheritable=True)
    program = f"{bin_directory()}/python{sys.version_info.major}"
    if own_root and not (program := shutil.which("python3") or ""):
        raise FileNotFoundError("the task's root file system has no python3 in its PATH, which verdicts need")
    os.execve(program, [program, "-P", "-s", "-B", "-c", _BOOT_COLD, str(size)], dict(os.environ))


def serve_cold(above: str) -> NoReturn:
    """Serve verifications on the socket of `exec_cold`, then exit. above: see `main`."""
    sock = socket.socket(fileno=_SOCKET)
    try:
        os.set_inheritable(_SOCKET, False)
        supervised = os.geteuid() == linux.SUPERVISOR
        if supervised:
            linux.become_supervisor()
        linux.hide_from_ptrace()
        linux.die_with_parent()  # a change of user clears the setting
        _serve(sock, above, supervised)
    except BaseException as error:  # noqa: BLE001 - the server gets every error
        with suppress(OSError):
            wire.send(sock, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        linux.leave(0)


def _serve(sock: socket.socket, above: str, supervised: bool) -> None:
    from envd.sandbox.verifier import serve_verification

    scratch = Path(f"{above}-scratch")
    scratch.mkdir(mode=0o700)
    os.chdir(WORKSPACE)
    serve_verification(sock, Place(Path(WORKSPACE), Path("/.template"), scratch), supervised=supervised)


def _judge(sock: socket.socket, go: int, above: str, two_users: bool, namespace: bool) -> NoReturn:
    """Run P1: serve one verification on `sock` after the go-ahead, then exit."""
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
        linux.die_with_parent()  # again: a change of user clears the setting
        _serve(sock, above, two_users)
    except BaseException as error:  # noqa: BLE001 - the server gets every error
        with suppress(OSError):
            wire.send(sock, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        linux.leave(0)


def _capabilities() -> int:
    """Effective capabilities as a bit mask if this process is root, else 0."""
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
    """Wait until the child has its own user namespace."""
    ours, theirs = Path("/proc/self/ns/user").readlink(), Path(f"/proc/{pid}/ns/user")
    while theirs.readlink() == ours:
        os.sched_yield()
