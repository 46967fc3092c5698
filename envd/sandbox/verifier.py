"""Grades one final state in a fresh sandbox: diff applied, test configuration restored, hidden files placed, tests run.

This process supervises and runs nothing of the agent's; the tests run in a forked child that reports over a pipe.
Its exit code is not believed: a test that did not report is missing, whatever the child said last.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from envd.sandbox import linux, wire
from envd.sandbox.agent import Place
from envd.sandbox.diff import changed_paths
from envd.sandbox.patch import NotPlain, apply_plain
from envd.sandbox.proctree import kill_since, reap
from envd.sandbox.runner import base_name, pipe_sender, run_tests
from envd.tools import Output
from envd.tools.paths import make_parents, open_in_root
from envd.types import TestOutcome, TestStatus, VerifyExit, VerifyResult

_CONFIGURATION = frozenset(
    {
        "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
        "pyproject.toml", "sitecustomize.py", "usercustomize.py",
    }
)  # fmt: skip
_LOG_BYTES = 8192
_MACHINE_FAULTS = frozenset({errno.ENOMEM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN})
"""What a final state does not cause by itself: to be tried again. Every other failure to set it up is its own."""
Record = tuple[str, str, str, str, str]


def serve_verification(sock: socket.socket, place: Place) -> None:
    """Answer readiness, then one verification."""
    gc.disable()  # a collection would only copy pages that are shared with the zygote
    while (frame := wire.receive(sock)) is not None:
        header, blob = frame
        if header["op"] == "init":
            os.environ.update(header["env"])
            wire.send(sock, {"ready": True})
            continue
        files, start = {}, header["diff_bytes"]
        for path, size in header["hidden"]:
            files[path] = blob[start : start + size]
            start += size
        result = verify(place, blob[: header["diff_bytes"]], files, header["tests"], float(header["timeout_s"]))
        wire.send(sock, {"result": asdict(result)})


def verify(
    place: Place, diff: bytes, hidden: Mapping[str, bytes], tests: Sequence[str], timeout_s: float
) -> VerifyResult:
    """Run the tests on the template with the diff applied."""
    # held open from before anything is applied or run: whatever stands at its path later is not read
    log = os.open(place.scratch / "log", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    problem = _prepare(place, diff, hidden)
    if problem is not None:
        return VerifyResult(_all_missing(tests), "apply_failed", problem)
    ended, records = _supervise(place, tests, log, timeout_s, layout(place.template, hidden, tests))
    return VerifyResult(outcomes(tests, records), ended, _read_log(log, place.workspace))


@dataclass(frozen=True)
class Layout:
    """What the task itself, never the diff, says about how its tests are run."""

    src: bool
    conftests: bool


def layout(template: Path, hidden: Mapping[str, bytes], tests: Sequence[str]) -> Layout:
    """A task with a `src` directory is imported from there too; its conftest files above a test are read, since the diff's are undone."""
    folders = {folder for test in tests for folder in PurePosixPath(test.split("::", 1)[0]).parents}
    conftests = [str(folder / "conftest.py") for folder in sorted(folders)]
    return Layout(
        src=(template / "src").is_dir(),
        conftests=any(path in hidden or (template / path).is_file() for path in conftests),
    )


def outcomes(tests: Sequence[str], records: Sequence[Record]) -> tuple[TestOutcome, ...]:
    """Each requested test's outcome from what was reported. A test passes only if all it stands for ran and passed."""
    phases: dict[str, dict[str, tuple[str, str]]] = {}
    twice: set[str] = set()
    files: dict[str, tuple[str, str]] = {}
    for kind, name, phase, status, message in records:
        if kind == "collect":
            files[name] = (status, message)
        elif kind == "test":
            reported = phases.setdefault(name, {})
            if phase in reported:
                twice.add(name)
            reported[phase] = (status, message)
    answer = []
    for test in tests:
        members = [name for name in sorted(phases) if test in (name, base_name(name))]
        found = [_one_test(phases[name], name in twice) for name in members]
        status, message = _worst(found) if found else _not_run(test, files)
        answer.append(TestOutcome(test, status, message))
    return tuple(answer)


def _one_test(reported: Mapping[str, tuple[str, str]], twice: bool) -> tuple[TestStatus, str]:
    if twice:
        return "error", "reported twice"
    for phase in ("setup", "call", "teardown"):
        if phase not in reported:
            return "missing", f"no report of its {phase}"
        status, message = reported[phase]
        if status == "skipped":
            return "skipped", message
        if status != "passed":
            return ("failed" if phase == "call" else "error"), message
    return "passed", ""


_SEVERITY: tuple[TestStatus, ...] = ("passed", "skipped", "missing", "error", "failed")


def _worst(found: Sequence[tuple[TestStatus, str]]) -> tuple[TestStatus, str]:
    return max(found, key=lambda outcome: _SEVERITY.index(outcome[0]))


def _not_run(test: str, files: Mapping[str, tuple[str, str]]) -> tuple[TestStatus, str]:
    for name, (status, message) in sorted(files.items()):
        if test == name or test.startswith(name + "::"):
            return ("skipped" if status == "skipped" else "error"), message
    return "missing", "not collected or never reported"


def _all_missing(tests: Sequence[str]) -> tuple[TestOutcome, ...]:
    return tuple(TestOutcome(test, "missing", "not run") for test in tests)


def _prepare(place: Place, diff: bytes, hidden: Mapping[str, bytes]) -> str | None:
    """Set the final state up for the tests; the reason when it can't be."""
    try:
        problem = _apply(place, diff)
        if problem is None:
            _restore_configuration(place)
            for path, content in sorted(hidden.items()):
                _place_file(place.workspace, path, content)
    except OSError as error:
        if error.errno in _MACHINE_FAULTS:
            raise
        return f"the final state leaves no place for the hidden tests: {error.strerror}"
    return problem


def _apply(place: Place, diff: bytes) -> str | None:
    """Apply a git patch to the workspace; the reason when git refuses."""
    if not diff.strip():
        return None
    with contextlib.suppress(NotPlain):
        apply_plain(place.workspace, diff)
        return None
    patch, errors = place.scratch / "patch", place.scratch / "errors"
    patch.write_bytes(diff)
    actions = [
        (os.POSIX_SPAWN_OPEN, 2, str(errors), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
    ]
    command = ["git", "apply", "--whitespace=nowarn", str(patch)]
    pid = os.posix_spawnp("git", command, os.environ, file_actions=actions)
    _, status = os.waitpid(pid, 0)
    if status == 0:
        return None
    return errors.read_text(errors="replace").replace(str(patch), "the diff")[:2000]


def _restore_configuration(place: Place) -> None:
    """Undo what the diff did to files that steer Python or pytest."""
    for path in changed_paths(place.template, place.workspace):
        if Path(path).name in _CONFIGURATION or path.endswith(".pth"):
            target, original = place.workspace / path, place.template / path
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                target.unlink()
            if original.exists() and not original.is_symlink():
                _place_file(place.workspace, path, original.read_bytes())


def _place_file(root: Path, path: str, content: bytes) -> None:
    """Write a file, replacing whatever stands in its way: a link, a directory, or a file where a parent must be."""
    target = root / path
    for part in [*reversed(target.relative_to(root).parents), Path(path)][1:]:
        here = root / part
        if here.is_symlink() or (here.is_file() and here != target):
            here.unlink()
    if target.is_dir():
        shutil.rmtree(target)
    make_parents(root, path)
    target.unlink(missing_ok=True)
    fd = open_in_root(root, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def _supervise(
    place: Place, tests: Sequence[str], log: int, timeout_s: float, layout: Layout
) -> tuple[VerifyExit, list[Record]]:
    nonce = secrets.token_hex(16)
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    runner = os.fork()
    if runner == 0:
        _become_runner(place, tests, log, write_end, nonce, layout)
    os.close(write_end)
    os.set_blocking(read_end, False)
    data, in_time = _gather(runner, read_end, timeout_s)
    kill_since(os.getpid(), frozenset())
    reap()
    records = list(_believed(data, nonce))
    if not in_time:
        return "timed_out", records
    return ("completed" if any(record[0] == "end" for record in records) else "crashed"), records


def _become_runner(place: Place, tests: Sequence[str], log: int, write_end: int, nonce: str, layout: Layout) -> None:
    """The forked child: nothing but the report pipe is open in it, and it never returns."""
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        report = 100 + secrets.randbelow(800)
        os.dup2(write_end, report, inheritable=False)
        os.closerange(3, report)
        os.closerange(report + 1, 1024)
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        linux.die_with_parent()
        gc.enable()
        gc.set_threshold(20_000, 20, 100)
        send = pipe_sender(report, nonce)
        run_tests(place.workspace, tests, send, src=layout.src, conftests=layout.conftests)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        linux.leave(0)


def _gather(runner: int, pipe: int, timeout_s: float) -> tuple[bytes, bool]:
    """Read reports until the runner ends or the deadline passes: (reports, ended in time)."""
    ended = os.pidfd_open(runner)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(pipe, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    data = bytearray()
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(data), False
            events = {fd for fd, _ in poll.poll(left * 1000 + 1)}
            if pipe in events and not _drain(pipe, data):
                poll.unregister(pipe)
            if ended in events:
                _drain(pipe, data)
                return bytes(data), True
    finally:
        os.close(ended)
        os.close(pipe)


def _drain(pipe: int, data: bytearray) -> bool:
    """Read all that is there; False at the end of file. What exceeds a frame is dropped."""
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
            continue  # a flood must not take the time that parsing it would
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            said, *rest = json.loads(line)
            if said == nonce and len(rest) == 5 and all(isinstance(each, str) for each in rest):
                text = rest[4].encode(errors="replace").decode()  # lone surrogates can't be sent on
                records.append((rest[0], rest[1], rest[2], rest[3], text))
                if rest[0] == "end":
                    break
    return records


def _read_log(log: int, workspace: Path) -> str:
    output = Output(_LOG_BYTES)
    with os.fdopen(log, "rb") as file:
        file.seek(0)
        while chunk := file.read(65536):
            output.feed(chunk)
    return output.text().replace(str(workspace), "/workspace")
