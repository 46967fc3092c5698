"""Process that runs a virtual machine (VMM): started with minimal privileges, watched, and killed with its server."""

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
"""Number of bytes kept of a VMM's standard error."""
_ENTER = (
    "sh",
    "-c",
    'left=$1; shift; while [ "$left" -gt 0 ]; do echo 0 >"$1" || exit 1; shift; left=$((left - 1)); done; exec "$@"',
    "sh",
)
_TICKS = os.sysconf("SC_CLK_TCK")


def confined(command: Sequence[str], device: Path | None = None) -> list[str]:
    """Command line that runs `command` as the sandboxes' user without network or new privileges, and dies with its
    parent.

    device: a device, such as /dev/kvm, that the command opens by membership in the device's group. Raises
    BackendUnavailable.
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
    """One VMM. Keeps a bounded end of its standard error; the future `ended` is done when it has ended."""

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
        """Start the VMM. Call on the event loop's thread, since the VMM dies with the thread that starts it.

        groups: from `Cgroups.entrance_files`. The VMM enters them before its first instruction, so that their limits
        always hold. environment: None for the server's. mute: discard its standard output, which a guest's console may
        flood.
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
        """Pid of the VMM."""
        return self._process.pid

    @property
    def said(self) -> str:
        """End of its output, on one line."""
        return " ".join(self._said.decode(errors="replace").split())

    def kill(self) -> None:
        """Kill the VMM; `ended` is done when it has ended."""
        if not self.ended.done():
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until the VMM has ended."""
        await asyncio.shield(self.ended)

    def usage(self) -> tuple[int, float]:
        """(bytes of private memory, seconds of processor time) of the VMM and its descendants; zeros after its end."""
        memory, cpu_s = 0, 0.0
        pids = [self.pid]
        for pid in pids:
            try:
                about = Path(f"/proc/{pid}/status").read_text()
                ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                pids += [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            except OSError:
                continue
            # Private pages only: pages of a base machine's memory are shared.
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
