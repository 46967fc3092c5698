"""Create and destroy sandboxes while clients, the spawner and the server are killed at random; nothing may be left
over.

The seed determines the victim of each kill and the number of sandboxes before it. After a kill of the server or its
spawner, the server is started again on the same directory; only until it serves may sandboxes be lost. This process
adopts orphans, so that processes without a parent are counted, too.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.progress import Progress

from benchmarks.envd_leftovers import Leftovers, adopt_orphans, descriptors, keep, look, settled
from benchmarks.envd_soak_client import LIFETIME_S
from benchmarks.envd_soak_reports import Reports
from benchmarks.result import Options, Result
from contracts.owned import owned_directory
from envd.errors import EnvdError
from envd.operations.client import OperationsClient
from envd.sandbox.cgroups import OWNED
from envd.sandbox.proctree import descendants

_START_S = 60.0
_STALLED_S = 120.0
_PATIENCE_S = 60.0
"""Seconds to wait beyond a lifetime, for a busy machine."""
_VICTIMS = ("client", "client", "spawner", "server")


class SoakOptions(Options):
    """Options of the `envd-soak` benchmark."""

    count: int = Field(20_000, ge=20)
    """Number of sandboxes to create and destroy."""
    clients: int = Field(2, ge=1, le=64)
    """Number of client processes."""
    every: int = Field(400, ge=10)
    """Average number of sandboxes between two kills."""
    pool: int = Field(4, ge=0)
    """Size of the server's pool."""
    seed: int = 0
    """Seed of the kills."""


OPTIONS = SoakOptions


def run(options: SoakOptions) -> Result:
    """Run the soak and count leftovers."""
    adopt_orphans()
    with owned_directory(OWNED) as made:
        folder = Path(made)
        before = look(folder, set())
        soak = _Soak(options, folder)
        try:
            soak.run()
            soak.quiet()
        finally:
            soak.stop()
        left = settled(folder, soak.pids, before)
    return soak.result(left)


class _Soak:
    """Server and clients, with the observations."""

    def __init__(self, options: SoakOptions, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._state = folder / "s"
        self._address = f"unix:{folder}/sock"
        self._environment = {
            **os.environ,
            "TMPDIR": str(folder),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        self._chance = random.Random(options.seed)
        self._server: subprocess.Popen[bytes] | None = None
        self._clients: list[subprocess.Popen[str]] = []
        self._client_number = 0
        self.pids: set[int] = set()
        self.reports = Reports()
        self.said = self.reports.said
        self.kills: Counter[str] = Counter()
        self.failed_restarts = self.sandboxes_left = self.descriptors_left = self.planned_kills = 0
        self._held_before = 0
        self._limits: frozenset[str] = frozenset()
        """Limits that the first server enforced."""
        self._begin = time.monotonic()

    def run(self) -> None:
        """Run until the requested number of sandboxes was created."""
        count = self._options.count
        self._start_server()
        plan = self._plan()
        self.planned_kills = len(plan)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("sandboxes", total=count)
            seen, changed = 0, time.monotonic()
            while (plan or self.said["done"] < count) and time.monotonic() - changed < _STALLED_S:
                self._keep_running()
                done = self.said["done"]
                if plan and done >= plan[0][0] and self._kill(plan[0][1]):
                    del plan[0]
                if done != seen:
                    seen, changed = done, time.monotonic()
                    progress.update(bar, completed=done)
                time.sleep(0.02)

    def quiet(self) -> None:
        """End the clients; their remaining sandboxes end with their lifetime. Then only the pool may remain."""
        for client in self._clients:
            _end(client)
        self._clients = []
        self._keep_serving()
        deadline = time.monotonic() + LIFETIME_S + _PATIENCE_S
        while (live := self._live()) and time.monotonic() < deadline:
            time.sleep(0.5)
        self.sandboxes_left = live
        while (more := self._held() - self._held_before) > 0 and time.monotonic() < deadline:
            time.sleep(0.5)
        self.descriptors_left = max(0, more)

    def stop(self) -> None:
        """End all remaining processes."""
        for client in self._clients:
            _end(client)
        if self._server is not None and self._server.poll() is None:
            self._server.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(30)
            _end(self._server)

    def result(self, left: Leftovers) -> Result:
        """Counts as a benchmark result."""
        kills = sum(self.kills.values())
        kinds: Mapping[str, frozenset[int] | frozenset[str]] = {
            "processes": left.processes,
            "mounts": left.mounts,
            "cgroups": left.cgroups,
            "files": left.files,
        }
        metrics = {
            "sandboxes": float(self.said["done"]),
            "sandboxes_missing": float(max(0, self._options.count - self.said["done"])),
            "sandboxes_lost_to_kills": float(self.said["lost"]),
            "wrong_answers": float(self.said["wrong"]),
            **{f"kills_of_{victim}": float(self.kills[victim]) for victim in dict.fromkeys(_VICTIMS)},
            "kills_missing": float(self.planned_kills - kills),
            "failed_restarts": float(self.failed_restarts),
            "sandboxes_left": float(self.sandboxes_left),
            "descriptors_left": float(self.descriptors_left),
            **{f"{kind}_left": float(len(found)) for kind, found in kinds.items()},
            "seconds": time.monotonic() - self._begin,
        }
        notes = [f"{kind} left: {', '.join(sorted(map(str, found))[:5])}" for kind, found in kinds.items() if found]
        return Result(metrics, notes=[*notes, *self.reports.wrong[:5]])

    def _plan(self) -> list[tuple[int, str]]:
        """Pairs (number of sandboxes before the kill, victim): all before the end, each kind at least once if
        possible.
        """
        number = max(len(set(_VICTIMS)), self._options.count // self._options.every)
        moments = sorted(self._chance.sample(range(1, max(number + 1, int(self._options.count * 0.95))), number))
        victims = [*dict.fromkeys(_VICTIMS), *(self._chance.choice(_VICTIMS) for _ in range(number))][:number]
        self._chance.shuffle(victims)
        return list(zip(moments, victims, strict=True))

    def _keep_serving(self) -> None:
        if self._server is None or self._server.poll() is not None:
            if self._server is not None and not self.reports.killed:
                self.reports.fault(f"a server ended by itself with code {self._server.returncode}")
            self._start_server()

    def _keep_running(self) -> None:
        self._keep_serving()
        self._clients = [each for each in self._clients if each.poll() is None]
        while len(self._clients) < self._options.clients:
            self._start_client()

    def _kill(self, victim: str) -> bool:
        """Kill the victim. Returns False if there is none now."""
        assert self._server is not None
        if victim == "client":
            target = self._chance.choice(self._clients).pid
        elif victim == "server":
            target = self._server.pid
        else:
            found = _spawners(self._server.pid)
            if not found:
                return False
            target = found[0]
        if victim != "client":
            self.reports.kill()
        os.kill(target, signal.SIGKILL)
        self.kills[victim] += 1
        if victim == "spawner":
            with suppress(subprocess.TimeoutExpired):  # the server ends by itself
                self._server.wait(30)
        return True

    def _start_server(self) -> None:
        (self._folder / "sock").unlink(missing_ok=True)
        command = [sys.executable, "-m", "envd", "serve", "--listen", self._address, "--backend", "namespaces"]
        command += ["--state-dir", str(self._state), "--pool", str(self._options.pool), "--log-level", "error"]
        self._server = subprocess.Popen([*command, "--with-parent", str(os.getpid())], env=self._environment)
        keep(self._server.pid)
        self.pids.add(self._server.pid)
        try:
            limits = asyncio.run(_first_sandbox(self._address))
        except (EnvdError, TimeoutError) as error:
            self._failed(f"a server did not restart: {error!r}")
            return
        self._limits = self._limits or limits
        if limits != self._limits:
            self._failed(f"a restarted server limits {sorted(limits)}, the first limited {sorted(self._limits)}")
            return
        self.reports.serve()
        deadline = time.monotonic() + 5  # the pool fills
        self._held_before = held = 0
        while time.monotonic() < deadline and (held != self._held_before or not held):
            held, self._held_before = self._held_before, self._held()
            time.sleep(0.3)

    def _failed(self, why: str) -> None:
        assert self._server is not None
        self.failed_restarts += 1
        self.reports.wrong.append(why[:300])
        _end(self._server)

    def _live(self) -> int:
        """Number of sandboxes; 1 if the server does not answer."""
        try:
            return asyncio.run(_live(self._address))
        except EnvdError:
            self._keep_serving()
            return 1

    def _held(self) -> int:
        """Number of descriptors of the server and its spawner."""
        assert self._server is not None
        return descriptors({self._server.pid, *_spawners(self._server.pid)})

    def _start_client(self) -> None:
        self._client_number += 1
        seed = self._options.seed * 10_000 + self._client_number
        command = [sys.executable, "-m", "benchmarks.envd_soak_client", self._address, str(seed)]
        client = subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        keep(client.pid)
        self._clients.append(client)
        threading.Thread(target=self.reports.listen, args=(client,), daemon=True).start()


async def _first_sandbox(address: str) -> frozenset[str]:
    """Create and destroy a sandbox. Returns the limits that the server enforces."""
    async with OperationsClient(address) as client, asyncio.timeout(_START_S):
        template = await client.put_template({"app.py": b"x = 1\n"})
        await (await client.create(template)).close()
        return frozenset((await client.info()).limits_enforced)


async def _live(address: str) -> int:
    async with OperationsClient(address) as client:
        return (await client.info()).live


def _spawners(server: int) -> list[int]:
    """Processes that start the server's sandboxes."""
    found = []
    for pid, parent in descendants(server).items():
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if parent == server and b"spawn" in command:
                found.append(pid)
    return found


def _end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
