"""Program that runs in a sandbox beside a repository's code: collects its tests once and runs them in forks.

    python inside.py SPEC RESULT

SPEC is JSON (`curation.tasks.factory.guest` writes it); RESULT gets one line, base64 of compressed JSON. It imports
nothing of ours, since the sandbox has none of it.

    pytest_collection: candidates that change how a module is imported, each in a fork before the import
    pytest_runtestloop: "runs": groups of tests in a fork, "alone": a fork for each test,
                        "candidates": a fork for each candidate, with the code of its function replaced
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gc
import inspect
import itertools
import json
import os
import random
import re
import resource
import select
import signal
import sys
import time
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path("/workspace")
OUT, CODE = Path("/tmp/.triplane-out"), Path("/tmp/.triplane-code")
MOST_WAITING = 24
"""Forks that may wait beside those that run. Each may hold _MEMORY, of which a waiting one uses little."""
_LOOK_S = 0.25
MOST_DEATHS = 25
"""Tests that may kill their process before a run is given up."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+(?=\.\.\.)|0x[0-9a-fA-F]{6,}|\.\.\.(0?x)?[0-9a-fA-F]+(?=>)")
"""Memory addresses in a repr, which pytest may have truncated at either end."""
_MESSAGE = 400
_MEMORY = 384 << 20
"""Bytes that a fork may allocate beyond its parent's, so that a runaway candidate does not end the sandbox."""


class Plugin:
    """Collects like pytest, then runs what the specification names in forks."""

    def __init__(self, spec: dict[str, Any], coverage: Any) -> None:
        self.spec, self.coverage = spec, coverage
        self.result: dict[str, Any] = {"collect": {}, "tests": [], "runs": {}, "candidates": {}}
        self.sink: Callable[[str, str], None] = lambda status, message: None
        self.direct: dict[str, Callable[[], Any]] = {}
        """See `_direct_calls`."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Screen candidates that need a fresh import, before anything of the repository is imported."""
        session.config.option.tbstyle = "line"  # only the message is wanted, and tracebacks take time
        cold = [each for each in self.spec.get("candidates", ()) if not each["hot"]]
        if len(cold) > 1:
            files = dict.fromkeys(name.split("::", 1)[0] for each in cold for name in each["tests"])
            keeping = iter([("", functools.partial(_keep_code, session, list(files)))])
            list(_in_forks(keeping, 1, self.spec["idle_s"]))
        jobs = ((each["id"], functools.partial(self._cold, session, each)) for each in cold)
        self._screen(jobs, {each["id"]: each for each in cold})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember why a file could not be collected."""
        if report.outcome != "passed":
            self.result["collect"][report.nodeid] = [report.outcome, _message(report)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run what the specification names."""
        self.items = {item.nodeid: item for item in session.items}
        self.result["tests"] = [[nodeid, *_place(item)] for nodeid, item in self.items.items()]
        gc.collect()
        gc.freeze()
        for run in self.spec.get("runs", ()):
            self.result["runs"][run["name"]] = self._run(run)
        hot = [each for each in self.spec.get("candidates", ()) if each["hot"]]
        if hot:
            self.direct = _direct_calls(session.config, self._covers(hot))
            live, loaded = _live_functions({str(ROOT / each["path"]) for each in hot}), _loaded_files()
            jobs = ((each["id"], functools.partial(self._hot, each, live, loaded)) for each in hot)
            self._screen(jobs, {each["id"]: each for each in hot})
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Pass the worst phase of the running test on."""
        if report.failed:
            self.sink("failed" if report.when == "call" else "error", _message(report))
        elif report.skipped:
            self.sink("skipped", "")

    def _run(self, run: dict[str, Any]) -> dict[str, Any]:
        """Outcomes of every test, in one process or each in its own. A test that ends its process is left out."""
        left_out = set(run.get("without", ()))
        names = [name for name in self.items if name not in left_out]
        if run.get("reverse"):
            names.reverse()  # each pair of tests runs in the other order
        groups = [[name] for name in names] if run.get("alone") else [names]
        outcomes: dict[str, Any] = {}
        lines: dict[str, Any] = {}
        with _load(run.get("load", 0)):
            while groups:
                again = []
                jobs = ((n, functools.partial(self._group, group, run)) for n, group in enumerate(groups))
                for number, ended, records in _in_forks(jobs, self.spec["workers"], self.spec["idle_s"]):
                    done = {record[1]: record[2:] for record in records if record[0] == "end"}
                    lines.update({record[1]: record[2] for record in records if record[0] == "lines"})
                    begun = [record[1] for record in records if record[0] == "start"]
                    culprit = next((name for name in reversed(begun) if name not in done), None)
                    if culprit is None:
                        problem = next((record[1] for record in records if record[0] == "problem"), "")
                        if problem:
                            raise RuntimeError(f"their run failed after the last of them: {problem}")
                        outcomes.update(done)
                        continue
                    outcomes[culprit] = [
                        "endless" if ended in ("wall", "cpu", "waiting") else "kills",
                        f"ended by {ended}",
                        0.0,
                    ]
                    left = [name for name in groups[number] if name not in outcomes]
                    if left:
                        again.append(left)
                deaths = sum(each[0] in ("endless", "kills") for each in outcomes.values())
                groups = again if deaths <= MOST_DEATHS else []
        return {"outcomes": outcomes, "lines": lines}

    def _group(self, names: Sequence[str], run: dict[str, Any], write: Callable[..., None]) -> None:
        """Run tests in the calling fork, each within its deadline."""
        cover = self.coverage if run.get("coverage") else None
        for number, name in enumerate(names):
            write("start", name)
            _deadline(self.spec["wall_s"], self.spec["cpu_s"])
            if cover is not None:
                cover.switch_context(name)
            began = time.perf_counter()
            status, message = self._one(name, names[number + 1] if number + 1 < len(names) else None)
            write("end", name, status, message, round(time.perf_counter() - began, 5))
            if cover is not None:
                cover.switch_context("")
        if cover is not None:
            _deadline(60, 60)
            resource.setrlimit(resource.RLIMIT_DATA, resource.getrlimit(resource.RLIMIT_DATA)[1:] * 2)
            cover.stop()
            _write_lines(cover.get_data(), write)

    def _one(self, name: str, following: str | None) -> tuple[str, str]:
        found = ["passed", ""]

        def sink(status: str, message: str) -> None:
            if found[0] in ("passed", "skipped"):
                found[:] = status, message

        self.sink = sink
        item = self.items[name]
        if (call := self.direct.get(name)) is not None:
            report = call()
            if report is not None:
                self.pytest_runtest_logreport(report)
            return found[0], found[1]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=self.items.get(following or ""))
        return found[0], found[1]

    def _screen(self, jobs: Iterator[tuple[Any, Callable[..., None]]], candidates: dict[str, Any]) -> None:
        for identity, ended, records in _in_forks(jobs, self.spec["workers"], self.spec["idle_s"], MOST_WAITING):
            failed = {record[1]: record[2:4] for record in records if record[0] == "end" and record[2] != "passed"}
            ran = sum(record[0] == "end" for record in records)
            problem = next((record[1] for record in records if record[0] == "problem"), "")
            if ended == "exit" and not problem and ran < len(candidates[identity]["tests"]):
                problem = "lost tests"
            self.result["candidates"][identity] = [ended, problem, ran, failed]

    def _hot(
        self, candidate: dict[str, Any], live: dict[Any, list[Any]], loaded: set[str], write: Callable[..., None]
    ) -> None:
        """Replace the code of a candidate's function where it is loaded, and run the tests that cover it."""
        changed, path = _overlay(candidate), str(ROOT / candidate["path"])
        if path in loaded:
            found = [
                each
                for each in live.get((path, candidate["qualname"]), ())
                if candidate["first"] <= each.__code__.co_firstlineno <= candidate["line"]
            ]
            if not found:
                return write("problem", "no live function")
            for function in found:
                code = _compiled(candidate, changed[path], function.__code__)
                if code.co_freevars != function.__code__.co_freevars:
                    return write("problem", "other closure")
                function.__code__ = code
        return self._covering(candidate, write)

    def _cold(self, session: pytest.Session, candidate: dict[str, Any], write: Callable[..., None]) -> None:
        """Import the changed module and run the tests that cover it."""
        if str(ROOT / candidate["path"]) in _loaded_files():
            return write("problem", "loaded by a conftest")
        _overlay(candidate)
        files = dict.fromkeys(name.split("::", 1)[0] for name in candidate["tests"])
        _deadline(candidate["wall_s"] + 20, candidate["cpu_s"] + 10)
        _collect(session, files)
        self.items = {item.nodeid: item for item in session.items}
        self.direct = _direct_calls(session.config, self._covers([candidate]))
        return self._covering(candidate, write)

    def _covers(self, candidates: Iterable[dict[str, Any]]) -> list[pytest.Item]:
        names = dict.fromkeys(name for each in candidates for name in each["tests"])
        return [self.items[name] for name in names if name in self.items]

    def _covering(self, candidate: dict[str, Any], write: Callable[..., None]) -> None:
        _deadline(candidate["wall_s"], candidate["cpu_s"])
        names = [name for name in candidate["tests"] if name in self.items]
        for name in candidate["tests"]:
            if name not in self.items:
                write("end", name, "missing", "it is not collected")
        others = [name for name in names if name not in self.direct]
        following = dict(itertools.pairwise(others))
        for name in names:
            write("end", name, *self._one(name, following.get(name)))


def _keep_code(session: pytest.Session, files: Iterable[str], write: Callable[..., None]) -> None:
    """Collect test files, and keep the byte code of all that they import for the forks to come."""
    _deadline(120, 60)
    sys.dont_write_bytecode = False
    _collect(session, files)


def _collect(session: pytest.Session, files: Iterable[str]) -> None:
    """Collect test files. What is imported is read from kept byte code, if there is any."""
    sys.pycache_prefix = str(CODE)
    try:
        session.perform_collect([str(ROOT / path) for path in files])
    finally:
        sys.pycache_prefix = None


_HOOKS = "runtest_protocol runtest_setup runtest_call runtest_teardown pyfunc_call fixture_setup runtest_makereport"
"""Hooks that pytest calls around a test, or in place of it."""


def _direct_calls(config: pytest.Config, items: Iterable[pytest.Item]) -> dict[str, Callable[[], Any]]:
    """Direct calls, by name, of the tests that behave the same without pytest's protocol, which takes longer than most
    tests: functions without fixtures, marks and hooks of plugins. A call returns a report if the test did not pass.
    """
    try:
        from _pytest.assertion import pytest_runtest_protocol as explain_assertions
        from _pytest.warnings import catch_warnings_for_item
    except ImportError:
        return {}
    for hook in _HOOKS.split():
        for each in getattr(config.pluginmanager.hook, f"pytest_{hook}").get_hookimpls():
            if not each.function.__module__.startswith("_pytest."):
                return {}

    def call(item: Any, arguments: dict[str, Any]) -> Any:
        os.environ["PYTEST_CURRENT_TEST"] = f"{item.nodeid} (call)"
        explaining = explain_assertions(item)
        next(explaining)
        with catch_warnings_for_item(config, item.ihook, "runtest", item):
            done = pytest.CallInfo.from_call(
                lambda: item.obj(**arguments), "call", (KeyboardInterrupt, pytest.exit.Exception)
            )
        with contextlib.suppress(StopIteration):
            explaining.send(None)
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        return None if done.excinfo is None else item.ihook.pytest_runtest_makereport(item=item, call=done)

    found: dict[str, Callable[[], Any]] = {}
    for item in items:
        arguments = _arguments(item)
        if arguments is not None:
            found[item.nodeid] = functools.partial(call, item, arguments)
    return found


def _arguments(item: Any) -> dict[str, Any] | None:
    """Arguments of a test whose only fixtures are its parameters, or None."""
    function = getattr(item, "obj", None)
    if type(item) is not pytest.Function or any(mark.name != "parametrize" for mark in item.iter_markers()):
        return None
    if any(
        kind(function)
        for kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    ):
        return None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for name in item.fixturenames:
        made = item._fixtureinfo.name2fixturedefs.get(name)
        if name not in parameters or not made or made[-1].func.__name__ != "get_direct_param_fixture_func":
            return None
    return {name: parameters[name] for name in item._fixtureinfo.argnames}


def _in_forks(
    jobs: Iterator[tuple[Any, Callable[..., None]]], workers: int, idle_s: float, waiting: int = 0
) -> Iterator[tuple[Any, str, list[list[Any]]]]:
    """Call every job in a fork, `workers` at once and beside these up to `waiting` that only wait, each ended when it
    has only waited for `idle_s`: in all, or without `waiting` at a stretch, since then it runs many tests. Yields (key,
    how the fork ended, what it wrote).
    """
    OUT.mkdir(exist_ok=True)
    running: dict[int, tuple[Any, Path, _Idle]] = {}
    killed: set[int] = set()
    jobs, number, looked = iter(jobs), 0, time.monotonic()
    while True:
        while (
            len(running) < workers + waiting
            and sum(not each.waits_s for _, _, each in running.values()) < workers
            and (job := next(jobs, None)) is not None
        ):
            number += 1
            path = OUT / str(number)
            pid = os.fork()
            if pid == 0:
                _child(job[1], path)
            running[pid] = (job[0], path, _Idle(pid))
        if not running:
            return
        ended = _one_ended(running)
        if time.monotonic() - looked >= _LOOK_S:
            looked = time.monotonic()
            for pid, (_, _, idle) in running.items():
                idle.look()
                if (idle.waited_s if waiting else idle.waits_s) > idle_s and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        if not ended:
            continue
        pid, status = os.waitpid(-1, 0)
        if pid not in running:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        key, path, _ = running.pop(pid)
        records = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
        path.unlink(missing_ok=True)
        yield key, "waiting" if pid in killed else _ended(status), records


class _Idle:
    """Tells how long a fork and its children have only waited, as in a deadlock. On a busy machine what computes is
    slow, but does not stand still for a second.
    """

    def __init__(self, session: int) -> None:
        self._session, self._used, self._since, self._before_s = session, 0, time.monotonic(), 0.0
        self.waits_s = 0.0
        """Seconds without any computing until the last look, from 1 second on."""

    @property
    def waited_s(self) -> float:
        """Seconds in such spans together."""
        return self._before_s + self.waits_s

    def look(self) -> None:
        """Look again."""
        used, now = _ticks(self._session), time.monotonic()
        if used != self._used:
            self._used, self._since, self._before_s = used, now, self.waited_s
        since = now - self._since
        self.waits_s = since if since >= 1 else 0.0


def _ticks(session: int) -> int:
    """Processor time of a session's processes and their ended children, in ticks of 10 ms."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += sum(map(int, fields[11:15]))
    return total


def _one_ended(pids: Iterable[int]) -> bool:
    """Wait up to _LOOK_S for one of these processes to end."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    try:
        return bool(poll.poll(1000 * _LOOK_S))
    finally:
        for each in descriptors:
            os.close(each)


def _child(job: Callable[..., None], path: Path) -> None:
    """Run one job in the fork. Never returns."""
    try:
        gc.disable()  # a collection would copy pages that are shared with the parent
        os.setsid()
        for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # not of the address space, of which every thread reserves much more than it uses
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        owner = os.getpid()

        def write(*record: Any) -> None:
            if os.getpid() == owner:
                os.write(out, json.dumps(record).encode() + b"\n")

        try:
            job(write)
        except BaseException as error:  # noqa: BLE001 - a test may raise anything, SystemExit included
            write("problem", f"{type(error).__name__}: {error}"[:_MESSAGE])
            os._exit(1)
        os._exit(0)
    finally:
        os._exit(2)


def _ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "exit"
    return {-signal.SIGALRM: "wall", -signal.SIGPROF: "cpu"}.get(code, f"status {code}")


def _deadline(wall_s: float, cpu_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


@contextlib.contextmanager
def _load(count: int) -> Iterator[None]:
    """Share one core with `count` processes that are busy."""
    cores, busy = os.sched_getaffinity(0), []
    if count:
        os.sched_setaffinity(0, {random.choice(sorted(cores))})
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            while True:
                sum(range(10_000))
        busy.append(pid)
    try:
        yield
    finally:
        for pid in busy:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.sched_setaffinity(0, cores)


def _loaded_files() -> set[str]:
    return {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}


def _live_functions(files: set[str]) -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    gc.unfreeze()
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename in files:
            found.setdefault((each.__code__.co_filename, each.__code__.co_qualname), []).append(each)
    gc.freeze()
    return found


def _changed(candidate: dict[str, Any]) -> dict[str, bytes]:
    """New contents of the files that a candidate changes."""
    files: dict[str, bytes] = {}
    for path, start, end, text in sorted(candidate["edits"], key=lambda edit: -edit[1]):
        data = files.get(path) or (ROOT / path).read_bytes()
        files[path] = data[:start] + text.encode() + data[end:]
    return files


def _overlay(candidate: dict[str, Any]) -> dict[str, bytes]:
    """Make later imports, and whoever reads sources by the loader, see the changed files. Returns these by path."""
    changed = {str(ROOT / path): data for path, data in _changed(candidate).items()}
    plain = SourceFileLoader.get_data

    compiled = {str(CODE) + path.removesuffix(".py") for path in changed}

    def get_data(self: SourceFileLoader, path: str) -> bytes:
        if path.startswith(f"{CODE}/") and path.rsplit(".", 2)[0] in compiled:
            raise FileNotFoundError(path)  # byte code of the unchanged file
        return changed[path] if path in changed else plain(self, path)

    setattr(SourceFileLoader, "get_data", get_data)  # noqa: B010 - a plain assignment has the wrong type
    return changed


def _compiled(candidate: dict[str, Any], file: bytes, old: types.CodeType) -> types.CodeType:
    """Code of the changed function in `file`, compiled alone but for the classes around it."""
    lines = file.split(b"\n", candidate["new_end"])
    text = b"\n".join(lines[candidate["line"] - 1 : candidate["new_end"]]).decode()
    *classes, name = candidate["qualname"].split(".")
    head = [" " * depth + f"class {each}:\n" for depth, each in enumerate(classes)]
    if not classes and text[:1].isspace():
        head = ["if 1:\n"]
    flags = old.co_flags & 0xFFE0000  # of __future__ imports
    code: types.CodeType = compile("".join(head) + text + "\n", old.co_filename, "exec", flags=flags, dont_inherit=True)
    for each in (*classes, name):
        code = _nested(code, each)
    return code.replace(co_firstlineno=old.co_firstlineno)


def _nested(code: types.CodeType, name: str) -> types.CodeType:
    """Code of the class or function of this name that `code` defines."""
    return next(part for part in code.co_consts if isinstance(part, types.CodeType) and part.co_name == name)


def _write_lines(data: Any, write: Callable[..., None]) -> None:
    """Contexts of every executed line: distinct sets of tests, and the set of each line."""
    for file in sorted(data.measured_files()):
        sets: dict[tuple[str, ...], int] = {}
        lines = {
            line: sets.setdefault(tuple(sorted(names)), len(sets))
            for line, names in data.contexts_by_lineno(file).items()
            if line > 0
        }
        if lines:
            write("lines", str(Path(file).relative_to(ROOT)), {"sets": list(sets), "lines": lines})


def _place(item: Any) -> list[Any]:
    """File and first line, from 1, of the function that defines a test; empty if it has none."""
    function = getattr(item, "obj", None)
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        function = wrapped
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or not code.co_filename.startswith(f"{ROOT}/"):
        return ["", 0]
    return [str(Path(code.co_filename).relative_to(ROOT)), code.co_firstlineno]


def _message(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        text = str(crash.message)
    elif isinstance(report.longrepr, tuple):
        text = str(report.longrepr[2])
    else:
        errors = [line[2:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        text = errors[-1] if errors else str(report.longrepr).strip()
    return _ADDRESS.sub("0x...", text.replace(f"{ROOT}/", ""))[:_MESSAGE]


def _quiet_hypothesis(files: Sequence[Path]) -> None:
    """As envd's test runner: Hypothesis draws the same few examples in every run and stops at the first that fails."""
    if not any(b"hypothesis" in path.read_bytes() for path in files):
        return
    try:
        from hypothesis import Phase, settings
    except ImportError:
        return
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target)
    settings.register_profile(
        "verdicts", settings.default, phases=phases, derandomize=True, database=None, max_examples=25
    )
    settings.load_profile("verdicts")


def main() -> None:
    """Collect and run."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    _quiet_hypothesis([ROOT / path for path in spec["files"]])
    sys.path[:] = [str(ROOT), *([str(ROOT / "src")] if (ROOT / "src").is_dir() else []), *sys.path[1:]]
    coverage = None
    if any(run.get("coverage") for run in spec.get("runs", ())):
        from coverage import Coverage

        coverage = Coverage(
            data_file=None,
            config_file=False,
            source=[str(ROOT)],
            omit=[str(ROOT / path) for path in spec["files"]],
            messages=False,
        )
        coverage.start()
    plugin = Plugin(spec, coverage)
    # as envd's test runner (envd/sandbox/runner.py): no ini file, no installed plugin
    plugin.result["exit"] = pytest.main(
        [*spec["options"], *(str(ROOT / path) for path in spec["files"])], plugins=[plugin]
    )
    data = base64.b64encode(zlib.compress(json.dumps(plugin.result, sort_keys=True).encode(), 6))
    Path(sys.argv[2]).write_bytes(data + b"\n")


if __name__ == "__main__":
    main()
