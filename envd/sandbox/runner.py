"""Run named tests in-process with a pytest that is already imported, and report each outcome on a private pipe.

Only pytest's core plugins are loaded; no ini file or installed plugin is read, and conftest files only if the caller
permits them. The code under test shares this process. Therefore a record counts only if it carries the run's nonce and
arrives once, and the objects that the verdict depends on are checked after the tests are imported and after they ran:

    collect -> watched? -> setup, call, teardown of each test -> canary -> watched? -> end

The canary is a test that must fail; if it passes, results are being rewritten. Further defences are in the verifier.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gzip
import importlib.util
import json
import marshal
import os
import re
import sys
import tempfile
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Any, Protocol

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, rewrite_asserts
from _pytest.runner import runtestprotocol

from envd.sandbox import auditing, equality, observing
from envd.sandbox.origin import Origin
from envd.sandbox.watch import Watch, strange_plugins

_SUBTEST_REPORTS = ("SubtestReport", "SubTestReport")
"""Classes of pytest 9 and of the plugin pytest-subtests before it."""
_PLUGINS = (
    "cacheprovider",
    "terminal",
    "junitxml",
    "pastebin",
    "stepwise",
    "faulthandler",
    "setuponly",
    "setupplan",
    "doctest",
    "unraisableexception",
    "threadexception",
)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+(?=\.\.\.)|0x[0-9a-fA-F]{6,}|\.\.\.(0?x)?[0-9a-fA-F]+(?=>)")
"""Memory addresses in a repr, which pytest may have truncated at either end."""
MAX_MESSAGE = 500


class Send(Protocol):
    """Delivers one record to the supervisor."""

    def __call__(self, kind: str, name: str = "", phase: str = "", status: str = "", message: str = "") -> None:
        """Send a record."""


_prepared: list[pytest.Session] = []
"""The session that `inside_session` prepares, if it is called; forked runners collect and run in it."""


def inside_session(root: Path, body: Callable[[], None]) -> None:
    """Call `body` inside a configured pytest session that is about to collect.

    Processes that `body` forks can run tests at root at once: options are read and plugins registered already.
    """

    class Prepare:
        def pytest_collection(self, session: pytest.Session) -> bool:
            _prepared.append(session)
            body()
            return True

    pytest.main(_arguments(root), plugins=[Prepare()])


def run_tests(
    root: Path,
    tests: Sequence[str],
    send: Send,
    origin: Origin,
    *,
    src: bool = False,
    conftests: bool = False,
    changed: Collection[str] = (),
    configuration: Sequence[str] = (),
) -> None:
    """Collect and run the named tests below root.

    `send` gets every phase of every test, the names of what was tampered with, and `end` last. origin: distinguishes
    the task's code from the final state's. src: packages may also be in root/src. conftests: read conftest files.
    changed: files of the diff. configuration: further options, of `configured`.
    Call at most once per process, which must exit afterwards.
    """
    _watch()
    files = dict.fromkeys(test.split("::", 1)[0] for test in tests)
    present = [root / path for path in files if (root / path).is_file()]
    sources = [path.read_bytes() for path in present]
    if any(b"hypothesis" in each for each in sources):
        _quiet_hypothesis()
    if any(b"IsolatedAsyncioTestCase" in each for each in sources):
        _without_debugging()
    sys.path[:0] = [str(root), str(root / "src")] if src else [str(root)]
    running = [""]
    observing.install(lambda key, value: send("see", running[0], key, "", value))
    named = [*files, *map(cached_path, files)]
    auditing.install(root, origin.template, changed, origin.hidden, named, lambda name: send("tamper", status=name))
    recorder = _recorder(root, tests, send, origin, running, ways=_ways(present))
    if _prepared and not configuration:
        session = _prepared[0]
        session.config.pluginmanager._noconftest = not conftests  # pytest read its options before the task was known
        session.config.pluginmanager.register(recorder)
        try:
            session.perform_collect([str(path) for path in present])
        except (
            pytest.UsageError
        ) as error:  # a directory above the tests is not collected: the task's conftest imports broken code
            for path in files:
                send("collect", path, status="error", message=_portable(str(error), root))
        session.config.hook.pytest_runtestloop(session=session)
    else:
        options = [each for each in _arguments(root) if not (conftests and each == "--noconftest")]
        pytest.main([*options, *configuration, *map(str, present)], plugins=[recorder])
    send("end")


def _quiet_hypothesis() -> None:
    """Let Hypothesis, if it is installed, draw the same few examples in every run and stop at the first that fails: a
    verdict has up to eight runs, and a search for a simpler example takes minutes.

    Call it before the final state's folders are on the path.
    """
    _keep_table_of_utf8()
    try:
        from hypothesis import Phase, settings
    except ImportError:
        return
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target)
    settings.register_profile(
        "verdicts", settings.default, phases=phases, derandomize=True, database=None, max_examples=25
    )
    settings.load_profile("verdicts")


def _without_debugging() -> None:
    """Let `IsolatedAsyncioTestCase` run loops without debugging: they would read the source of the test for each future
    that code under test makes, as if that code read it. A Python that sets them up by another method is left as it is.
    """
    from unittest import IsolatedAsyncioTestCase as Case

    setup: Any = getattr(Case, "_setupAsyncioRunner", None)

    def quiet(case: Any) -> None:
        setup(case)
        case._asyncioRunner._debug = False

    if setup is not None:
        Case._setupAsyncioRunner = quiet  # type: ignore[attr-defined]


def _keep_table_of_utf8() -> None:
    """Put the characters that UTF-8 can encode where Hypothesis keeps them. It would ask for each of a million in every
    fresh sandbox, which takes longer than most tests. A version with another format computes its own.
    """
    home = Path(tempfile.gettempdir(), ".hypothesis")
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(home))
    folder = home / "unicode_data" / unicodedata.unidata_version
    encodable = [[0, 0xD7FF], [0xE000, sys.maxunicode]]
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True)
        for name, table in (("codec-utf-8", encodable), ("codec-v2-utf-8", [encodable, []])):
            (folder / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(table).encode()))


def configured(plugins: Sequence[str], ini: Mapping[str, str]) -> list[str]:
    """Options of pytest that load these modules as plugins and set these keys of its configuration."""
    loaded = [part for name in plugins for part in ("-p", name)]
    return loaded + [part for key, value in sorted(ini.items()) for part in ("-o", f"{key}={value}")]


def warm_up() -> None:
    """Run passing and failing tests, so that forked runs inherit the modules that pytest imports lazily.

    A process that runs tests only once does not need it.
    """
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "test_warm_up.py").write_text(
            "import pytest, unittest\n\n"
            "@pytest.mark.parametrize('n', [1])\n"
            "def test_passes(n, tmp_path, monkeypatch):\n    assert n\n\n"
            "class TestCase(unittest.TestCase):\n    def test_passes(self):\n        self.assertEqual(1, 1)\n\n"
            "def test_fails():\n    assert {'a': [1]} == {'a': [2]}\n"
        )
        options = [*_arguments(root), "--basetemp", str(root / "tmp")]
        pytest.main([*options, str(root / "test_warm_up.py")], plugins=[])
    sys.modules.pop("test_warm_up", None)
    _watch()


def pipe_sender(fd: int, nonce: str) -> Send:
    """Return a sender of JSON lines that alone holds descriptor and nonce. Forks of the caller send nothing."""
    owner = os.getpid()

    def send(kind: str, name: str = "", phase: str = "", status: str = "", message: str = "") -> None:
        if os.getpid() != owner:
            return
        record = [nonce, kind, name, phase, status, message]
        data = json.dumps(record).encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]

    return send


def base_name(nodeid: str) -> str:
    """A test's name without its parameters."""
    return nodeid.split("[", 1)[0]


def cached_path(path: str) -> str:
    """Path at which pytest looks for the byte code of a test file."""
    file = PurePosixPath(path)
    return str(file.parent / "__pycache__" / f"{file.stem}{PYC_TAIL}")


def compiled_test(root: Path, path: str, source: bytes) -> bytes:
    """Byte code of a test file at a path below root, as pytest reads it; empty if the file can't be compiled. Call it
    in a process of `inside_session`.
    """
    name = str(root / path)
    try:
        tree = ast.parse(source, filename=name)
        rewrite_asserts(tree, source, name, _prepared[0].config)
        code = compile(tree, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return b""
    return as_cached(source, code)


def compiled_module(root: Path, path: str, source: bytes) -> bytes:
    """Byte code of a module at a path below root, as Python reads it; empty if the module can't be compiled, or not
    without a warning, which its import would then no longer give.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            code = compile(source, str(root / path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, Warning):
        return b""
    return as_cached(source, code)


def as_cached(source: bytes, code: CodeType) -> bytes:
    """Content of a file of byte code of this source (PEP 552, a checked hash)."""
    return importlib.util.MAGIC_NUMBER + b"\x03\x00\x00\x00" + importlib.util.source_hash(source) + marshal.dumps(code)


def _arguments(root: Path) -> list[str]:
    switched_off = [part for name in _PLUGINS for part in ("-p", f"no:{name}")]
    return [
        "-c",
        "/dev/null",
        "--rootdir",
        str(root),
        "--noconftest",
        "--import-mode=importlib",
        "-o",
        "addopts=",
        "--continue-on-collection-errors",
        "--capture=no",
        *switched_off,
    ]


def _ways(files: Sequence[Path]) -> frozenset[str]:
    """Paths of the files and of all directories above them."""
    return frozenset(str(path) for file in files for path in (file, *file.parents))


def _recorder(
    root: Path, tests: Sequence[str], send: Send, origin: Origin, running: list[str], *, ways: frozenset[str]
) -> object:
    """Return a plugin that reports. running: a list whose only item the plugin sets to the running test's node id."""
    wanted = frozenset(tests)
    parts = [base_name(test).split("::") for test in wanted]
    nodes = {"::".join(each[:length]) for each in parts for length in range(2, len(each) + 1)}
    known: list[object] = [*_prepared[0].config.pluginmanager.get_plugins()] if _prepared else []
    subtests: dict[str, dict[str, str]] = {}  # first message of each bad outcome, by test: a test is its worst subtest
    equality.arm(origin, lambda name: send("tamper", running[0], status=name))

    changes = _watch().changes

    def look(config: pytest.Config, tests_ran: bool) -> None:
        found = changes(origin, tests_ran=tests_ran)
        for name in found + strange_plugins(config.pluginmanager.get_plugins(), known, origin):
            send("tamper", status=name)

    class Recorder:
        def pytest_configure(self, config: pytest.Config) -> None:
            config.option.tbstyle = "line"  # a report's message is all that is read, and tracebacks take time

        def pytest_sessionstart(self, session: pytest.Session) -> None:
            known.extend(session.config.pluginmanager.get_plugins())

        @pytest.hookimpl(tryfirst=True)
        def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
            return (
                None if str(collection_path) in ways else True
            )  # else pytest makes nodes of all files beside the tests

        @pytest.hookimpl(tryfirst=True)
        def pytest_pycollect_makeitem(self, collector: pytest.Collector, name: str) -> list[pytest.Item] | None:
            return (
                None if f"{collector.nodeid}::{name}" in nodes else []
            )  # else pytest makes nodes of all tests of the file, with all their parameters

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if item.nodeid in wanted or base_name(item.nodeid) in wanted]

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.outcome != "passed":
                status = "error" if report.failed else "skipped"
                send("collect", report.nodeid, status=status, message=_message(report, root))

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
            look(session.config, tests_ran=False)
            answer = yield
            _canary(session, send)
            look(session.config, tests_ran=True)
            return answer

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            running[0] = nodeid

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            message = "" if report.passed else _message(report, root)
            if type(report).__name__ in _SUBTEST_REPORTS:  # before the report of its test
                if not report.passed:
                    subtests.setdefault(report.nodeid, {}).setdefault(report.outcome, message)
                return
            outcome: str = report.outcome
            found = subtests.get(report.nodeid, {}) if report.when == "call" else {}
            for worse in ("failed", "skipped"):
                if worse in found and outcome != "failed":
                    outcome, message = worse, found[worse]
            send("test", report.nodeid, report.when, outcome, message)

    recorder = Recorder()
    known.append(recorder)
    return recorder


class _Canary(pytest.Item):
    """A test that always fails unless the code under test rewrites results."""

    def runtest(self) -> None:
        left, right = os.getpid(), -1
        assert left == right, "canary"

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return "canary"

    def reportinfo(self) -> tuple[str, int, str]:
        return "canary", 0, "canary"


def _canary(session: pytest.Session, send: Send) -> None:
    """Run a canary and send its outcome."""
    try:
        reports = runtestprotocol(_Canary.from_parent(session, name="canary", nodeid="canary"), log=False)
        outcome = next((str(report.outcome) for report in reports if report.when == "call"), "failed")
    except Exception:  # noqa: BLE001 - a test that broke pytest hides nothing by it
        outcome = "failed"
    send("canary", status=outcome)


def _message(report: Any, root: Path) -> str:
    """Failure message of a report, the same on every machine: no addresses, no host paths."""
    return _portable(_crash_message(report.longrepr), root)


def _portable(text: str, root: Path) -> str:
    text = _ADDRESS.sub("0x...", text.replace(str(root), "/workspace"))
    return text[:MAX_MESSAGE]


def _crash_message(longrepr: Any) -> str:
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)
    if isinstance(longrepr, tuple):
        return str(longrepr[2])
    errors = [line.removeprefix("E ").strip() for line in str(longrepr).splitlines() if line.startswith("E ")]
    return errors[-1] if errors else str(longrepr).strip()


equality.install()
_watch = functools.cache(Watch)
"""Looks at the watched objects once, before any code of a task is imported."""
