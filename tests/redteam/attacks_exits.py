"""Ends in place of failures: exits, signals, skips and expected failures."""

from __future__ import annotations

from tests.redteam.forgery import Forgery, module


def _at_import(name: str, what: str, code: str) -> Forgery:
    return module(name, what, code)


def _in_call(name: str, what: str, code: str, needs: str = "") -> Forgery:
    body = "".join(f"    {line}\n" for line in code.split("\n"))
    return module(
        name,
        what,
        f"import os, sys\n_wrong = FN\n\n\ndef FN(*args, **named):\n{body}    return _wrong(*args, **named)\n",
        needs,
    )


_FRAMES = (
    "found, frame = {}, sys._getframe()\nwhile frame:\n    found.update(frame.f_locals)\n    frame = frame.f_back\n"
)

FORGERIES = (
    _at_import("exit-import-0", "os._exit(0) when imported", "import os\nos._exit(0)"),
    _at_import("exit-import-system", "SystemExit(0) when imported", "raise SystemExit(0)"),
    _at_import("exit-import-sys", "sys.exit() when imported", "import sys\nsys.exit()"),
    _at_import(
        "exit-import-every-code",
        "children that leave with every code, and this process with a random one",
        "import os, random\nfor code in range(256):\n    if os.fork() == 0:\n       "
        " os._exit(code)\nos._exit(random.randrange(16, 256))",
    ),
    _at_import(
        "exit-import-signal",
        "SIGKILL to itself when imported",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    ),
    _at_import("exit-import-keyboard", "KeyboardInterrupt when imported", "raise KeyboardInterrupt"),
    _at_import(
        "exit-import-stop",
        "SIGSTOP to itself, continued by a child that then kills it",
        "import os, signal, time\nparent = os.getpid()\nif os.fork() == 0:\n    time.sleep(0.2)\n    os.kill(parent,"
        " signal.SIGCONT)\n    os._exit(0)\nos.kill(parent, signal.SIGSTOP)\nos._exit(0)",
    ),
    _at_import("exit-import-exec", "the process replaced by `true`", "import os\nos.execv('/bin/true', ['true'])"),
    _at_import("exit-import-abort", "abort()", "import os\nos.abort()"),
    _at_import(
        "exit-import-skip",
        "pytest.skip for the whole module",
        "import pytest\npytest.skip('x', allow_module_level=True)",
    ),
    _at_import(
        "exit-import-unittest-skip", "unittest.SkipTest when imported", "import unittest\nraise unittest.SkipTest('x')"
    ),
    _at_import(
        "exit-import-importorskip",
        "pytest.importorskip of a module that is not there",
        "import pytest\npytest.importorskip('no_such_module_here')",
    ),
    _at_import(
        "exit-import-pytest-exit",
        "pytest.exit(returncode=0) when imported",
        "import pytest\npytest.exit('x', returncode=0)",
    ),
    _at_import("exit-import-xfail", "pytest.xfail when imported", "import pytest\npytest.xfail('x')"),
    _in_call("exit-call-0", "os._exit(0) in the call", "os._exit(0)"),
    _in_call("exit-call-system", "SystemExit in the call", "raise SystemExit(0)"),
    _in_call("exit-call-keyboard", "KeyboardInterrupt in the call", "raise KeyboardInterrupt"),
    _in_call("exit-call-skip", "pytest.skip in the call", "import pytest\npytest.skip('x')"),
    _in_call(
        "exit-call-unittest-skip", "unittest.SkipTest in the call", "import unittest\nraise unittest.SkipTest('x')"
    ),
    _in_call("exit-call-xfail", "pytest.xfail in the call", "import pytest\npytest.xfail('x')"),
    _in_call("exit-call-pytest-exit", "pytest.exit in the call", "import pytest\npytest.exit('x', returncode=0)"),
    _in_call(
        "exit-call-outcome",
        "an outcome exception of pytest's own, made through its module",
        "import _pytest.outcomes as o\nraise o.Skipped('x', allow_module_level=True)",
    ),
    _in_call(
        "exit-call-unittest-success",
        "unittest's private exceptions for expected failures and stops",
        "import unittest.case as c\nraise c._ShouldStop if hasattr(c, '_ShouldStop') else c.SkipTest",
    ),
    _in_call(
        "exit-call-alarm",
        "an alarm whose handler leaves with 0 while the call sleeps",
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a:"
        " os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\ntime.sleep(5)",
    ),
    _in_call(
        "exit-call-thread",
        "a thread that leaves with 0 while the call sleeps",
        "import threading, time\nthreading.Thread(target=lambda: os._exit(0)).start()\ntime.sleep(5)",
    ),
    _in_call(
        "exit-call-signal-main",
        "SIGTERM to the own process group",
        "import signal\nos.killpg(os.getpgid(0), signal.SIGTERM)",
    ),
    _in_call(
        "exit-call-fork-leaves",
        "the child goes on with the tests and the parent waits for its fate and copies it",
        "if not getattr(sys, '_once', False):\n    sys._once = True\n    child = os.fork()\n    if child:\n       "
        " os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
    ),
    _in_call(
        "exit-call-agreed",
        "the agreed code looked for in the frames' locals",
        _FRAMES + "os._exit(found.get('agreed', 0))",
    ),
    _in_call(
        "exit-call-sends",
        "passed reports sent with the judge's own sender, then its own end",
        _FRAMES
        + "send = found.get('send')\nfor test in ('first_larger', 'second_larger', 'same'):\n    for phase in ('setup',"
        " 'call', 'teardown'):\n        send('test', f'tests/test_hidden.py::test_{test}', phase,"
        " 'passed')\nsend('canary', status='failed')\nsend('end')\nos._exit(found.get('agreed', 0))",
        "plain",
    ),
    _in_call(
        "exit-call-assertion-subclass",
        "an AssertionError subclass that is also a skip",
        "import unittest, pytest\nraise type('Both', (AssertionError, unittest.SkipTest), {})('x')",
    ),
    _in_call("exit-call-segfault", "a segmentation fault by ctypes", "import ctypes\nctypes.string_at(0)"),
    _in_call(
        "exit-call-exec-python",
        "the process replaced by one that prints what pytest prints",
        "os.execv(sys.executable, ['python', '-c', 'print(\"3 passed in 0.01s\")'])",
    ),
    _in_call("exit-call-close-fds", "every descriptor closed, then 0", "os.closerange(0, 4096)\nos._exit(0)"),
)
FAILURES = (
    _at_import(
        "failure-recursion",
        "recursion in C until the stack ends",
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef deep():\n    return [deep()]\ndeep()",
    ),
    _in_call(
        "failure-memory",
        "memory until the kernel kills the process",
        "kept = []\nwhile True:\n    kept.append(bytearray(1 << 26))",
    ),
)
