"""The process that runs a virtual machine (a VMM): started with as little as it needs, watched, and ended with its
server.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from envd.errors import BackendUnavailable
from envd.sandbox.linux import sandbox_owner

_TAIL = 4096
"""Bytes kept of what a VMM says on its standard error."""
_ENTER = (
    "sh",
    "-c",
    'left=$1; shift; while [ "$left" -gt 0 ]; do echo 0 >"$1" || exit 1; shift; left=$((left - 1)); done; exec "$@"',
    "sh",
)
_TICKS = os.sysconf("SC_CLK_TCK")


def confined(command: Sequence[str], device: Path | None = None) -> list[str]:
    """A command line that runs `command` as the sandboxes' user, without network or new privileges, and that dies with
    its parent.

    device: what it opens through its group, as /dev/kvm is given to users.
    """
    for program in ("setpriv", "unshare"):
        if shutil.which(program) is None:
            raise BackendUnavailable(
                f"virtual machines are started through {program}: install Debian's package util-linux"
            )
    limits = ["setpriv", "--no-new-privs", "--pdeathsig", "KILL"]
    if os.geteuid() != 0:
        return [*limits, *command]
    owner = str(sandbox_owner())
    apart = ["unshare", "--net", "--ipc", "--"]
    groups = ["--clear-groups"] if device is None else ["--groups", str(device.stat().st_gid)]
    return [*apart, *limits, "--reuid", owner, "--regid", owner, *groups, "--bounding-set=-all", *command]


class VmmProcess:
    """One VMM. Its standard error is kept, bounded; its end is told by `ended`."""

    def __init__(
        self,
        command: Sequence[str],
        pass_fds: Sequence[int] = (),
        *,
        directory: Path | None = None,
        groups: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        mute: bool = False,
    ) -> None:
        """Start it. Call on the event loop's own thread: it dies when the thread that started it does.

        groups: of `Cgroups.entrance_files`; it enters them first, so that its limits hold from its first instruction
        on. environment: None for the server's. mute: its standard output, which a guest's console may flood, goes
        nowhere.
        """
        self._loop = asyncio.get_running_loop()
        self._said = b""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._words, writing = os.pipe()
        os.set_blocking(self._words, False)
        try:
            self._process = subprocess.Popen(
                [*_ENTER, str(len(groups)), *map(str, groups), *command] if groups else list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if mute else writing,
                stderr=writing,
                pass_fds=tuple(pass_fds),
                cwd=directory,
                env=environment,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._words)
            raise
        finally:
            os.close(writing)
        self._handle = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._handle, self._on_end)
        self._loop.add_reader(self._words, self._on_words)

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    @property
    def said(self) -> str:
        """The end of what it said, on one line."""
        return " ".join(self._said.decode(errors="replace").split())

    def kill(self) -> None:
        """End it; `ended` tells when it has."""
        if not self.ended.done():
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until it has ended."""
        await asyncio.shield(self.ended)

    def usage(self) -> tuple[int, float]:
        """(bytes of memory of its own, seconds of processor time) of it and all that it started; zeros once it has
        ended.
        """
        memory, cpu_s = 0, 0.0
        pids = [self.pid]
        for pid in pids:
            try:
                about = Path(f"/proc/{pid}/status").read_text()
                ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                pids += [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            except OSError:
                continue
            # its own pages only: what it maps of a base machine's memory is shared
            memory += sum(int(line.split()[1]) for line in about.splitlines() if line.startswith("RssAnon:"))
            cpu_s += sum(int(each) for each in ticks) / _TICKS
        return memory * 1024, cpu_s

    def _on_words(self) -> None:
        try:
            said = os.read(self._words, 65536)
        except BlockingIOError:
            return
        if said:
            self._said = (self._said + said)[-_TAIL:]
        else:
            self._loop.remove_reader(self._words)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._handle)
        self._on_words()
        self._loop.remove_reader(self._words)
        self._process.wait()
        os.close(self._handle)
        os.close(self._words)
        if not self.ended.done():
            self.ended.set_result(None)
