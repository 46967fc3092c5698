"""Forks the sandboxes that verify: a small single-threaded process with pytest imported, so that a start is one clone.

    python -m envd.sandbox.zygote CONTROL_FD RUN_DIR NAME --backend namespaces|plain

Control messages (JSON, one a datagram): {"id", "template", "runtime", "root", "env", "cold", "memory", "pids", "cpu",
"disk"} with the sandbox's end of a socketpair attached; {"kill": id}. When the control connection closes, the server is
gone: the zygote kills what it forked, removes groups and directories, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

from contracts.owned import remove
from envd.sandbox import linux, rootfs, wire
from envd.sandbox.cgroups import Cgroups, remove_groups
from envd.sandbox.entering import close_all_but, enter_copy, enter_namespaces
from envd.sandbox.in_guest import exec_cold
from envd.sandbox.place import Place
from envd.sandbox.proctree import descendants, kill_since, reap
from envd.sandbox.python_inside import adopt, package_places
from envd.sandbox.runner import inside_session, warm_up
from envd.sandbox.syscalls import prepare_filter
from envd.sandbox.verifier import serve_verification
from envd.tools.paths import WORKSPACE

_OPEN_FILES = 1024
_AGAIN_MS = 5
_ROUNDS = 200
_LAST_WORDS_S = 10.0


class Zygote:
    """The fork loop."""

    def __init__(self, control: socket.socket, run_dir: Path, name: str, backend: str) -> None:
        self._control = control
        self._run_dir = run_dir
        self._namespaces = backend == "namespaces"
        self._made = 0
        self._boxes: dict[int, str] = {}  # pid of process 1 -> sandbox id
        self._groups = Cgroups(name)
        self._left: set[str] = set()  # ids of ended sandboxes whose groups are not removed yet
        self._owner = linux.sandbox_owner()
        self._system: list[str] = []  # host directories that sandboxes see
        # Where there are two users, the verifier runs as another one than the tests.
        self._supervised = self._namespaces and self._owner == linux.SANDBOX_USER
        # Held open because the path is not visible after this process changes its root.
        self._above_run_dir = os.open(run_dir.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def run(self) -> None:
        """Prepare, then fork on request until the server closes the control connection."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the zygote ends when the server does
        linux.adopt_orphans()
        if self._namespaces:
            prepare_filter()  # while the path of its program is visible
            self._own_root()
            inside_session(Path(WORKSPACE), self._loop)
        else:
            self._loop()

    def _loop(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()
        self._control.send(b"ready")
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        try:
            while True:
                for fd, _ in poll.poll(_AGAIN_MS if self._left else None):
                    if fd == wake_read:
                        os.read(wake_read, 4096)
                        self._bury(reap())
                    elif not self._serve_one():
                        return
                self._remove_groups()
        finally:
            self._clean_up()

    def _own_root(self) -> None:
        linux.own_mounts()
        package_places()  # cached while the host's paths are visible
        self._system = rootfs.prepare_base(self._run_dir)
        adopt()
        os.chdir(WORKSPACE)

    def _serve_one(self) -> bool:
        data, fds = wire.receive_fds(self._control, wire.MAX_REQUEST, 1)
        if not data:
            return False
        with contextlib.ExitStack() as opened:
            socks = [opened.enter_context(socket.socket(fileno=fd)) for fd in fds]
            try:
                request = json.loads(data)
                if "kill" in request:
                    self._kill(request["kill"])
                else:
                    (sock,) = socks
                    self._fork(request, sock)
            except (OSError, ValueError) as error:
                for sock in socks:
                    _answer_failure(sock, error)
        return True

    def _fork(self, request: dict[str, Any], sock: socket.socket) -> None:
        go_read, go_write = os.pipe2(os.O_CLOEXEC)
        limits = {key: request[key] for key in ("memory", "pids", "cpu")}
        entrances: list[int] = []
        try:
            entrances += self._groups.entrances(request["id"], **limits)
            pid = self._clone()
            if pid == 0:
                os.close(go_write)
                self._child(request, sock, go_read, entrances)
            self._boxes[pid] = request["id"]
            try:
                self._map_users(pid)
                os.write(go_write, b"g")
            except OSError:
                os.kill(pid, signal.SIGKILL)
                raise
        except OSError:
            if request["id"] not in self._boxes.values():
                self._groups.remove(request["id"])
            raise
        finally:
            for fd in (go_read, go_write, *entrances):
                os.close(fd)

    def _clone(self) -> int:
        """Fork, into new namespaces if the backend has them. Returns 0 in the child."""
        self._made += 1
        if not self._namespaces:
            return linux.clone(0)
        rootfs.make_devices()
        pid = -1
        try:
            maker = linux.MAKERS + self._made % linux.MOST_MAKERS
            as_maker = self._owner == linux.SANDBOX_USER
            pid = linux.clone_as(maker, linux.SANDBOX_NAMESPACES) if as_maker else linux.clone(linux.SANDBOX_NAMESPACES)
        finally:
            if pid != 0:
                rootfs.forget_devices()
        return pid

    def _map_users(self, pid: int) -> None:
        """Write the user and group maps of the child's user namespace; the child waits until then."""
        if not self._namespaces:
            return
        outside = self._owner if self._owner == linux.SANDBOX_USER else 0
        if outside == 0:
            Path(f"/proc/{pid}/setgroups").write_text("deny")
        users = f"0 {outside} 1\n"
        if self._supervised:
            users += f"{linux.SUPERVISOR} {outside + linux.SUPERVISOR} 1\n"
        Path(f"/proc/{pid}/uid_map").write_text(users)
        Path(f"/proc/{pid}/gid_map").write_text(users)

    def _child(self, request: dict[str, Any], sock: socket.socket, go: int, entrances: list[int]) -> None:
        """Run process 1 of a sandbox. Never returns into the zygote's loop."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for fd in entrances:
                os.write(fd, b"0")
            if os.read(go, 1) != b"g":
                linux.leave(1)
            place = self._enter(request)
            close_all_but(sock.fileno())
            linux.die_with_parent()  # not earlier: a change of user clears the setting
            enforced = self._groups.enforced
            linux.limit_process(
                files=_OPEN_FILES,
                file_bytes=request["disk"],
                processes=None if "pids" in enforced or not self._namespaces else request["pids"],
                memory=None if "memory" in enforced else request["memory"],
            )
            if request["cold"]:
                exec_cold(sock, request["cold"], own_root=request["root"])
            serve(sock, place)
        except BaseException as error:  # noqa: BLE001 - the child reports every error and never returns
            _answer_failure(sock, error)
        finally:
            linux.leave(0)

    def _enter(self, request: dict[str, Any]) -> Place:
        if not self._namespaces:
            return enter_copy(request, self._run_dir)
        return enter_namespaces(request, owner=self._owner, supervised=self._supervised, system=self._system)

    def _kill(self, identity: str) -> None:
        """Kill all processes of a sandbox."""
        for pid in [pid for pid, each in self._boxes.items() if each == identity]:
            if not self._namespaces:  # in a pid namespace the death of process 1 kills all others
                os.kill(pid, signal.SIGSTOP)
                kill_since(pid, frozenset(), lambda: None)
            os.kill(pid, signal.SIGKILL)

    def _bury(self, ended: dict[int, int]) -> None:
        if not self._namespaces:
            self._kill_strays()
        for pid in ended:
            identity = self._boxes.pop(pid, None)
            if identity is None:
                continue
            self._left.add(identity)
            if not self._namespaces:
                remove(self._run_dir / "boxes" / identity)
        self._remove_groups()

    def _remove_groups(self) -> None:
        """Remove the groups of ended sandboxes; retry later where the kernel still tears down the last processes."""
        self._left = {each for each in self._left if not self._groups.remove(each)}

    def _kill_strays(self) -> None:
        """Kill the orphans of dead verifiers. Without namespaces, the zygote becomes the parent of these."""
        below = descendants(os.getpid())
        for pid, parent in below.items():
            if parent == os.getpid() and pid not in self._boxes:
                os.kill(pid, signal.SIGKILL)

    def _clean_up(self) -> None:
        for pid in list(self._boxes):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            self._bury(reap())
            if not self._namespaces:
                self._kill_strays()
            if not self._boxes:
                break
            time.sleep(0.005)
        self._groups.close()
        if not self._namespaces:
            remove_groups(self._run_dir.name)  # groups of plain sandboxes, whose agents end with the server
        self._remove_run_dir()

    def _remove_run_dir(self) -> None:
        """Remove the run directory. Retries where the last process of a plain sandbox still writes to it."""
        for _ in range(_ROUNDS):
            shutil.rmtree(self._run_dir.name, ignore_errors=True, dir_fd=self._above_run_dir)
            try:
                os.stat(self._run_dir.name, dir_fd=self._above_run_dir)
            except FileNotFoundError:
                return
            time.sleep(_AGAIN_MS / 1000)


def serve(sock: socket.socket, place: Place) -> None:
    """Verify in a sandbox until the server closes the connection."""
    supervised = os.geteuid() == linux.SUPERVISOR and place.workspace == Path(WORKSPACE)
    serve_verification(sock, place, supervised=supervised)


def _answer_failure(sock: socket.socket, error: BaseException) -> None:
    try:
        wire.send(sock, {"failed": f"{type(error).__name__}: {error}"})
        sock.settimeout(_LAST_WORDS_S)
        while sock.recv(65536):  # with data left unread, closing would discard the answer
            continue
    except OSError:
        pass  # the server has closed the connection


def main() -> None:
    """Run a zygote on an inherited control socket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("control", type=int)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("--backend", choices=("namespaces", "plain"), required=True)
    arguments = parser.parse_args()
    control = socket.socket(fileno=arguments.control)
    warm_up()
    Zygote(control, arguments.run_dir, arguments.name, arguments.backend).run()


if __name__ == "__main__":
    main()
