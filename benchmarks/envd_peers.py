"""Other programs that run commands in sandboxes on this machine: bubblewrap, runc and runsc, started in the usual way.

Each gets the same root: the host's /usr and /etc read-only, a fresh /proc, /dev and /tmp, and a workspace with one
file, in separate namespaces.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any, Protocol

from contracts.owned import owned_directory

_ANSWER_S = 60.0
_LINKS = ("bin", "sbin", "lib", "lib64")
_PLACES = ("usr", "etc", "proc", "dev", "sys", "tmp", "workspace")
_FILE = "app.py"


class PeerBox(Protocol):
    """Sandbox of a peer."""

    def execute(self) -> None:
        """Run `true`."""
        ...

    def read(self) -> None:
        """Read the workspace's file."""
        ...

    def destroy(self) -> None:
        """End it."""
        ...


class Peer(Protocol):
    """A program that starts sandboxes."""

    name: str

    def create(self) -> PeerBox:
        """Start one."""
        ...


@dataclass
class ShellBox:
    """bubblewrap around a shell that gets commands on its input; bubblewrap has no other way to run them."""

    process: subprocess.Popen[str]

    def execute(self) -> None:
        """Run the program `true`, not the shell's builtin."""
        self.say("/bin/true; echo $?", "0")

    def read(self) -> None:
        """Read with a program, as nothing else can."""
        self.say(f"cat /workspace/{_FILE} >/dev/null; echo $?", "0")

    def destroy(self) -> None:
        """Kill bubblewrap, which ends all of its processes."""
        for pipe in _pipes(self.process):
            pipe.close()  # a shell that outlives bubblewrap exits at the end of its input
        self.process.kill()
        self.process.wait()

    def say(self, line: str, expected: str) -> None:
        """Let the shell run a line, and wait for the expected output."""
        stdin, stdout = _pipes(self.process)
        stdin.write(line + "\n")
        stdin.flush()
        if (said := stdout.readline().strip()) != expected:
            raise RuntimeError(f"bubblewrap's shell answered {said!r} to {line!r}")


class Bubblewrap:
    """`bwrap` with all namespaces unshared."""

    name = "bubblewrap"

    def __init__(self, workspace: Path) -> None:
        links = [part for name in _LINKS for part in ("--symlink", f"usr/{name}", f"/{name}")]
        binds = ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--bind", str(workspace), "/workspace"]
        places = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        self._command = ["bwrap", "--unshare-all", "--die-with-parent", *binds, *links, *places, "/bin/bash"]

    def create(self) -> ShellBox:
        """Start one; the shell responds when this returns."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        box = ShellBox(subprocess.Popen(self._command, text=True, **pipes))  # type: ignore[call-overload]
        box.say("echo 0", "0")
        return box


@dataclass
class ContainerBox:
    """Container of an OCI runtime; each command is an `exec` of the runtime."""

    runtime: list[str]
    identity: str

    def execute(self) -> None:
        """Run the program."""
        _run([*self.runtime, "exec", self.identity, "/bin/true"])

    def read(self) -> None:
        """Read with a program, as nothing else can."""
        _run([*self.runtime, "exec", self.identity, "/bin/cat", f"/workspace/{_FILE}"])

    def destroy(self) -> None:
        """Kill and delete the container."""
        _run([*self.runtime, "delete", "--force", self.identity])


class OciRuntime:
    """`runc` or `runsc`: a detached container that sleeps."""

    def __init__(self, name: str, options: list[str], bundle: Path, state: Path) -> None:
        self.name = name
        self._runtime = [name, "--root", str(state), *options]
        self._bundle, self._numbers = bundle, count()

    def create(self) -> ContainerBox:
        """Start one."""
        box = ContainerBox(self._runtime, f"bench-{next(self._numbers)}")
        _run([*self._runtime, "run", "--detach", "--bundle", str(self._bundle), box.identity])
        return box


@contextmanager
def peers_here(names: list[str], notes: list[str]) -> Iterator[list[Peer]]:
    """Those of `names` that are installed and can start a sandbox; `notes` gets the reasons for the others."""
    with owned_directory("bench-peers-") as made:
        folder = Path(made)
        workspace = folder / "workspace"
        workspace.mkdir()
        (workspace / _FILE).write_text("x = 1\n")
        found: list[Peer] = []
        for name in names:
            program = "bwrap" if name == "bubblewrap" else name
            if shutil.which(program) is None:
                notes.append(f"{name} is not installed: not compared ({_HINTS[name]})")
                continue
            peer: Peer = Bubblewrap(workspace) if name == "bubblewrap" else _oci(name, folder)
            try:
                box = peer.create()
                try:
                    box.execute()
                    box.read()
                finally:
                    box.destroy()
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                notes.append(f"{name} can't start a sandbox here: not compared ({error})")
                continue
            found.append(peer)
        yield found


_HINTS = {
    "bubblewrap": "apt-get install bubblewrap",
    "runc": "apt-get install runc",
    "runsc": "deploy/install-runsc.sh",
}
_OPTIONS = {"runc": [], "runsc": ["--network=none", "--ignore-cgroups"]}


def _oci(name: str, folder: Path) -> OciRuntime:
    bundle = folder / f"bundle-{name}"
    root = bundle / "rootfs"
    root.mkdir(parents=True)
    for place in _PLACES:
        (root / place).mkdir()
    for link in _LINKS:
        (root / link).symlink_to(f"usr/{link}")
    (bundle / "config.json").write_text(json.dumps(_config(folder / "workspace")))
    return OciRuntime(name, _OPTIONS[name], bundle, folder / f"state-{name}")


def _config(workspace: Path) -> dict[str, Any]:
    def bind(source: str, target: str, mode: str) -> dict[str, Any]:
        return {"destination": target, "type": "bind", "source": source, "options": ["rbind", mode]}

    return {
        "ociVersion": "1.0.0",
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "bench",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sleep", "infinity"],
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/workspace",
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]},
            bind("/usr", "/usr", "ro"),
            bind("/etc", "/etc", "ro"),
            bind(str(workspace), "/workspace", "rw"),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


def _run(command: list[str]) -> None:
    """Run a command to its end. Its output is discarded, since a detached container would keep a pipe open."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, timeout=_ANSWER_S, **quiet)  # type: ignore[call-overload]


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout
