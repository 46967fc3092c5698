"""The host as attacks must leave it: canaries, listeners, processes, mounts, groups, settings, and the server's
memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_SETTINGS = ("kernel/core_pattern", "kernel/modprobe", "vm/overcommit_memory", "net/ipv4/ip_forward")
_MAX_SERVER_BYTES = 1 << 30
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


class Host:
    """What is watched of this machine."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self.warm = 0
        """Processes, groups and mounts of sandboxes that the backend keeps ready."""
        self.directory = Path(tempfile.mkdtemp(prefix="escape-"))
        self.directory.chmod(0o777)
        self.canary = self.directory / "canary.txt"
        self.canary.write_text(self.secret)
        self.canary.chmod(0o666)  # so that only the sandbox's walls protect it
        self.abstract = f"escape-{secrets.token_hex(6)}"
        self.shm_key = 0x5F000000 + secrets.randbelow(1 << 20)
        self._segment = _libc.shmget(self.shm_key, 4096, 0o1666)
        self._visits: list[str] = []
        self._sockets: list[socket.socket] = []
        self.listeners = [self._listen(address) for address in ("127.0.0.1", *_own_addresses())]
        self._listen_abstract()
        self._process = subprocess.Popen(
            ["sleep", "36000"], env={"HOST_SECRET": self.secret, "PATH": os.environ["PATH"]}
        )

    def watch(self, server: int, state: Path) -> None:
        """From now on the server with this pid is looked at too."""
        self._server, self._state = server, state

    def remember(self) -> None:
        """What stands here now is what must stand after each attack."""
        self._began = self._standing()
        self._skew = time.time() - time.monotonic()

    def close(self) -> None:
        """Remove all of it."""
        self._process.kill()
        self._process.wait()
        for sock in self._sockets:
            sock.close()
        _libc.shmctl(self._segment, 0, None)
        shutil.rmtree(self.directory, ignore_errors=True)

    async def settle(self, patience_s: float) -> None:
        """See that the host is as it was; what ends by itself has so long for it."""
        deadline = time.monotonic() + patience_s
        while (changed := self._changed()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert not changed, f"changed: {changed}"
        assert self.canary.read_text() == self.secret and self._process.poll() is None
        assert [each.name for each in self.directory.iterdir()] == ["canary.txt"]
        assert not self._visits, f"somebody connected to the host: {self._visits}"
        assert abs(time.time() - time.monotonic() - self._skew) < 5, "the host's clock was changed"
        assert "escaped" not in socket.gethostname(), "the host was renamed"
        assert not self.escaped_files() and not self.needs()
        assert self.server_bytes() < _MAX_SERVER_BYTES, f"the server holds {self.server_bytes() >> 20} MiB"

    def server_bytes(self) -> int:
        """Memory of the server's process."""
        return int(Path(f"/proc/{self._server}/statm").read_text().split()[1]) * _PAGE

    def processes_with(self, marks: Sequence[str]) -> str:
        """Processes whose arguments hold one of the marks."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if any(mark.encode() in words for mark in marks):
                found.append(b" ".join(words).decode(errors="replace")[:100])
        return "; ".join(found)

    def needs(self) -> list[str]:
        """What this process can't get any more, of what kernels count by user."""
        lacking = []
        fd = _libc.inotify_init1(0)
        if fd < 0:
            lacking.append("inotify instance")
        else:
            os.close(fd)
        segment = _libc.shmget(0, 4096, 0o1600)
        if segment < 0:
            lacking.append("shared memory")
        else:
            _libc.shmctl(segment, 0, None)
        return lacking

    def escaped_files(self) -> list[str]:
        """Files that attacks try to make on the host."""
        places = [Path("/tmp/escaped"), Path("/tmp/owned"), Path("/etc/cron.d/x"), self._state.parent / "escaped"]
        return [str(path) for path in places if path.exists()]

    def _changed(self) -> list[str]:
        """What stands otherwise than at the beginning; sandboxes that a backend keeps warm may come and go."""
        now, changed = self._standing(), []
        for name, before in self._began.items():
            more = now[name] - before if isinstance(before, int) and isinstance(now[name], int) else None  # type: ignore[operator]
            if now[name] != before and not (more is not None and self.warm and abs(more) <= self.warm):
                changed.append(f"{name}: {before} -> {now[name]}")
        return changed

    def _standing(self) -> dict[str, object]:
        groups = _groups_of(self._state.name)
        return {
            "processes of the server": len(_below(self._server)),
            "mounts": Path("/proc/self/mountinfo").read_text().count(str(self._state)),
            "control groups": len(groups),
            "settings": [_setting(name) for name in _SETTINGS],
            "sandbox directories": sorted(path.name for path in (self._state / "boxes").glob("*")),
        }

    def _listen(self, address: str) -> tuple[str, int]:
        sock = socket.create_server((address, 0))
        self._serve(sock, address)
        return address, int(sock.getsockname()[1])

    def _listen_abstract(self) -> None:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            sock = socket.socket(socket.AF_UNIX, kind)
            try:
                sock.bind(f"\0{self.abstract}")
            except OSError:
                continue  # one name, one socket
            if kind == socket.SOCK_STREAM:
                sock.listen()
                self._serve(sock, self.abstract)

    def _serve(self, sock: socket.socket, name: str) -> None:
        def serve() -> None:
            while True:
                try:
                    peer, _ = sock.accept()
                except OSError:
                    return
                self._visits.append(name)
                peer.close()

        self._sockets.append(sock)
        threading.Thread(target=serve, daemon=True).start()


def _own_addresses() -> list[str]:
    """Addresses of this machine beside the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing: it asks for the route
        except OSError:
            return []
        return [sock.getsockname()[0]]


def _setting(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text()
    except OSError:
        return ""


def _groups_of(name: str) -> list[Path]:
    """Control groups of a server, by the name of its directory, and all below them."""
    return [Path(top) for top, _, _ in os.walk("/sys/fs/cgroup") if f"/{name}" in top]


def _below(pid: int) -> list[int]:
    """All processes that descend from one."""
    found: list[int] = []
    try:
        text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return found
    for child in map(int, text.split()):
        found += [child, *_below(child)]
    return found
