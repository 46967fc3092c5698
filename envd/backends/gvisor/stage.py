"""Process 1 of the namespaces of a server's gVisor sandboxes: runs `runsc` for the server and adopts the processes that
`runsc` leaves running.

    server --SEQPACKET: JSON and descriptors--> stage --fork, exec--> runsc --> sandbox and gofer processes
                                                                                (children of the stage)

The stage has its own pid and mount namespaces, so that no process of a sandbox outlives it: when the server closes the
socket or is killed, the stage ends and the kernel kills the rest. Started by `envd.backends.gvisor.server`:

    unshare --mount --pid --fork --kill-child --mount-proc python -m envd.backends.gvisor.stage CONTROL_FD RUN_DIR
    GROUPS_NAME

The stage sends {"enforced": [...], "base": path} when it is ready, then answers {"id", "code", "said"} to each of
    {"id", "do": "run", "box", "argv", "limits"} and descriptors      run a command, in a group of these limits if
                                                                      there are any
    {"id", "do": "end", "box"}                                        kill all processes of a sandbox; answered when
                                                                      they have ended
    {"id", "do": "show", "path"}                                      make a directory visible to gofers; `said` is its
                                                                      path for them
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envd.sandbox import linux, rootfs
from envd.sandbox.cgroups import Cgroups, box_groups
from envd.sandbox.python_inside import python_directories
from envd.sandbox.wire import receive_fds

AGENT_DIRECTORY = "/.envd"
"""Directory of the agent inside a sandbox."""
MAX_MESSAGE = 64 * 1024
MAX_DESCRIPTORS = 3
_MAX_SAID = 16 * 1024
_TICK_S = 0.005
_OPEN_TO_ALL = ("/media", "/srv", "/mnt", "/opt")
"""Candidates for the stage's mount point for gofers, which run as another user and must be able to search the path."""


@dataclass
class _Command:
    """A running command."""

    request: int
    box: str
    errors: int
    """Descriptor that reads its standard error."""
    said: bytes = b""


class Stage:
    """Event loop of the stage. Single-threaded, so that it may fork."""

    def __init__(self, control: socket.socket, run_dir: Path, groups: str) -> None:
        self._control = control
        self._run_dir = run_dir
        self._name = groups
        self._groups = Cgroups(groups, freezer=True)
        self._show = _shown(run_dir)
        self._commands: dict[int, _Command] = {}
        self._boxes: set[str] = set()
        """Boxes with a command run and not ended; their directories may have been removed."""
        self._ending: dict[str, list[int]] = {}
        self._selector = selectors.DefaultSelector()
        self._serving = True

    def serve(self) -> None:
        """Serve until the server closes the socket; then end every sandbox."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(wake_reader, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._prepare()
        self._answer({"enforced": self._groups.enforced, "base": str(self._show / "base")})
        while self._serving or self._ending:
            for key, _ in self._selector.select(_TICK_S if self._ending else None):
                if key.fileobj is self._control:
                    self._take()
                elif key.fd == wake_reader:
                    os.read(wake_reader, 4096)
                else:
                    self._listen(key.data)
            self._reap()
            for box in list(self._ending):
                self._end(box)
        self._groups.close()

    def _prepare(self) -> None:
        linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("tmpfs", str(self._show), "tmpfs", linux.MS_NOSUID, "mode=755,size=16m")
        base = self._show / "base"
        base.mkdir()
        rootfs.fill_base(base, base)
        rootfs.fill_devices(base / "dev")
        (base / AGENT_DIRECTORY.lstrip("/")).mkdir()
        linux.mount(str(base), str(base), flags=linux.MS_BIND | linux.MS_REC)
        linux.mount("", str(base), flags=linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID)

    def _take(self) -> None:
        try:
            data, descriptors = receive_fds(self._control, MAX_MESSAGE, MAX_DESCRIPTORS)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._serving = False
            self._selector.unregister(self._control)
            for box in self._boxes:
                self._ending.setdefault(box, [])
            return
        request = json.loads(data)
        try:
            if request["do"] == "run":
                self._run(request, descriptors)
            elif request["do"] == "end":
                self._ending.setdefault(request["box"], []).append(request["id"])
            else:
                self._answer({"id": request["id"], "code": 0, "said": self._shown_at(request["path"])})
        except OSError as error:
            self._answer({"id": request["id"], "code": 127, "said": f"{request['do']}: {error}"})
        finally:
            for fd in descriptors:
                os.close(fd)

    def _run(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        pid = os.fork()
        if pid == 0:
            try:
                self._become(request, [*descriptors[:2], writer, *descriptors[2:]])
            except BaseException as error:  # noqa: BLE001 - the child must end here after any error
                os.write(writer, str(error).encode())
            finally:
                os._exit(127)
        os.close(writer)
        self._boxes.add(request["box"])
        command = self._commands[pid] = _Command(request["id"], request["box"], reader)
        self._selector.register(reader, selectors.EVENT_READ, command)

    def _become(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Replace this forked child by the command. descriptors: those that become 0, 1, 2, ..."""
        os.setsid()
        if request["limits"] is not None:
            memory, pids, cpu = request["limits"]
            for entrance in self._groups.entrances(request["box"], memory=memory, pids=pids, cpu=cpu):
                os.write(entrance, b"0")
                os.close(entrance)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Duplicate to high numbers first, so that no descriptor is overwritten before it is in place.
        high = [os.dup2(fd, 100 + number, inheritable=False) for number, fd in enumerate(descriptors)]
        for number, fd in enumerate(high):
            os.dup2(fd, number)
        os.execve(request["argv"][0], request["argv"], {"PATH": os.defpath, "TMPDIR": "/tmp"})

    def _listen(self, command: _Command) -> None:
        """Read a command's standard error.

        The sandbox holds the other end too, so that end of file does not show when the command ends.
        """
        try:
            data = os.read(command.errors, 4096)
        except BlockingIOError:
            return
        if data:
            command.said = (command.said + data)[-_MAX_SAID:]
        else:
            self._selector.unregister(command.errors)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self._commands.pop(pid, None)
            if command is None:
                continue
            if command.errors in self._selector.get_map():
                self._listen(command)
            if command.errors in self._selector.get_map():
                self._selector.unregister(command.errors)
            os.close(command.errors)
            said = command.said.decode(errors="replace")
            self._answer({"id": command.request, "code": os.waitstatus_to_exitcode(status), "said": said})

    def _end(self, box: str) -> None:
        left = self._processes(box)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if left:
            return
        if not self._groups.remove(box):
            return
        self._boxes.discard(box)
        for request in self._ending.pop(box):
            self._answer({"id": request, "code": 0, "said": ""})

    def _processes(self, box: str) -> set[int]:
        found = {pid for pid, command in self._commands.items() if command.box == box}
        groups = [path for path in box_groups(self._name, box).values() if path.exists()]
        for path in groups:
            found |= {int(line) for line in (path / "cgroup.procs").read_text().split()}
        return found if self._groups.enforced else found | _processes_of(self._run_dir, box)

    def _shown_at(self, path: str) -> str:
        """Bind a directory read-only where gofers can reach it, and return its path."""
        place = self._show / f"shown-{len(list(self._show.iterdir()))}"
        place.mkdir()
        linux.mount(path, str(place), flags=linux.MS_BIND)
        flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
        linux.mount("", str(place), flags=flags)
        return str(place)

    def _answer(self, answer: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(answer).encode())
        except OSError:
            return  # the server has ended; the loop reads the socket's end next


def _shown(run_dir: Path) -> Path:
    """Find a directory to mount on that everybody may search and nothing here needs. Raises OSError."""
    needed = [run_dir, Path(__file__), Path(sys.executable), *map(Path, python_directories())]
    for name in _OPEN_TO_ALL:
        place = Path(name)
        if place.is_dir() and place.stat().st_mode & 0o001 and not any(path.is_relative_to(place) for path in needed):
            return place
    raise OSError(f"the gvisor backend mounts on one of {', '.join(_OPEN_TO_ALL)} in a namespace of its own: make one")


def _processes_of(run_dir: Path, box: str) -> set[int]:
    """Pids of a box's sandbox and gofer processes by their command lines, for hosts without control groups."""
    mark = b"--bundle=" + os.fsencode(run_dir / "boxes" / box)
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in words:
                found.add(int(entry.name))
    return found


def main(arguments: list[str]) -> int:
    """Run the stage and return the process's exit code."""
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    try:
        Stage(control, Path(arguments[1]), arguments[2]).serve()
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
