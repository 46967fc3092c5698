from __future__ import annotations

import ast
import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import envd.client
from envd.client import ToolCall, VerifyResult
from envd.operations.client import OperationsClient
from tests.envd.harness import FILES, FIX, HIDDEN, TESTS, Harness
from tests.envd.verifying import Verifying

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = FILES["calc.py"].decode()


def statuses(result: VerifyResult) -> list[str]:
    return [outcome.status for outcome in result.outcomes]


def test_a_fix_passes_and_the_bug_fails(anywhere: Harness) -> None:
    fixed, broken = anywhere.verify({"calc.py": RIGHT}), anywhere.verify({})
    assert (fixed.exit, statuses(fixed)) == ("completed", ["passed", "passed"])
    assert (broken.exit, statuses(broken)) == ("completed", ["failed", "passed"])
    assert broken.outcomes[0].message == "assert -1 == 3\n +  where -1 = add(1, 2)"


def test_a_low_limit_of_open_files_changes_no_verdict() -> None:
    with Verifying("namespaces") as verifier:
        resource.prlimit(verifier.pid, resource.RLIMIT_NOFILE, (160, 160))
        found = [verifier.verify({"calc.py": RIGHT}) for _ in range(4)]
    assert [(each.exit, statuses(each), each.tampering) for each in found] == [
        ("completed", ["passed", "passed"], ())
    ] * 4


def test_outcomes_are_in_request_order_and_unknown_tests_are_missing(anywhere: Harness) -> None:
    tests = ("tests/test_hidden.py::test_zero", "tests/test_hidden.py::nope", "gone.py::x", TESTS[0])
    result = anywhere.verify({"calc.py": RIGHT}, tests=tests)
    assert [outcome.name for outcome in result.outcomes] == list(tests)
    assert statuses(result) == ["passed", "missing", "missing", "passed"]


CHEATS = {
    "exits at import": {"calc.py": "import os\nos._exit(0)\n"},
    "exits when called": {"calc.py": "import os\ndef add(a, b):\n    os._exit(0)\n"},
    "raises SystemExit at import": {"calc.py": "import sys\nsys.exit(0)\n"},
    "ends the session": {"calc.py": "import pytest\npytest.exit('done', returncode=0)\n"},
    "skips everything": {"calc.py": "import pytest\npytest.skip('no', allow_module_level=True)\n"},
    "skips when called": {"calc.py": "import pytest\ndef add(a, b):\n    pytest.skip('no')\n"},
    "kills its supervisor": {"calc.py": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)\n"},
    "conftest marks all passed": {
        "calc.py": WRONG,
        "conftest.py": (
            "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
            "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
        ),
    },
    "ini deselects": {
        "pytest.ini": "[pytest]\naddopts = --collect-only\n",
        "tox.ini": "[pytest]\naddopts = -k nothing\n",
    },
    "sitecustomize exits": {"sitecustomize.py": "import os\nos._exit(0)\n"},
    "replaces the hidden tests": {"tests/test_hidden.py": "def test_small(): pass\ndef test_zero(): pass\n"},
    "shadows pytest": {"pytest.py": "def main(*a, **k): return 0\n", "_pytest/__init__.py": ""},
    "answers well in a fork": {
        "calc.py": "import os\nchild = os.fork() == 0\ndef add(a, b):\n    return a + b if child else None\n"
    },
    "writes to every descriptor": {
        "calc.py": (
            "import json, os\nfor fd in range(3, 1024):\n    try:\n"
            '        os.write(fd, b\'["", "test", "tests/test_hidden.py::test_small", "call", "passed", ""]\\n\')\n'
            "    except OSError:\n        pass\nos._exit(0)\n"
        )
    },
}


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda name: name.replace(" ", "-"))
def test_a_cheat_does_not_pass(namespaces: Harness, cheat: str) -> None:
    assert statuses(namespaces.verify(CHEATS[cheat]))[0] != "passed"


@pytest.mark.parametrize("cheat", ["exits when called", "skips everything", "conftest marks all passed"])
def test_the_task_suites_cheats_do_not_pass_in_the_plain_backend(plain: Harness, cheat: str) -> None:
    assert statuses(plain.verify(CHEATS[cheat]))[0] != "passed"


def test_what_ended_early_is_missing_not_failed(namespaces: Harness) -> None:
    result = namespaces.verify(CHEATS["exits when called"])
    assert (result.exit, statuses(result)) == ("crashed", ["missing", "missing"])
    skipped = namespaces.verify(CHEATS["skips everything"])
    assert statuses(skipped) == ["skipped", "skipped"]


def test_a_syntax_error_is_an_error_of_every_test_in_the_file(anywhere: Harness) -> None:
    result = anywhere.verify({"calc.py": "def add(a, b:\n"})
    assert (result.exit, statuses(result)) == ("completed", ["error", "error"])
    assert "SyntaxError" in result.outcomes[0].message


def test_a_deadline_ends_a_verification_and_its_children(namespaces: Harness) -> None:
    loop = "import os\nif os.fork() == 0:\n    os.setsid()\nwhile True: pass\n"
    result = namespaces.verify({"calc.py": loop}, timeout_s=0.5)
    assert (result.exit, statuses(result)) == ("timed_out", ["missing", "missing"])
    assert result.seconds < 5


SUBTESTS = """\
import unittest

from calc import add


class Sums(unittest.TestCase):
    def test_all(self):
        for left, right in ((1, 2), (0, 0), (3, 4)):
            with self.subTest(left=left):
                if add(left, right) is None:
                    self.skipTest("none")
                self.assertEqual(add(left, right), left + right)


def test_fixture(subtests):
    for left, right in ((1, 2), (0, 0)):
        with subtests.test(left=left):
            assert add(left, right) == left + right
"""


def test_a_test_is_as_good_as_its_worst_subtest(anywhere: Harness) -> None:
    hidden, tests = {"tests/test_sub.py": SUBTESTS.encode()}, ("tests/test_sub.py::Sums::test_all",)
    tests += ("tests/test_sub.py::test_fixture",)
    fixed = anywhere.verify({"calc.py": RIGHT}, hidden=hidden, tests=tests)
    assert (statuses(fixed), fixed.tampering) == (["passed", "passed"], ())
    broken = anywhere.verify({}, hidden=hidden, tests=tests)
    assert (statuses(broken), broken.tampering) == (["failed", "failed"], ())
    assert [each.message.split("\n")[0] for each in broken.outcomes] == [
        "AssertionError: -1 != 3",
        "assert -1 == (1 + 2)",
    ]
    last = {"calc.py": "def add(a, b):\n    return a + b if a < 3 else 0\n"}
    assert statuses(anywhere.verify(last, hidden=hidden, tests=tests)) == ["failed", "passed"]
    skips = {"calc.py": "def add(a, b):\n    return a + b if a else None\n"}
    assert statuses(anywhere.verify(skips, hidden=hidden, tests=tests)) == ["skipped", "failed"]


def test_a_run_that_only_waits_ends_before_its_deadline(anywhere: Harness) -> None:
    waits = "import threading\n\n\ndef add(a, b):\n    if a:\n        threading.Event().wait()\n    return 0\n"
    result = anywhere.verify({"calc.py": waits}, timeout_s=60, idle_s=1)
    assert (result.exit, statuses(result)) == ("timed_out", ["missing", "missing"])
    works = "import time\n\n\ndef add(a, b):\n    end = time.monotonic() + 1.3\n"
    works += "    while time.monotonic() < end:\n        pass\n    return a + b\n"
    assert statuses(anywhere.verify({"calc.py": works}, timeout_s=60, idle_s=1)) == ["passed", "passed"]


def test_a_verification_that_its_caller_gave_up_on_ends_at_once(anywhere: Harness) -> None:
    mark = f"given-up-{os.getpid()}"
    slow = f"import subprocess\n\n\ndef test():\n    subprocess.run(['sh', '-c', 'sleep 30; true', '{mark}'])\n"
    hidden = {"test_slow.py": slow.encode()}

    def running() -> bool:
        return any(mark.encode() in words for words in map(_words_of, Path("/proc").glob("[0-9]*")))

    async def job(client: OperationsClient) -> None:
        template = await client.put_template(FILES)
        verifying = asyncio.ensure_future(client.verify(template, b"", hidden, ["test_slow.py::test"], timeout_s=25))
        while not running():
            await asyncio.sleep(0.02)
        verifying.cancel()
        async with asyncio.timeout(10):
            while running():
                await asyncio.sleep(0.02)

    anywhere.client(lambda client: asyncio.wait_for(job(client), 60))


def _words_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_waiting_for_others_verifications_is_no_fault(namespaces: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envd.client, "RPC_GRACE_S", 0.75)  # so that the line is longer than an RPC's deadline
    loops = 12 * (os.cpu_count() or 1)

    async def job(client: OperationsClient) -> list[VerifyResult]:
        template = await client.put_template({**FILES, "calc.py": b"while True: pass\n"})
        line = (client.verify(template, b"", HIDDEN, TESTS, timeout_s=0.4) for _ in range(loops))
        return await asyncio.gather(*line)

    assert {result.exit for result in namespaces.client(job)} == {"timed_out"}


def test_a_diff_that_does_not_apply_says_so(anywhere: Harness) -> None:
    async def job(client: OperationsClient) -> VerifyResult:
        template = await client.put_template(FILES)
        return await client.verify(template, b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", HIDDEN, TESTS)

    result = anywhere.client(job)
    assert (result.exit, statuses(result)) == ("apply_failed", ["missing", "missing"])
    assert "x" in result.log


ATTACKS = {
    "an unsendable message": "raise ValueError('\\ud800')\n",
    "a pipe for a log": "import os\nos.remove('/tmp/.envd/log')\nos.mkfifo('/tmp/.envd/log')\n" + WRONG,
    "a flood of reports": (
        "import os\nfor fd in range(3, 1024):\n    try:\n        [os.write(fd, piece * 50000) for _ in range(20) for"
        " piece in (b'[', b'1,', b'\\n')]\n    except OSError:\n        pass\nraise ValueError\n"
    ),
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda name: name.replace(" ", "-"))
def test_an_attack_on_the_report_is_graded_as_any_failure(namespaces: Harness, attack: str) -> None:
    result = namespaces.verify({"calc.py": ATTACKS[attack]})
    assert result.exit == "completed" and statuses(result)[0] in ("failed", "error")


def finished(harness: Harness, command: str, files: dict[str, bytes]) -> VerifyResult:
    async def job(client: OperationsClient) -> VerifyResult:
        template = await client.put_template(files)
        sandbox = await client.create(template)
        await sandbox.call(FIX)
        await sandbox.call(ToolCall("exec", {"command": command}))
        return await client.verify(template, await sandbox.finish(), HIDDEN, TESTS)

    return harness.client(job)


def test_a_final_state_that_fills_the_disk_fails(namespaces: Harness) -> None:
    result = finished(namespaces, "head -c 90000000 /dev/zero > zeros", FILES)
    assert (result.exit, statuses(result)) == ("apply_failed", ["missing", "missing"])


def test_attributes_of_git_change_no_byte_of_a_final_state(namespaces: Harness) -> None:
    """A path with a blank takes git to apply. No UTF-16 is in utf.txt, so that git would refuse to store it."""
    attributes = b"*.dat text eol=crlf ident\nutf.txt working-tree-encoding=UTF-16\n"
    result = namespaces.verify(
        {"a b.dat": "$Id$\nx\n", "utf.txt": "b\n"},
        files={**FILES, "utf.txt": b"a\n", ".gitattributes": attributes},
        hidden={
            "tests/test_bytes.py": b"from pathlib import Path\n\n\ndef test_bytes():\n    assert"
            b" Path('a b.dat').read_bytes() + Path('utf.txt').read_bytes() == b'$Id$\\nx\\nb\\n'\n"
        },
        tests=("tests/test_bytes.py::test_bytes",),
    )
    assert statuses(result) == ["passed"], result


PUT_AWAY = [
    "rm -r d; echo x > d",
    "rm -r d; ln -s /tmp d",
    "rm d/conftest.py; mkdir d/conftest.py; touch d/conftest.py/x",
]


@pytest.mark.parametrize("command", PUT_AWAY)
def test_configuration_that_was_put_out_of_the_way_comes_back(namespaces: Harness, command: str) -> None:
    result = finished(namespaces, command, {**FILES, "d/conftest.py": b"x = 1\n"})
    assert (result.exit, statuses(result)) == ("completed", ["passed", "passed"])


@pytest.mark.slow
def test_a_verification_and_a_sandbox_never_share_a_directory(plain: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        template = await client.put_template(FILES)
        sandboxes = [await client.create(template) for _ in range(20)]
        for _ in range(20):
            assert (await client.verify(template, b"", HIDDEN, TESTS)).exit == "completed"
        for sandbox in sandboxes:
            await sandbox.close()

    plain.client(job)


def test_a_parametrized_test_passes_only_if_every_case_does(namespaces: Harness) -> None:
    hidden = {
        "test_p.py": (
            b"import pytest\nfrom calc import add\n\n@pytest.mark.parametrize('n', [0, 1])\ndef test_p(n):\n    assert"
            b" add(n, n) == 2 * n\n\nclass TestIt:\n    def test_method(self, tmp_path):\n        assert"
            b" tmp_path.exists()\n\nimport unittest\nclass Case(unittest.TestCase):\n    def test_unit(self):\n       "
            b" self.assertEqual(1, 1)\n"
        )
    }
    tests = (
        "test_p.py::test_p",
        "test_p.py::test_p[0]",
        "test_p.py::TestIt::test_method",
        "test_p.py::Case::test_unit",
    )
    assert statuses(namespaces.verify({}, hidden=hidden, tests=tests)) == ["failed", "passed", "passed", "passed"]


def test_only_named_tests_get_their_parameters(anywhere: Harness) -> None:
    text = (
        "def pytest_generate_tests(metafunc):\n    if 'n' in metafunc.fixturenames:\n        raise OSError\n\n"
        "def test_n(n):\n    pass\n\ndef test_plain():\n    pass\n\n"
        "class TestA:\n    class TestB:\n        def test_in(self):\n            pass\n"
        "        def test_other(self, n):\n            pass\n"
    )
    tests = ("test_n.py::test_plain", "test_n.py::TestA::TestB::test_in")
    result = anywhere.verify({}, hidden={"test_n.py": text.encode()}, tests=tests)
    assert (result.exit, statuses(result)) == ("completed", ["passed", "passed"])


def test_messages_hold_no_addresses_and_are_short(anywhere: Harness) -> None:
    changes = {"calc.py": "class R: pass\ndef add(a, b):\n    assert not R(), 'x' * 9000\n"}
    messages = [anywhere.verify(changes).outcomes[0].message for _ in range(2)]
    assert messages[0] == messages[1] and len(messages[0]) <= 500
    shown = anywhere.verify({"calc.py": "class R: pass\ndef add(a, b):\n    return R()\n"}).outcomes[0].message
    assert "object at 0x..." in shown
    name = "R" * 40  # pytest cuts the address, too
    cut = {"calc.py": f"class {name}: pass\ndef add(a, b):\n    return {name}()\n"}
    messages = [anywhere.verify(cut).outcomes[0].message for _ in range(3)]
    assert len(set(messages)) == 1 and "RRR" in messages[0] and "0x...>" in messages[0]


FAILURES = """\
import unittest

import pytest


class Odd(Exception):
    def __str__(self):
        return "first line\\nsecond line"


def hidden_helper():
    __tracebackhide__ = True
    raise Odd


def deep(n):
    return deep(n + 1)


@pytest.fixture
def broken():
    raise LookupError("no such thing")


def test_compares():
    assert {"a": [1, 2, 3]} == {"a": [1, 2, 4]}


def test_chains():
    try:
        [][1]
    except IndexError as error:
        raise ValueError("outer") from error


def test_hides():
    hidden_helper()


def test_recurses():
    deep(0)


def test_fails_plainly():
    pytest.fail("a reason", pytrace=False)


def test_setup(broken):
    pass


def test_unknown_fixture(absent):
    pass


def test_groups():
    raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])


def test_evaluates():
    eval("1 / 0")


def test_exits():
    raise SystemExit(3)


class TestUnit(unittest.TestCase):
    def test_equal(self):
        self.assertEqual([1], [2], "lists differ")
"""
PLUGIN = """\
from envd.sandbox.runner import _message


def pytest_runtest_logreport(report):
    if not report.passed:
        print("SEEN", repr([report.nodeid, _message(report, "/no")]))
"""


def test_messages_are_those_of_whole_tracebacks(namespaces: Harness, tmp_path: Path) -> None:
    (tmp_path / "test_failures.py").write_text(FAILURES)
    (tmp_path / "messages.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-p", "messages", "-s", "--tb=long"]
    said = subprocess.run(
        [*command, "--import-mode=importlib", "test_failures.py"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{Path(envd.client.__file__).parents[1]}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    whole = dict(ast.literal_eval(line.partition("SEEN ")[2]) for line in said.stdout.splitlines() if "SEEN [" in line)
    assert len(whole) == FAILURES.count("def test_")
    found = namespaces.verify({}, hidden={"test_failures.py": FAILURES.encode()}, tests=tuple(whole))
    assert {each.name: each.message for each in found.outcomes} == whole


def test_a_link_out_of_the_workspace_does_not_catch_a_hidden_file(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> VerifyResult:
        template = await client.put_template(FILES)
        sandbox = await client.create(template)
        await sandbox.call(FIX)
        await sandbox.call(ToolCall("exec", {"command": "rm -r tests; ln -s /tmp tests"}))
        return await client.verify(template, await sandbox.finish(), HIDDEN, TESTS)

    assert statuses(namespaces.client(job)) == ["passed", "passed"]


def test_a_task_with_a_src_folder_and_conftest_files_runs_as_its_authors_run_it(anywhere: Harness) -> None:
    files = {
        "src/pack/__init__.py": b"def add(a, b):\n    return a + b\n",
        "tests/conftest.py": b"import pytest\n\n\n@pytest.fixture\ndef one():\n    return 1\n",
    }
    hidden = {"tests/unit/test_pack.py": b"from pack import add\n\n\ndef test_one(one):\n    assert add(one, 1) == 2\n"}
    tests = ("tests/unit/test_pack.py::test_one",)
    assert statuses(anywhere.verify({}, files=files, hidden=hidden, tests=tests)) == ["passed"]
    cheat = {"tests/conftest.py": CHEATS["conftest marks all passed"]["conftest.py"]}
    cheat["src/pack/__init__.py"] = "def add(a, b):\n    return 0\n"
    cheat["tests/unit/conftest.py"] = cheat["tests/conftest.py"]
    assert statuses(anywhere.verify(cheat, files=files, hidden=hidden, tests=tests)) == ["failed"]


def test_hypothesis_draws_the_same_examples_and_does_not_search_for_a_simpler_failure(namespaces: Harness) -> None:
    text = """\
from hypothesis import given, settings
from hypothesis import strategies as st

from calc import add

calls = []


@settings(max_examples=50, database=None, deadline=None)
@given(st.lists(st.integers(), min_size=20))
def test_sum(numbers):
    calls.append(numbers)
    assert add(sum(numbers), 1) == sum(numbers) + 1 or len(calls) > 3


def test_calls():
    assert len(calls) == {}
"""
    tests = ("tests/test_hidden.py::test_sum", "tests/test_hidden.py::test_calls")
    failed = namespaces.verify({}, hidden={"tests/test_hidden.py": text.format(2).encode()}, tests=tests)
    assert statuses(failed) == ["failed", "passed"]  # found, and shown once more
    passed = namespaces.verify(
        {"calc.py": RIGHT}, hidden={"tests/test_hidden.py": text.format(50).encode()}, tests=tests
    )
    assert statuses(passed) == ["passed", "passed"]
    drawn = text.replace("assert len(calls) == {}", "assert not calls, sum(map(sum, calls))")
    hidden = {"tests/test_hidden.py": drawn.encode()}
    runs = [namespaces.verify({"calc.py": RIGHT}, hidden=hidden, tests=tests) for _ in range(2)]
    assert statuses(runs[0]) == ["passed", "failed"] and runs[0].outcomes[1].message == runs[1].outcomes[1].message
