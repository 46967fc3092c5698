"""The interpreter of the tool `python` in sandboxes of a real server."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from envd.client import ToolCall, ToolResult
from envd.errors import EnvdError
from envd.local import LocalEnvd
from envd.operations.client import ManagedSandbox
from envd.tools import MAX_OUTPUT_BYTES
from tests.envd.connector_calls import ALL, browse, get, python, run, sql, texts
from tests.envd.gvisors import require_runsc
from tests.envd.harness import Harness


def test_python_keeps_variables_and_shows_output_value_and_errors(anywhere: Harness) -> None:
    files = {"json.py": b"raise SystemExit('shadowed')\n", "calc.py": b"def add(a, b):\n    return a + b\n"}
    made, used, nothing, wrong, syntax, left, still, shadowed = run(
        anywhere,
        python("from calc import add\nimport os, sys\nprint('out'); os.system('echo child'); n = add(2, 3)"),
        python("n * 2"),
        python("n = 7"),
        python("def f():\n    return 1 / 0\nf()"),
        python("for"),
        python("sys.exit(3)"),
        python("_, n, input() if False else 'no input'"),
        python("import json"),
        files=files,
    )
    assert {*made.text.split("\n")} == {"out", "child"} and made.ok
    assert (used.text, nothing.text, still.text) == ("10", "", "(10, 7, 'no input')")
    assert not wrong.ok and wrong.text.split("\n")[-1] == "ZeroDivisionError: division by zero"
    assert 'File "<call 4>", line 2, in f\n    return 1 / 0' in wrong.text and "<string>" not in wrong.text
    assert syntax.text.endswith("SyntaxError: invalid syntax") and left.text.endswith("SystemExit: 3")
    assert "shadowed" in shadowed.text


def test_python_is_the_one_that_commands_run(anywhere: Harness) -> None:
    code = "import sys; print(sys.prefix, sys.path[1:])"
    command = ToolCall("exec", {"command": f"python3 -c '{code}'"})
    shell, tool = texts(anywhere, command, python(code))
    assert shell == f"{tool}\nexit 0"


@pytest.mark.slow
def test_a_deadline_interrupts_and_keeps_variables_if_the_code_lets_it(namespaces: Harness) -> None:
    slept, _, kept, stubborn, lost = run(
        namespaces,
        python("x = 1\nimport time; time.sleep(60)", timeout_s=1),
        ToolCall("exec", {"command": "sleep 60", "timeout_s": 0.5}),  # ends the shell, and nothing else
        python("x"),
        python("while True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        pass", timeout_s=1),
        python("x"),
    )
    assert slept.timed_out and slept.text.endswith("KeyboardInterrupt\ntimed out after 1 s") and kept.text == "1"
    assert stubborn.timed_out
    assert stubborn.text == "timed out after 1 s; the interpreter ended: its variables are lost"
    assert lost.text.startswith("[a new interpreter was started: variables of earlier calls are lost]\n")
    assert lost.text.endswith("NameError: name 'x' is not defined")


def test_code_whose_caller_leaves_is_interrupted(namespaces: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> tuple[str, float]:
        await sandbox.call(python("x = 1\nimport time"))
        leaving = asyncio.create_task(sandbox.call(python("time.sleep(60)"), timeout_s=100))
        await asyncio.sleep(1)
        leaving.cancel()
        with suppress(asyncio.CancelledError, EnvdError):
            await leaving
        started = time.monotonic()
        return (await sandbox.call(python("x"))).text, time.monotonic() - started

    text, seconds = namespaces.sandbox(job, toolset=ALL)
    assert text == "1" and seconds < 9


@pytest.mark.slow
def test_calls_at_once_share_one_interpreter_and_end_no_other_call(namespaces: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> tuple[list[ToolResult], ToolResult, list[ToolResult]]:
        first = await asyncio.gather(*(sandbox.call(python("import os, time; os.getpid()")) for _ in range(4)))
        long = asyncio.create_task(sandbox.call(python("x = 1; time.sleep(7); x"), timeout_s=60))
        await asyncio.sleep(1)
        queued = await sandbox.call(python("x = 2", timeout_s=2), timeout_s=60)
        stuck = python("10 ** 10 ** 8", timeout_s=1)
        return first, queued, [await long, *[await sandbox.call(each) for each in (python("x"), stuck, python("1"))]]

    first, queued, (long, kept, stuck, anew) = namespaces.sandbox(job, toolset=ALL)
    assert len({each.text for each in first}) == 1 and first[0].text.isdigit()
    assert queued.timed_out
    assert queued.text == "timed out after 2 s; the code did not begin: another call's was running"
    assert (long.text, kept.text) == ("1", "1")
    assert stuck.text == "timed out after 1 s; the interpreter ended: its variables are lost"
    assert anew.text.endswith("lost]\n1")


def test_code_inherits_no_future_of_the_interpreter(namespaces: Harness) -> None:
    code = "def f(x: int):\n    pass\nf.__annotations__['x'] is int"
    assert texts(namespaces, python(code)) == ["True"]


@pytest.mark.slow
def test_a_turn_of_many_stuck_calls_is_answered(namespaces: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> list[ToolResult]:
        return await sandbox.batch([python("10 ** 10 ** 8")] * 18, timeout_s=1)

    found = namespaces.sandbox(job, toolset=ALL)
    late = "timed out after 1 s", "error: the interpreter has not started in time"  # the latter on a busy machine
    assert len(found) == 18 and [each.text for each in found if not each.text.split("]\n")[-1].startswith(late)] == []


def test_an_interpreter_that_ends_is_told_and_started_anew(namespaces: Harness) -> None:
    kill = ToolCall("exec", {"command": "pkill -9 -f triplane-python; sleep 0.2"})
    ended, fresh, shot, _, after = texts(
        namespaces,
        python("print('last words', flush=True)\nimport os; os._exit(0)"),
        python("1"),
        python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        kill,
        python("2"),
    )
    gone, anew = "the interpreter ended: its variables are lost", "[a new interpreter was started: variables of earlier"
    assert ended == f"last words\n{gone}" and shot == gone
    assert fresh.startswith(anew) and fresh.endswith("\n1") and after.startswith(anew) and after.endswith("\n2")


def test_hostile_code_is_bounded_and_the_next_call_works(namespaces: Harness) -> None:
    endless, holding, forked, closed, quick = run(
        namespaces,
        python("while True:\n    print('y' * 1000)", timeout_s=1),
        python("import subprocess\nsubprocess.Popen(['sleep', '60'])\nprint('started')"),
        python("import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint('parent')"),
        python("os.close(1); os.close(2)\ntime.sleep(0.2)\nos.fork() or print('a child that comes back')"),
        python("'alive'"),
    )
    assert endless.timed_out and endless.truncated and len(endless.text) < MAX_OUTPUT_BYTES + 1000
    assert endless.true_bytes > 1_000_000
    assert (holding.ok, holding.text) == (True, "started") and holding.seconds < 5
    assert (forked.ok, forked.text) == (True, "parent") and forked.seconds < 5
    assert closed.seconds < 5 and quick.text == "'alive'"


def test_hibernation_and_forks_keep_the_browser_and_restart_the_interpreter(namespaces: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> list[str]:
        await sandbox.call(python("x = 1"))
        await sandbox.call(browse("open", url="page.txt"))
        fork = await sandbox.fork()
        await sandbox.hibernate()
        await sandbox.resume()
        found = [await each.call(call) for each in (sandbox, fork) for call in (python("'x' in dir()"), browse("show"))]
        await fork.close()
        return [each.text for each in found]

    lost = "[a new interpreter was started: variables of earlier calls are lost]\nFalse"
    page = "file:///page.txt\n1: kept"
    assert namespaces.sandbox(job, toolset=ALL, files={"page.txt": b"kept\n"}) == [lost, page, lost, page]


@pytest.mark.slow
def test_connectors_work_in_gvisor_and_a_fork_keeps_the_interpreter() -> None:
    require_runsc()

    async def job(sandbox: ManagedSandbox) -> list[str]:
        calls = [
            sql("create table t as select 1 as a", write=True),
            python("import sqlite3; n = sqlite3.connect('a.db').execute('select a from t').fetchone()"),
            python("10 ** 10 ** 8", timeout_s=1),
            python("n = 5\nwhile True: pass", timeout_s=1),
            browse("open", url="calc.py"),
            get("http://shop.test/"),
        ]
        found = [(await sandbox.call(call, timeout_s=20)).text for call in calls]
        fork = await sandbox.fork()
        found += [(await each.call(python("n"))).text for each in (sandbox, fork)]
        await fork.close()
        return found

    with LocalEnvd("gvisor") as server:
        made, read, stuck, late, page, alone, kept, forked = Harness(server.address).sandbox(job, toolset=ALL)
    assert (made, read) == ("ok", "") and page.startswith("file:///calc.py\n1: def add")
    assert stuck == "timed out after 1 s; the interpreter ended: its variables are lost"
    assert late.endswith("KeyboardInterrupt\ntimed out after 1 s") and "no network" in alone
    assert (kept, forked) == ("5", "5")
