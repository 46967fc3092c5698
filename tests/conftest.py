"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator

import pytest
from _pytest.assertion import rewrite

from envd.sandbox import equality
from tests.needs import SUITES, report
from tests.triton_interpreter import InterpretedTriton

_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process for what tests import and start."""
    # Three processes of tests share two cores: a thread of torch that spins while it waits takes them from the others.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # envd's test runner, which some tests import, would change how pytest compiles these tests, and store no byte code.
    # It does so once in a process, unless this attribute exists.
    setattr(rewrite, equality._GUARD, None)
    # A shell may start tests with signals ignored (nohup, a job in the background); what tests start and end would
    # ignore them too.
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # `make test-gpu` compiles kernels instead
    if config.getoption("markexpr") != "gpu" and "triton" not in sys.modules:
        sys.meta_path.insert(0, InterpretedTriton())


def pytest_sessionstart(session: pytest.Session) -> None:
    """Name the programs that are missing before the first test. A header (`pytest_report_header`) is silent with -q."""
    config = session.config
    if hasattr(config, "workerinput"):
        return
    marker = config.getoption("markexpr")
    for line in report(marker if marker in SUITES else "test"):
        config.get_terminal_writer().line(line)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with a file that builds the shared world of tests/dagster, so that no worker has to wait for it later."""
    first = next((item.path for item in items if "untouched_world" in getattr(item, "fixturenames", ())), None)
    items.sort(key=lambda item: item.path != first)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, and leave what they made out of every later collection: a third of
    the time that finding the tests takes.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
