"""One Firecracker process: its jail, its API (src/firecracker/swagger/firecracker.yaml), and the connection to the
guest's agent.

    jail     BASE/firecracker/ID/root: hard links to the machine's files; Firecracker creates the API's socket, the
             vsock's and snapshots in it
    server -> unshare (own network, pid namespace that ends with the server) -> jailer (chroot, uid, rlimits) ->
    firecracker

All paths given to the API are relative to the jail, so that a state from one jail can be loaded in any other.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from envd.backends.vm.machine import VSOCK_PORT, MachineError, Shape, kernel_arguments
from envd.backends.vm.process import VmmProcess
from envd.errors import BackendUnavailable, SandboxGone
from envd.guest.link import GuestLink
from envd.sandbox.linux import SANDBOX_USER

API, VSOCK, MEMORY, STATE = "run/firecracker.socket", "agent.sock", "memory", "state"
KERNEL, RAMDISK, ROOT = "vmlinux", "initramfs", "root.squashfs"
TEMPLATE, PACKAGES = "template.squashfs", "packages.squashfs"
_API_S = 30.0
_USERS = 30_000
_AGENT_CID = 3
_TRACK_SINCE = (1, 13)
"""From this version on the load's flag is `track_dirty_pages`; before, `enable_diff_snapshots`."""


@dataclass(frozen=True)
class Firecracker:
    """The Firecracker of this host."""

    program: Path
    jailer: Path | None
    """None: an unprivileged server runs Firecracker itself, confined by its seccomp filter alone."""
    version: str

    @property
    def named(self) -> str:
        """Name and version of Firecracker, on which a state depends."""
        return f"firecracker {self.version}"

    @property
    def load_flag(self) -> str:
        """Name of the flag that enables tracking of dirty pages when a snapshot is loaded."""
        numbers = tuple(int(each) for each in self.version.split(".")[:2])
        return "track_dirty_pages" if numbers >= _TRACK_SINCE else "enable_diff_snapshots"


async def find() -> Firecracker:
    """Find the installed Firecracker. Raises BackendUnavailable with the fix."""
    named = os.environ.get("TRIPLANE_ENVD_FIRECRACKER") or shutil.which("firecracker")
    if named is None or not Path(named).is_file():
        raise BackendUnavailable(
            "firecracker is not installed: put a release's firecracker and jailer on PATH, or set"
            " TRIPLANE_ENVD_FIRECRACKER"
        )
    program = Path(named).resolve()
    jailer: Path | None = None
    if os.geteuid() == 0:
        beside = shutil.which("jailer", path=f"{program.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
        if beside is None:
            raise BackendUnavailable(
                f"no jailer beside {program}: install the one of the same release; Firecracker must not run"
                " as root without it"
            )
        jailer = Path(beside).resolve()
    running = await asyncio.create_subprocess_exec(
        program, "--version", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(running.communicate(), _API_S)
    words = said.decode(errors="replace").split()
    version = words[1].removeprefix("v") if len(words) > 1 and words[0] == "Firecracker" else ""
    if len(version.split(".")) < 3 or not version.split(".")[0].isdigit():
        raise BackendUnavailable(f"{program} does not report a version of Firecracker: install a release's binary")
    return Firecracker(program, jailer, version)


class FirecrackerMachine:
    """A Firecracker process in its jail."""

    def __init__(self, firecracker: Firecracker, base: Path, number: int, shape: Shape) -> None:
        """base: directory of the jails. number: unique on this server, never reused."""
        self.firecracker, self.shape = firecracker, shape
        self._identity = f"m{number}"
        self._user = SANDBOX_USER + 1 + number % _USERS if firecracker.jailer else os.geteuid()
        self._base = base
        self._place = base / firecracker.program.name / self._identity
        self.root = self._place / "root"
        self._process: VmmProcess | None = None
        self._http: httpx.AsyncClient | None = None
        self._directory = -1
        self.guest: GuestLink | None = None

    def bring(self, files: Mapping[str, Path]) -> None:
        """Put files into the jail, by name.

        Links files where possible, else copies them. They belong to the server and are read-only to Firecracker.
        """
        (self.root / "run").mkdir(parents=True, exist_ok=True)
        if self.firecracker.jailer:
            os.chown(self.root / "run", self._user, self._user)
        for name, source in files.items():
            linked = False
            if (
                source.stat().st_mode & 0o004
            ):  # else the jail's user could not read the link, and a snapshot's own mode must not change
                with suppress(OSError):  # another file system
                    os.link(source, self.root / name)
                    linked = True
            if not linked:
                shutil.copyfile(source, self.root / name)
                (self.root / name).chmod(0o644)

    async def start(self, groups: Sequence[Path], *, mute: bool) -> None:
        """Start Firecracker and wait for its API. groups: as `VmmProcess` takes them."""
        self._process = VmmProcess(self._command(), directory=self.root, groups=groups, mute=mute)
        self._directory = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # Through the descriptor, since a socket's path has at most 107 bytes and the jail's path is longer.
        transport = httpx.AsyncHTTPTransport(uds=f"/proc/self/fd/{self._directory}/{API}")
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        self._http = httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=_API_S, headers=headers
        )
        await self._until(self._answers, _API_S, "its API does not answer")

    async def boot(self) -> None:
        """Boot a machine from the files KERNEL, RAMDISK, ROOT, TEMPLATE and, if there is one, PACKAGES of the jail."""
        arguments = kernel_arguments(self.shape, f"vsock:{VSOCK_PORT}", "reboot=k", "pci=off")
        machine = {
            "vcpu_count": self.shape.vcpus,
            "mem_size_mib": self.shape.machine_mb,
            "smt": False,
            "track_dirty_pages": False,
        }
        await self.ask("PUT", "/machine-config", machine)
        await self.ask(
            "PUT", "/boot-source", {"kernel_image_path": KERNEL, "initrd_path": RAMDISK, "boot_args": arguments}
        )
        for name, path in (("root", ROOT), ("template", TEMPLATE), ("packages", PACKAGES)):
            if not (self.root / path).exists():
                continue
            drive = {"drive_id": name, "path_on_host": path, "is_root_device": False, "is_read_only": True}
            await self.ask("PUT", f"/drives/{name}", drive)
        await self.ask("PUT", "/vsock", {"guest_cid": _AGENT_CID, "uds_path": VSOCK})
        await self.ask("PUT", "/entropy", {})
        await self.ask("PUT", "/actions", {"action_type": "InstanceStart"})

    async def load(self) -> None:
        """Load and resume the machine of the jail's files STATE and MEMORY.

        Firecracker maps memory copy-on-write and tracks changed pages from then on.
        """
        memory = {"backend_type": "File", "backend_path": MEMORY}
        loading = {"snapshot_path": STATE, "mem_backend": memory, "resume_vm": True, self.firecracker.load_flag: True}
        await self.ask("PUT", "/snapshot/load", loading)

    async def halt(self) -> None:
        """Pause the machine; pending requests to the agent wait for `go`."""
        if self.guest is not None:
            self.guest.hold()
        await self.ask("PATCH", "/vm", {"state": "Paused"})

    async def go(self) -> None:
        """Resume the machine."""
        await self.ask("PATCH", "/vm", {"state": "Resumed"})
        if self.guest is not None:
            self.guest.release()

    async def write(self, kind: str, state: str, memory: str) -> None:
        """Write the paused machine's state to files in the jail.

        kind: Full, or Diff for the memory that changed since the last load or write.
        """
        await self.ask(
            "PUT", "/snapshot/create", {"snapshot_type": kind, "snapshot_path": state, "mem_file_path": memory}
        )

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Make one API request. Raises MachineError with its message, SandboxGone if Firecracker has ended."""
        assert self._http is not None, "start() comes first"
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise SandboxGone(f"Firecracker does not answer {method} {path}: {self.said or error}") from error
        if answer.status_code not in (200, 204):
            raise MachineError(f"Firecracker refused {method} {path}: {_fault(answer)}")
        return answer.json() if answer.status_code == 200 else None

    async def reach_agent(self, patience_s: float) -> GuestLink:
        """Connect to the agent as soon as it listens. Raises MachineError after patience_s."""
        await self._until(self._connects, patience_s, "its agent does not listen")
        assert self.guest is not None, "just connected"
        return self.guest

    async def end(self) -> None:
        """Kill Firecracker, wait until it has ended, and remove its jail. Idempotent."""
        if self.guest is not None:
            self.guest.close()
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
        if self._http is not None:
            await self._http.aclose()
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1
        await asyncio.to_thread(shutil.rmtree, self._place, True)

    @property
    def said(self) -> str:
        """Last output of Firecracker."""
        return self._process.said if self._process is not None else ""

    def usage(self) -> tuple[int, float]:
        """(bytes of private memory, seconds of processor time) of Firecracker."""
        return self._process.usage() if self._process is not None else (0, 0.0)

    def _command(self) -> list[str]:
        if self.firecracker.jailer is None:
            return [
                "setpriv",
                "--no-new-privs",
                "--pdeathsig",
                "KILL",
                str(self.firecracker.program),
                "--api-sock",
                API,
                "--id",
                self._identity,
            ]
        # The jailer changes its user, which clears its parent-death signal. Therefore it runs in a pid namespace whose
        # first process is killed with `unshare`, which is killed with the server.
        alone = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--net",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "--",
        ]
        user = ["--uid", str(self._user), "--gid", str(self._user)]
        jail = [
            str(self.firecracker.jailer),
            "--id",
            self._identity,
            "--exec-file",
            str(self.firecracker.program),
            *user,
        ]
        jail += ["--chroot-base-dir", str(self._base), "--resource-limit", "no-file=256"]
        return [*alone, "sh", "-c", '"$@" & wait', "sh", *jail, "--", "--api-sock", f"/{API}"]

    async def _until(self, attempt: Callable[[], Any], patience_s: float, otherwise: str) -> None:
        deadline = asyncio.get_running_loop().time() + patience_s
        while not await attempt():
            assert self._process is not None, "start() comes first"
            if self._process.ended.done():
                raise MachineError(f"Firecracker ended: {self.said or 'it printed nothing'}")
            if asyncio.get_running_loop().time() > deadline:
                raise MachineError(f"Firecracker hangs, {otherwise}: {self.said or 'it printed nothing'}")
            await asyncio.sleep(0.005)

    async def _answers(self) -> bool:
        try:
            await self.ask("GET", "/")
        except SandboxGone:
            return False
        return True

    async def _connects(self) -> bool:
        """Request a connection to the agent's port. Firecracker hangs up while no process listens on the port."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(_API_S):
                await loop.sock_connect(sock, f"/proc/self/fd/{self._directory}/{VSOCK}")
                await loop.sock_sendall(sock, b"CONNECT %d\n" % VSOCK_PORT)
                said = b""
                # One byte at a time: the agent's data follows the line.
                while not said.endswith(b"\n") and len(said) < 32 and (byte := await loop.sock_recv(sock, 1)):
                    said += byte
            if not (said.startswith(b"OK ") and said.endswith(b"\n")):
                raise ConnectionError("no agent listens yet")
            self.guest = await GuestLink.over_socket(sock, escaped=True)
        except (OSError, TimeoutError):
            sock.close()
            return False
        except BaseException:
            with suppress(OSError):
                sock.close()
            raise
        return True


def _fault(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["fault_message"])[:300]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
