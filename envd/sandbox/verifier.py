"""Grade one final state in a fresh sandbox: apply the diff, restore test configuration, place hidden files, run tests.

    serve_verification: this process, as the supervisor's user, runs none of the agent's code
      prepare.Preparation   diff, configuration, hidden files
      fork -> runner        the tests, as the workspace's user without capabilities; reports over a pipe
      verdict               outcomes from the reports, and signs of tampering

The runner's exit code counts only if it is the agreed one. A test that did not report is missing, regardless of the
exit code.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from contracts.patterns import PathPatterns
from envd.sandbox import linux, wire
from envd.sandbox.origin import Origin
from envd.sandbox.place import Place
from envd.sandbox.prepare import Preparation
from envd.sandbox.proctree import kill_since, processor_ticks, reap
from envd.sandbox.runner import (
    cached_path,
    compiled_module,
    compiled_test,
    configured,
    pipe_sender,
    run_tests,
)
from envd.sandbox.verdict import Ending, Record, all_missing, observations, outcomes_and_tampering
from envd.tools import Output
from envd.types import VerifyResult

_LOG_BYTES = 8192
_LOOK, _LOOK_MS = os.WEXITED | os.WNOHANG | os.WNOWAIT, 5
"""waitid options and interval in milliseconds for polling a process without a process descriptor."""


def serve_verification(sock: socket.socket, place: Place, *, supervised: bool = False) -> None:
    """Answer readiness and verification requests until the peer closes the socket.

    supervised: this process has called `linux.become_supervisor`.
    """
    gc.disable()  # a collection would copy pages that are shared with the zygote
    while (frame := wire.receive(sock)) is not None:
        header, blob = frame
        if header["op"] == "init":
            os.environ.update(header["env"])
            wire.send(sock, {"ready": True})
            continue
        if header["op"] == "compile":
            sources, _ = wire.cut(blob, header["files"])
            make = compiled_test if header["rewritten"] else compiled_module
            made = {path: make(place.workspace, path, source) for path, source in sources.items()}
            wire.send(sock, {"codes": [[path, len(code)] for path, code in made.items()]}, b"".join(made.values()))
            continue
        diff, rest = blob[: header["diff_bytes"]], blob[header["diff_bytes"] :]
        files, rest = wire.cut(rest, header["hidden"])
        codes, rest = wire.cut(rest, header.get("compiled", ()))
        modules, _ = wire.cut(rest, header.get("modules", ()))
        result = verify(
            *(place, diff, files, header["tests"], float(header["timeout_s"]), supervised),
            artifacts=header.get("artifacts", ()),
            product=header.get("product", ()),
            configuration=configured(header.get("plugins", ()), header.get("ini", {})),
            codes=codes,
            modules=modules,
            idle_s=float(header.get("idle_s", 0)),
        )
        wire.send(sock, {"result": asdict(result)})


def verify(
    place: Place,
    diff: bytes,
    hidden: Mapping[str, bytes],
    tests: Sequence[str],
    timeout_s: float,
    supervised: bool = False,
    artifacts: Sequence[str] = (),
    product: Sequence[str] = (),
    configuration: Sequence[str] = (),
    codes: Mapping[str, bytes] = {},
    modules: Mapping[str, bytes] = {},
    idle_s: float = 0,
) -> VerifyResult:
    """Run the tests on the template with the diff applied; with `artifacts`, only with the changes to these paths.

    product: paths that solutions change; other files of the template that look like test helpers are restored.
    configuration: further options of pytest. codes, modules: byte code of hidden test files, and of modules of the
    template, by their paths. idle_s: as in `VerifyRequest`.
    """
    # Opened before anything is applied or run, so that a file put at its path later is not read.
    log = os.open(place.scratch / "log", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    declared = PathPatterns(artifacts) if artifacts else None
    preparation = Preparation(
        *(place.workspace, place.template, place.scratch), supervised=supervised, artifacts=declared, tests=tests
    )
    codes = {cached_path(path): code for path, code in codes.items()}
    problem = preparation.run(diff, hidden, product, codes, modules)
    if problem is not None:
        return VerifyResult(all_missing(tests), "apply_failed", problem)
    how = layout(place.template, hidden, tests, configuration)
    origin = Origin(place.workspace, place.template, {*hidden, *codes})
    runner = _Runner(place.workspace, tests, log, how, origin, supervised, preparation.changed)
    ending, records = runner.supervise(timeout_s, idle_s)
    outcomes, tampering = outcomes_and_tampering(tests, records, ending)
    said = _read_log(log, place.workspace)
    return VerifyResult(
        outcomes, ending.exit, said, tampering=(*tampering, *preparation.notes), observations=observations(records)
    )


@dataclass(frozen=True)
class Layout:
    """Options for running a task's tests, taken from the task and never from the diff."""

    src: bool
    conftests: bool
    configuration: tuple[str, ...] = ()


def layout(
    template: Path, hidden: Mapping[str, bytes], tests: Sequence[str], configuration: Sequence[str] = ()
) -> Layout:
    """Layout of a task: whether it has a `src` directory to import from, and conftest files above its tests.

    The conftest files are safe to read, since the diff's changes to them are undone.
    """
    folders = {folder for test in tests for folder in PurePosixPath(test.split("::", 1)[0]).parents}
    conftests = [str(folder / "conftest.py") for folder in sorted(folders)]
    return Layout(
        src=(template / "src").is_dir(),
        conftests=any(path in hidden or (template / path).is_file() for path in conftests),
        configuration=tuple(configuration),
    )


class _Runner:
    """Forks the child that runs the tests, and supervises it."""

    def __init__(
        self,
        root: Path,
        tests: Sequence[str],
        log: int,
        how: Layout,
        origin: Origin,
        supervised: bool,
        changed: Sequence[str],
    ) -> None:
        self._root, self._tests, self._log, self._how, self._origin = root, tests, log, how, origin
        self._supervised, self._changed = supervised, changed

    def supervise(self, timeout_s: float, idle_s: float) -> tuple[Ending, list[Record]]:
        """Run the tests until they end, only wait, or the deadline passes; then kill all processes that they left."""
        nonce, agreed = secrets.token_hex(16), 16 + secrets.randbelow(240)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        runner = os.fork()
        if runner == 0:
            self._become(write_end, nonce, agreed)
        os.close(write_end)
        os.set_blocking(read_end, False)
        data, in_time = _gather(runner, read_end, timeout_s, idle_s)
        status = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1]) if in_time else 0
        kill_since(os.getpid(), frozenset())
        reap()
        records = list(_believed(data, nonce))
        if not in_time:
            return Ending("timed_out", as_agreed=False), records
        ended = any(record[0] == "end" for record in records)
        return Ending("completed" if ended else "crashed", status == agreed, status), records

    def _become(self, write_end: int, nonce: str, agreed: int) -> None:
        """Run the tests in the forked child. Keeps only the log and the report pipe open. Never returns."""
        try:
            os.dup2(self._log, 1)
            os.dup2(self._log, 2)
            report = _random_descriptor()
            os.dup2(write_end, report, inheritable=False)
            os.closerange(3, report)
            os.closerange(report + 1, 1024)
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            if self._supervised:
                _leave_the_supervisor()
            linux.die_with_parent()  # not earlier: a change of user clears the setting
            gc.enable()
            gc.set_threshold(20_000, 20, 100)
            send = pipe_sender(report, nonce)
            how = self._how
            _hide_ourselves()
            run_tests(
                *(self._root, self._tests, send, self._origin),
                src=how.src,
                conftests=how.conftests,
                configuration=how.configuration,
                changed=self._changed,
            )
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            linux.leave(agreed)


def _random_descriptor() -> int:
    """Number for a descriptor that code under test can't guess, from 100 to 899 or below the limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 900 if limit == resource.RLIM_INFINITY else min(900, limit)
    least = min(100, most // 2)
    return least + secrets.randbelow(most - least)


def _hide_ourselves() -> None:
    """Remove the verifier's modules from sys.modules, so that code under test that imports them patches a copy."""
    for name in [name for name in sys.modules if name.startswith("envd.sandbox.")]:
        del sys.modules[name]


def _leave_the_supervisor() -> None:
    """Become the workspace's user irrevocably."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    linux.drop_capabilities()
    linux.hide_from_ptrace()


def _gather(runner: int, pipe: int, timeout_s: float, idle_s: float) -> tuple[bytes, bool]:
    """Read reports until the runner ends, the deadline passes, or its processes have used no processor time for
    `idle_s` seconds in total (0: no such limit). Returns (reports, ended in time).
    """
    ended = _process_descriptor(runner)
    poll = select.poll()
    if ended >= 0:
        poll.register(ended, select.POLLIN)
    poll.register(pipe, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    data = bytearray()
    looked, used, idle = time.monotonic(), 0, 0.0
    try:
        while True:
            now = time.monotonic()
            left = deadline - now
            if idle_s and now - looked >= 1:
                before, used = used, processor_ticks(os.getpid())
                idle += now - looked if used == before else 0
                looked = now
            if left <= 0 or 0 < idle_s < idle:
                return bytes(data), False
            left = min(left, 1) if idle_s else left
            events = {fd for fd, _ in poll.poll(left * 1000 + 1 if ended >= 0 else _LOOK_MS)}
            if pipe in events and not _drain(pipe, data):
                poll.unregister(pipe)
            if ended in events or (ended < 0 and os.waitid(os.P_PID, runner, _LOOK) is not None):
                _drain(pipe, data)
                return bytes(data), True
    finally:
        if ended >= 0:
            os.close(ended)
        os.close(pipe)


def _process_descriptor(pid: int) -> int:
    """Open a descriptor that becomes readable when the process ends. Returns -1 if the kernel has none (gVisor)."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return -1


def _drain(pipe: int, data: bytearray) -> bool:
    """Read all available bytes of the pipe; drop those that exceed a frame. Returns False at the end of file."""
    while True:
        try:
            chunk = os.read(pipe, 65536)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        if len(data) < wire.MAX_BLOB:
            data += chunk


def _believed(data: bytes, nonce: str) -> list[Record]:
    records: list[Record] = []
    ours = f'["{nonce}"'.encode()
    for line in io.BytesIO(data):
        if not line.startswith(ours):
            continue  # do not spend time on parsing a flood of forged lines
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            said, *rest = json.loads(line)
            if said == nonce and len(rest) == 5 and all(isinstance(each, str) for each in rest):
                text = rest[4].encode(errors="replace").decode()  # lone surrogates can't be sent on
                records.append((rest[0], rest[1], rest[2], rest[3], text))
                if len(records) > 1 and records[-2][0] == "end":
                    break  # one record after the end proves the forgery
    return records


def _read_log(log: int, workspace: Path) -> str:
    output = Output(_LOG_BYTES)
    with os.fdopen(log, "rb") as file:
        file.seek(0)
        while chunk := file.read(65536):
            output.feed(chunk)
    return output.text().replace(str(workspace), "/workspace")
