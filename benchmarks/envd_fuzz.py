"""Malformed and hostile requests to every method of a real server, while a control sandbox of another client must stay
correct.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from pydantic import Field
from rich.console import Console
from rich.progress import Progress

from benchmarks.envd_attack import UNPARSED, break_connection, lying_guest, send
from benchmarks.envd_hostile import METHODS, Hostile, Known, hostile_request
from benchmarks.result import Options, Result
from contracts.owned import owned_directory
from contracts.rpc.connecting import MESSAGE_BYTES
from envd.client import Limits
from envd.errors import EnvdError
from envd.local import LocalEnvd
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.sandbox.proctree import descendants
from envd.types import ToolCall

_OF_GRPC = (UNPARSED, "ExecuteBatchError")
"""Parts of gRPC's own log lines about such bytes and about clients that have disconnected."""
_PATIENT = ("/Batch", "/Verify", "/Migrate")
"""Methods that queue requests, and whose deadlines are part of the request."""
_WARM = 500
_SOCKETS, _GUESTS = 0.03, 0.03
"""Shares of broken connections and of lying guests."""
_LIMITS = Limits(memory_mb=256, pids=64, lifetime_s=3600)


class FuzzOptions(Options):
    """Options of the `envd-fuzz` benchmark."""

    requests: int = Field(100_000, ge=1)
    """Number of requests to send."""
    at_once: int = Field(32, ge=1, le=512)
    """Number of attackers, each with one request at a time."""
    sandboxes: int = Field(8, ge=1, le=100)
    """Sandboxes that the attackers own and attack from outside."""
    backend: str = "namespaces"
    """Backend of the server."""
    seed: int = 0
    """Seed of the requests; timing decides which attacker sends which request."""


OPTIONS = FuzzOptions


def run(options: FuzzOptions) -> Result:
    """Attack a server started here and count the results."""
    with owned_directory("bench-fuzz-") as made, ExitStack() as stack:
        log = Path(made) / "server.log"
        with _standard_error(log):
            server = stack.enter_context(LocalEnvd(options.backend, log_level="error"))
        pid = next(pid for pid, parent in descendants(os.getpid()).items() if parent == os.getpid() and _serves(pid))
        fuzz = Fuzz(server.address, pid, options)
        asyncio.run(fuzz.run())
        fuzz.read_log(log)
        return fuzz.result(died=not server.alive)


class Fuzz:
    """Attackers, the control sandbox and the counts."""

    def __init__(self, address: str, pid: int, options: FuzzOptions) -> None:
        self._address, self._pid, self._options = address, pid, options
        self._sandboxes: list[ManagedSandbox] = []
        self._template = ""
        self.sent = self.answered = self.hung = self.checks = self.log_bytes = 0
        self.codes: Counter[str] = Counter()
        self.surprises: Counter[str] = Counter()
        self.failures: list[str] = []
        self._memory: list[int] = []
        self._begin = time.monotonic()

    async def run(self) -> None:
        """Send all requests, then check the server once more."""
        async with OperationsClient(self._address) as client, OperationsClient(self._address) as other:
            self._template = await client.put_template({"app.py": b"def add(a, b):\n    return a + b\n"})
            self._sandboxes = [
                await client.create(self._template, limits=_LIMITS) for _ in range(self._options.sandboxes)
            ]
            control = await other.create(self._template, limits=_LIMITS)
            over = asyncio.Event()
            watching = asyncio.ensure_future(self._control(control, over))
            with Progress(console=Console(stderr=True), transient=True) as progress:
                bar = progress.add_task("requests", total=self._options.requests)
                attackers = [self._attack(client, number, progress, bar) for number in range(self._options.at_once)]
                await asyncio.gather(*attackers)
            over.set()
            await watching
            with suppress(EnvdError):
                await control.close()
            await asyncio.sleep(2)
            self._memory.append(_resident(self._pid))

    def result(self, *, died: bool) -> Result:
        """Counts as a benchmark result."""
        warm, *later = self._memory or [0]
        metrics = {
            "requests": float(self.sent),
            "requests_missing": float(self._options.requests - self.answered),
            "unhandled_errors": float(self.surprises.total()),
            "server_deaths": float(died),
            "control_checks": float(self.checks),
            "control_failures": float(len(self.failures) + (self.checks == 0)),
            "requests_hung": float(self.hung),
            "server_growth_mb": ((later or [warm])[-1] - warm) / 2**20,
            "server_log_mb": self.log_bytes / 2**20,
            "server_peak_mb": max(self._memory, default=0) / 2**20,
            "seconds": time.monotonic() - self._begin,
        }
        rows = [{"answer": code, "requests": count} for code, count in self.codes.most_common()]
        notes = [f"{count} times: {words}" for words, count in self.surprises.most_common(10)]
        return Result(metrics, rows, [*notes, *self.failures[:5]])

    def read_log(self, log: Path) -> None:
        """Read unexpected exceptions from the server's log, including those that no reply reported."""
        self.log_bytes = log.stat().st_size
        plain = False
        with log.open(errors="replace") as lines:
            for line in lines:
                ends = line.startswith("{") if not plain else not line.startswith((" ", "Traceback"))
                plain = not ends and (plain or line.startswith("Traceback"))
                if (
                    ends
                    and ("Traceback" in line or not line.startswith("{"))
                    and not any(each in line for each in _OF_GRPC)
                ):
                    self.surprises[f"the server's log: {line[-500:].strip()}"] += 1

    async def _attack(self, client: OperationsClient, number: int, progress: Progress, bar: Any) -> None:
        chance = random.Random(self._options.seed * 1000 + number)
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", MESSAGE_BYTES)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            while self.sent < self._options.requests:
                self.sent += 1
                progress.update(bar, completed=self.sent)
                if self.sent == _WARM or self.sent % 2000 == 0:
                    self._memory.append(_resident(self._pid))
                way = chance.random()
                answered = True  # a broken connection and a lying guest get no answer
                if way < _SOCKETS:
                    await self._break_connection(chance)
                elif way < _SOCKETS + _GUESTS:
                    await self._lie(chance)
                else:
                    known = Known([each.handle for each in self._sandboxes], self._template)
                    answered = await self._send(client, channel, hostile_request(chance, known), chance)
                self.answered += answered
                if chance.random() < 0.05:
                    await self._replace(client, chance.randrange(len(self._sandboxes)))

    async def _send(
        self, client: OperationsClient, channel: grpc.aio.Channel, request: Hostile, chance: random.Random
    ) -> bool:
        """Send a request. Returns whether the server answered."""
        code, words = await send(channel, request, chance)
        self.codes[code] += 1
        if words:
            self.surprises[f"{request.path}: {words}"] += 1
        hung = (
            code == "DEADLINE_EXCEEDED"
            and not request.path.endswith(_PATIENT)
            and not await self._waits(client, request)
        )
        if hung:
            self.hung += 1
            self.surprises[f"{request.path} hung"] += 0
        return not hung and code != "UNAVAILABLE"

    async def _waits(self, client: OperationsClient, request: Hostile) -> bool:
        """Whether the request's sandbox was paused meanwhile: it then replies only after it resumes."""
        kind = message_factory.GetMessageClass(METHODS[request.path].input_type)
        identity = getattr(kind.FromString(request.messages[0]), "sandbox_id", "")
        return any(each.id == identity and each.state == "paused" for each in await client.list())

    async def _break_connection(self, chance: random.Random) -> None:
        """Send bytes that are no valid HTTP/2 and abort the connection."""
        self.codes["(broken connection)"] += 1
        await break_connection(self._address, chance)

    async def _lie(self, chance: random.Random) -> None:
        """Test the server's end of a sandbox's stream with random data from the sandbox."""
        self.codes["(lying guest)"] += 1
        try:
            await lying_guest(chance)
        except (EnvdError, OSError):
            return
        except Exception as error:  # noqa: BLE001 - the finding itself
            self.surprises[f"a lying guest: {error!r}"[:300]] += 1

    async def _replace(self, client: OperationsClient, number: int) -> None:
        """Replace a sandbox that has ended or no longer runs."""
        old = self._sandboxes[number]
        try:
            if (await old.status()).state == "running":
                return
            await old.close()
        except EnvdError:
            pass
        with suppress(EnvdError):
            self._sandboxes[number] = await client.create(self._template, limits=_LIMITS)

    async def _control(self, sandbox: ManagedSandbox, over: asyncio.Event) -> None:
        """Check the control sandbox until all requests are sent, and once more after that."""
        while True:
            last = over.is_set()
            try:
                await self._check(sandbox)
            except (EnvdError, AssertionError) as error:
                self.failures.append(f"the control sandbox: {error!r}"[:300])
            self.checks += 1
            if last:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.2)

    async def _check(self, sandbox: ManagedSandbox) -> None:
        content = f"number {self.checks}\n"
        await sandbox.files.write("control.txt", content.encode())
        said = await sandbox.call(
            ToolCall("exec", {"command": "cat control.txt; python3 -c 'import app; print(app.add(2, 3))'"})
        )
        assert said.text == f"{content}5\nexit 0", said.text
        assert await sandbox.files.read("control.txt") == content.encode()


@contextmanager
def _standard_error(file: Path) -> Iterator[None]:
    """Redirect standard error of children that are started within the block to a file."""
    kept = os.dup(2)
    try:
        with file.open("wb") as target:
            os.dup2(target.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _resident(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _serves(pid: int) -> bool:
    with suppress(OSError):
        return b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False
