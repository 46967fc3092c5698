"""Server side of the gVisor stage: start it, and request it to run commands and to end sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envd.backends.gvisor.stage import MAX_MESSAGE
from envd.backends.helper import send_to_helper, start_helper, wait_for_helper
from envd.errors import BackendUnavailable, EnvdError
from envd.sandbox.cgroups import remove_groups, sweep_groups

GROUPS_SUFFIX = "-gvisor"


@dataclass(frozen=True)
class Done:
    """Result of a command."""

    code: int
    said: str
    """End of the command's standard error."""


class Stage:
    """A running stage (`envd.backends.gvisor.stage`)."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, run_dir: Path, hello: dict[str, Any]
    ) -> None:
        self._process, self._control, self._run_dir = process, control, run_dir
        self.enforced, self.base = tuple[str, ...](hello["enforced"]), str(hello["base"])
        self._asks: dict[int, asyncio.Future[Done]] = {}
        self._count = 0
        self._gone: str | None = None
        self._over = asyncio.Event()
        self._shown: dict[Path, asyncio.Task[Done]] = {}
        asyncio.get_running_loop().add_reader(control, self._take)

    @classmethod
    async def start(cls, run_dir: Path) -> Stage:
        """Start a stage in its own directory, run_dir/gvisor. Raises BackendUnavailable with the stage's message."""
        if shutil.which("unshare") is None:
            raise BackendUnavailable("the gvisor backend needs the program `unshare`: install util-linux")
        sweep_groups()  # not in the stage, whose pid namespace hides which servers live
        own = run_dir / "gvisor"
        shutil.rmtree(own, ignore_errors=True)
        (own / "boxes").mkdir(parents=True)
        arguments = [str(own), _groups(run_dir)]
        process, control, hello = await start_helper(
            "the gvisor backend", "envd.backends.gvisor.stage", *arguments, prefix=_namespaces()
        )
        return cls(process, control, run_dir, json.loads(hello))

    @property
    def directory(self) -> Path:
        """Directory of the bundles and of runsc's state."""
        return self._run_dir / "gvisor"

    @property
    def groups(self) -> str:
        """Name of the parent control group of the sandboxes' groups."""
        return _groups(self._run_dir)

    async def run(
        self,
        box: str,
        argv: Sequence[str],
        descriptors: Sequence[int],
        limits: tuple[int, int, float] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> Done:
        """Run a command for a box; its descriptors become 0, 1, 3, and the processes that it starts belong to the box.

        limits: bytes, processes and cores of all these processes together. Raises EnvdError after timeout_s. A timeout
        or a cancellation does not stop the command: call `end` for the box then.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask({"do": "run", "box": box, "argv": argv, "limits": limits}, descriptors)
        except TimeoutError as error:
            raise EnvdError(f"runsc hangs: it did not end within {timeout_s:g} s") from error

    async def end(self, box: str) -> None:
        """Kill all processes of a box and wait until they have ended. Does nothing if the stage has ended."""
        if self._gone is None:
            await self._ask({"do": "end", "box": box}, ())

    async def show(self, directory: Path) -> str:
        """Make a host directory visible to gofers, read-only, and return its path for them. Raises EnvdError."""
        task = self._shown.get(directory)
        if task is None:
            task = self._shown[directory] = asyncio.create_task(self._ask({"do": "show", "path": str(directory)}, ()))
        done = await asyncio.shield(task)
        if done.code:
            self._shown.pop(directory, None)
            raise EnvdError(f"{directory} can't be shown to gVisor sandboxes: {done.said}")
        return done.said

    async def died(self) -> str:
        """Wait until the stage ends, and return the reason."""
        await self._over.wait()
        return self._gone or "the gvisor backend was stopped"

    async def stop(self) -> None:
        """End every sandbox and the stage, and remove their control groups and directory."""
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._fail("the gvisor backend was stopped")
        await wait_for_helper(self._process)
        await asyncio.to_thread(remove_groups, self.groups)
        await asyncio.to_thread(shutil.rmtree, self.directory, True)

    async def _ask(self, request: dict[str, Any], descriptors: Sequence[int]) -> Done:
        if self._gone is not None:
            raise EnvdError(self._gone)
        self._count += 1
        data = json.dumps({"id": self._count, **request}).encode()
        if len(data) > MAX_MESSAGE:
            raise EnvdError(
                f"a request of {len(data)} bytes to the gvisor backend's helper is larger than {MAX_MESSAGE}"
            )
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._asks[self._count] = future
        number = self._count
        try:
            try:
                await send_to_helper(self._control, data, descriptors)
            except OSError as error:
                raise EnvdError(f"the gvisor backend's helper process ended ({error}): restart envd") from error
            return await future
        finally:
            self._asks.pop(number, None)

    def _take(self) -> None:
        try:
            data = self._control.recv(MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
            self._fail("the gvisor stage was killed: restart envd; the kernel's log tells whether memory ran out")
            return
        answer = json.loads(data)
        future = self._asks.get(answer["id"])
        if future is not None and not future.done():
            future.set_result(Done(answer["code"], answer["said"]))

    def _fail(self, reason: str) -> None:
        self._gone = self._gone or reason
        for future in self._asks.values():
            if not future.done():
                future.set_exception(EnvdError(self._gone))
        self._over.set()


def _groups(run_dir: Path) -> str:
    return run_dir.name + GROUPS_SUFFIX


def _namespaces() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
