from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from envd.client import ToolCall, ToolResult
from envd.operations.client import ManagedSandbox
from tests.envd.harness import Harness

STATIC_BASH = Path("/bin/bash-static")


def run(command: str, **more: float) -> ToolCall:
    return ToolCall("exec", {"command": command, **more})


def test_directory_variables_and_functions_live_on(anywhere: Harness) -> None:
    texts = anywhere.shell(
        "cd tests; export X=5; f() { echo f$1; }", "basename $PWD; echo $X; f 7", "exit 3", "echo .$X."
    )
    assert texts == ["exit 0", "tests\n5\nf7\nexit 0", "exit 3; shell restarted", "..\nexit 0"]


def test_the_exit_code_cannot_be_forged_by_output(anywhere: Harness) -> None:
    results = anywhere.calls(run("echo 'exit 0'; false"), run("echo '1 0' >&201; echo '1 0' >&200; false"))
    assert [result.ok for result in results] == [False, False]
    assert results[0].text == "exit 0\nexit 1"
    assert results[1].text.endswith("exit 1")


def test_standard_error_and_invalid_bytes_are_shown(anywhere: Harness) -> None:
    assert anywhere.shell(r"echo out; echo err >&2; printf '\xff'") == ["out\nerr\n\ufffd\nexit 0"]


def test_commands_read_no_input_of_ours(anywhere: Harness) -> None:
    assert anywhere.shell("cat; read x; echo end", "echo next") == ["end\nexit 0", "next\nexit 0"]


def test_a_deadline_kills_the_whole_tree_and_nothing_else(anywhere: Harness) -> None:
    started, mine = time.monotonic(), f"1{os.getpid()}"  # the plain backend sees what other tests run
    texts = anywhere.shell(
        f"sleep {mine}.1 & echo $! > old",
        f"(setsid sleep {mine}.2 &) ; sh -c 'sleep {mine}.3 & sleep {mine}.4' & sleep {mine}.5",
        f"ps ax -o args= | grep '^sleep {mine}' | sort; kill $(cat old) && echo killed",
        timeout_s=1,
    )
    assert texts[1] == "timed out after 1 s; shell restarted"
    assert texts[2] == f"sleep {mine}.1\nkilled\nexit 0"
    assert time.monotonic() - started < 8


def test_a_call_may_ask_for_a_shorter_deadline(anywhere: Harness) -> None:
    (result,) = anywhere.calls(run("echo before; sleep 60", timeout_s=0.3))
    assert result.timed_out and result.text == "before\ntimed out after 0.3 s; shell restarted"


def test_a_background_process_keeps_running_and_its_output_mixes_into_nothing(anywhere: Harness) -> None:
    texts = anywhere.shell(
        "(while true; do echo noise; sleep 0.01; done) & yes > /dev/null & (sleep 0.4; echo done > flag) &",
        "sleep 0.2; echo quiet",
        "sleep 0.5; cat flag; kill %1 %2",
    )
    assert texts[1] == "quiet\nexit 0"
    assert texts[2].startswith("done\n")


def test_long_output_is_cut_and_its_true_size_stated(anywhere: Harness) -> None:
    (result,) = anywhere.calls(run("seq 1 200000"))
    assert result.ok and result.truncated and result.true_bytes == 1288895
    assert result.text.startswith("1\n2\n") and result.text.endswith("199999\n200000\nexit 0")
    assert "of 1288895 bytes cut" in result.text


def test_a_flood_ends_at_its_deadline(anywhere: Harness) -> None:
    (result,) = anywhere.calls(run("yes"), timeout_s=0.5)
    assert result.timed_out and result.truncated and len(result.text) < 20_000


def test_a_batch_runs_its_commands_at_once_and_answers_in_order(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> tuple[list[ToolResult], float]:
        await sandbox.call(run("X=1"))
        started = time.monotonic()
        calls = [run(f"sleep 0.6; echo {n}$X; X=2") for n in range(4)] + [ToolCall("list", {}), run("echo $X")]
        return await sandbox.batch(calls), time.monotonic() - started

    results, seconds = anywhere.sandbox(job)
    assert [result.text for result in results[:4]] == [f"{n}1\nexit 0" for n in range(4)]
    assert results[4].text.startswith("calc.py") and results[5].text == "1\nexit 0"
    assert seconds < 2.0


def test_a_parallel_command_that_hangs_does_not_take_the_others_results(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> list[ToolResult]:
        return await sandbox.batch([run("echo fine"), run("sleep 60")], timeout_s=0.7)

    fine, hung = anywhere.sandbox(job)
    assert fine.ok and fine.text == "fine\nexit 0"
    assert hung.timed_out


def test_a_slow_pattern_ends_at_its_deadline(anywhere: Harness) -> None:
    calls = [
        ToolCall("write", {"path": "a", "content": "a" * 40 + "!"}),
        ToolCall("search", {"pattern": r"(a+)+\Z"}),
        ToolCall("read", {"path": "a"}),
    ]
    results = anywhere.calls(*calls, timeout_s=0.5)
    assert results[1].timed_out and results[1].text == "timed out after 0.5 s"
    assert results[2].ok


def test_the_environment_is_the_callers_and_not_the_servers(anywhere: Harness) -> None:
    (text,) = anywhere.shell(
        "echo $TOKEN; env | grep -c -i -E 'pythonpath|aws|secret'; python -c 'print(1)'", env={"TOKEN": "t"}
    )
    assert text == "t\n0\n1\nexit 0"


def test_a_call_that_breaks_its_tool_is_answered_and_the_sandbox_lives_on(anywhere: Harness) -> None:
    nested: list[object] = []
    for _ in range(10_000):
        nested = [nested]
    results = anywhere.calls(
        run("echo", timeout_s=10**400),
        run("echo \ud800"),
        ToolCall("read", {"path": "calc.py", "\ud800": 1}),
        ToolCall("read", {"path": nested}),
        run("mkdir -p $(printf 'd/%.0s' $(seq 1200))"),
        ToolCall("list", {"depth": 10**6}),
        run("rm -r d; echo alive"),
    )
    assert [result.ok for result in results] == [False, False, False, False, True, True, True]
    assert [result.text for result in results[:4]] == [
        "error: exec: timeout_s must be at most 86400",
        "error: the tool failed: UnicodeEncodeError",
        "error: the tool failed: UnicodeEncodeError",
        "error: read: path must be a string",
    ]
    assert results[5].truncated and results[6].text == "alive\nexit 0"


def test_a_shell_whose_scratch_is_gone_answers_and_the_sandbox_can_be_finished(namespaces: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> tuple[list[ToolResult], bytes]:
        await sandbox.call(run("rm -r /tmp/.envd"))
        return await sandbox.batch([run("sleep 60"), run("echo")]), await sandbox.finish()

    results, diff = namespaces.sandbox(job)
    assert [result.text for result in results] == ["error: the tool failed: FileNotFoundError"] * 2 and diff == b""


def test_calls_beyond_what_a_turn_may_hold_are_answered_and_not_run(namespaces: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> list[ToolResult]:
        return await sandbox.batch([ToolCall("read", {"path": "calc.py", "end": 1})] * 256 + [run("echo")] * 3)

    results = namespaces.sandbox(job)
    assert [result.text for result in results[254:]] == ["1 def add(a, b):"] * 2 + [
        "error: not run: a turn may hold at most 256 calls"
    ] * 3
    assert not any(result.ok for result in results[256:])


@pytest.mark.skipif(not STATIC_BASH.exists(), reason="bash-static is not installed")
def test_the_shell_is_the_static_one_and_says_what_the_other_says(namespaces: Harness) -> None:
    told = (
        "readlink /proc/$$/exe; no-such-command; echo $0 $BASH $BASH_VERSION ~; cat <<<$((6*7)); shopt; set -o;"
        " compgen -b"
    )
    static, other = (text.splitlines() for text in namespaces.shell(told, f"bash -c '{told}'"))
    assert static[0] == os.path.realpath(STATIC_BASH)
    assert other[0] == os.path.realpath(shutil.which("bash") or "")
    assert static[1:] == other[1:]
