"""The verifier against a real envd server, and against a grader that shares nothing with it."""

import asyncio
import base64
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from contracts.store import LocalStore
from contracts.tasks import Split, Task
from curation.tasks.bugs import file_diff
from curation.verdicts import Verdict, read_verdict, verdict_key
from curation.verify import Verifier
from envd.backends import BACKENDS
from envd.client import SandboxClient, ToolCall
from envd.local import LocalEnvd
from envd.types import VerifyResult

MODULE = b"def larger(mita, rovo):\n    return mita + rovo\n"
HIDDEN = b"""from app import larger

def test_first():
    assert larger(3, 2) == 3

def test_second():
    assert larger(-1, 4) == 4

def test_equal():
    assert larger(2, 2) == 2
"""
TASK = Task(
    "larger-0",
    "larger",
    Split.TRAIN,
    "fix app.py: larger returns the larger of mita and rovo",
    {"app.py": MODULE, "README.md": b"One function.\n"},
    {"tests/test_hidden.py": HIDDEN},
    tuple(f"tests/test_hidden.py::test_{name}" for name in ("first", "second", "equal")),
    b"",
    {},
)

RIGHT = ToolCall("edit", {"path": "app.py", "line": 2, "new": "    return max(mita, rovo)"})
EPISODES: Mapping[str, list[ToolCall]] = {
    "untouched": [],
    "right": [RIGHT],
    "right with a new file": [RIGHT, ToolCall("write", {"path": "notes/why.txt", "content": "max"})],
    "right and renamed": [RIGHT, ToolCall("exec", {"command": "git mv README.md READ; printf '\\0\\377' > blob"})],
    "wrong": [ToolCall("edit", {"path": "app.py", "line": 2, "new": "    return min(mita, rovo)"})],
    "half right": [ToolCall("edit", {"path": "app.py", "line": 2, "new": "    return mita if mita > 0 else rovo + 1"})],
    "syntax error": [ToolCall("edit", {"path": "app.py", "line": 2, "new": "    return max("})],
    "module gone": [ToolCall("exec", {"command": "rm app.py"})],
    "exits": [ToolCall("write", {"path": "app.py", "content": "import os\nos._exit(0)\n"})],
    "skips": [
        ToolCall("write", {"path": "app.py", "content": "import pytest\npytest.skip(allow_module_level=True)\n"})
    ],
    "own tests": [ToolCall("write", {"path": "tests/test_hidden.py", "content": "def test_first():\n    pass\n"})],
    "conftest": [
        ToolCall(
            "write",
            {
                "path": "conftest.py",
                "content": (
                    "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_makereport(item, call):\n   "
                    " return pytest.TestReport.from_item_and_call(item, pytest.CallInfo.from_call(lambda: None,"
                    " when=call.when))\n"
                ),
            },
        )
    ],
}
SOLVED = {"right", "right with a new file", "right and renamed"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LocalEnvd() as envd:
        yield envd.address


async def play(client: SandboxClient, calls: list[ToolCall]) -> bytes:
    sandbox = await client.create(await client.put_template(TASK.files))
    for call in calls:
        outcome = await sandbox.call(call)
        assert outcome.ok, outcome.text
    return await sandbox.finish()


@pytest.fixture(scope="module")
def diffs(address: str) -> dict[str, bytes]:
    async def run() -> dict[str, bytes]:
        async with SandboxClient(address) as client:
            played = await asyncio.gather(*(play(client, calls) for calls in EPISODES.values()))
            return {
                **dict(zip(EPISODES, played, strict=True)),
                "does not apply": b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
            }

    return asyncio.run(run())


class Counting(SandboxClient):
    """Notes how each verification of a final state ended: its exit, or the name of its error."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.ends: dict[bytes, list[str]] = {}
        self.asked = 0

    async def verify(self, template: str, diff: bytes, *asked: Any, **options: Any) -> VerifyResult:
        ends = self.ends.setdefault(diff, [])
        self.asked += 1
        try:
            result = await super().verify(template, diff, *asked, **options)
        except Exception as error:
            ends.append(type(error).__name__)
            raise
        ends.append(result.exit)
        return result


def grade(
    address: str, diffs: Mapping[str, bytes], store: LocalStore
) -> tuple[dict[str, Verdict], dict[bytes, list[str]]]:
    """The verdicts, and how the verifications behind them ended."""

    async def run() -> tuple[dict[str, Verdict], dict[bytes, list[str]]]:
        async with Counting(address) as client:
            verifier = Verifier(client, store)
            verdicts = await asyncio.gather(*(verifier.grade(TASK, diff) for diff in diffs.values()))
            assert verifier.runs == client.asked
            return dict(zip(diffs, verdicts, strict=True)), client.ends

    return asyncio.run(run())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    return LocalStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def verdicts(address: str, diffs: dict[str, bytes], store: LocalStore) -> dict[str, Verdict]:
    found, ends = grade(address, diffs, store)
    assert len(ends) == len(set(diffs.values())) == len(store.list("verdicts/"))
    names = {diff: name for name, diff in diffs.items()}
    for diff, (*before, last) in ends.items():
        # once more only after what a busy machine may have brought about, not the final state: the clock, a kill, a
        # fault; beside that, runs that doubt a state whose tests passed
        if not found[names[diff]].solved and diff != TASK.reference_diff:
            assert not {"completed", "apply_failed"} & set(before), (diff, ends[diff])
        again = [end for end in before if end in ("crashed", "timed_out")]
        assert len(again) == 1 if last in ("crashed", "timed_out") else len(again) <= 1, (diff, ends[diff])
    return found


@pytest.mark.slow
def test_stored_verdict_names_the_backend_of_its_run(
    diffs: dict[str, bytes], store: LocalStore, verdicts: dict[str, Verdict]
) -> None:
    stored = read_verdict(store, verdict_key(TASK, diffs["right"]))
    assert stored is not None and stored.backend == verdicts["right"].backend
    assert stored.backend in BACKENDS


def test_only_final_states_that_pass_every_hidden_test_are_solved(verdicts: dict[str, Verdict]) -> None:
    assert {name for name, verdict in verdicts.items() if verdict.solved} == SOLVED
    assert (verdicts["half right"].tests_passed, verdicts["half right"].tests_total) == (2, 3)
    assert [test.status for test in verdicts["exits"].tests] == ["missing"] * 3
    assert verdicts["does not apply"].exit == "apply_failed"


def test_a_second_grading_reads_the_store_and_runs_nothing(
    address: str, diffs: dict[str, bytes], store: LocalStore, verdicts: dict[str, Verdict]
) -> None:
    assert grade(address, diffs, store) == (verdicts, {})


def test_verdicts_are_the_same_bytes_in_another_store(
    address: str, diffs: dict[str, bytes], store: LocalStore, verdicts: dict[str, Verdict], tmp_path: Path
) -> None:
    some = {name: diffs[name] for name in ("half right", "syntax error", "exits", "conftest", "does not apply")}
    other = LocalStore(tmp_path)
    grade(address, some, other)
    for name, diff in some.items():
        assert store.get(verdict_key(TASK, diff)) == other.get(verdict_key(TASK, diff)), name


def test_an_endless_loop_is_failed_and_not_remembered(address: str, tmp_path: Path) -> None:
    async def run() -> tuple[Verdict, int]:
        async with SandboxClient(address) as client:
            loop = ToolCall("edit", {"path": "app.py", "line": 2, "new": "    while True: pass"})
            verifier = Verifier(client, LocalStore(tmp_path), timeout_s=0.5)
            return await verifier.grade(TASK, await play(client, [loop])), verifier.runs

    verdict, runs = asyncio.run(run())
    assert (verdict.solved, verdict.exit, runs, LocalStore(tmp_path).list("verdicts/")) == (False, "timed_out", 2, [])


def test_a_task_that_declares_deliverables_is_graded_by_them_and_under_another_key(
    address: str, diffs: dict[str, bytes]
) -> None:
    declares, others = (dataclasses.replace(TASK, deliverables=(each,)) for each in ("app.py", "*.md"))

    async def run() -> list[bool]:
        async with SandboxClient(address) as client:
            verifier = Verifier(client, None)
            return [(await verifier.grade(task, diffs["right"])).solved for task in (TASK, declares, others)]

    assert asyncio.run(run()) == [True, True, False]
    assert len({verdict_key(task, diffs["right"]) for task in (TASK, declares, others)}) == 3


def test_independent_grader_agrees(diffs: dict[str, bytes], verdicts: dict[str, Verdict], tmp_path: Path) -> None:
    names = ["right", "right and renamed", "half right", "exits", "skips", "conftest", "does not apply"]

    def coded(files: Mapping[str, bytes]) -> dict[str, str]:
        return {path: base64.b64encode(data).decode() for path, data in files.items()}

    episodes = [
        {
            "id": name.replace(" ", "-"),
            "files": coded(TASK.files),
            "diff": base64.b64encode(diffs[name]).decode(),
            "hidden_files": coded(TASK.hidden_files),
            "tests": list(TASK.tests),
        }
        for name in names
    ]
    (tmp_path / "episodes.json").write_text(json.dumps(episodes))
    script = Path(__file__).with_name("regrade_independent.py")
    command = [sys.executable, "-I", str(script), str(tmp_path / "episodes.json")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.splitlines()
    assert [line.split()[1] == "passed" for line in lines] == [verdicts[name].solved for name in names]


SUBTESTS = b"""import unittest

from app import larger


class Larger(unittest.TestCase):
    def test_all(self):
        for left, right, want in ((3, 2, 3), (-1, 4, 4), (2, 2, 2)):
            with self.subTest(left=left, right=right):
                self.assertEqual(larger(left, right), want)


def test_fixture(subtests):
    for left, right, want in ((3, 2, 3), (-1, 4, 4), (2, 2, 2)):
        with subtests.test(left=left):
            assert larger(left, right) == want
"""
SWALLOWERS = {
    "subTest": (
        "import contextlib, unittest\n\n@contextlib.contextmanager\ndef quiet(self, *args, **named):\n"
        "    with contextlib.suppress(BaseException):\n        yield\n\nunittest.TestCase.subTest = quiet\n"
    ),
    "reports": (
        "import _pytest.subtests as found\n\nnew = found.SubtestReport._new.__func__\n\n"
        "def forged(cls, *args, **named):\n"
        "    made = new(cls, *args, **named)\n    made.outcome, made.longrepr = 'passed', None\n    return made\n\n"
        "found.SubtestReport._new = classmethod(forged)\n"
    ),
    "contexts": "import _pytest.subtests as found\n\nfound._SubTestContextManager.__exit__ = lambda *args: True\n",
    "collector": "import _pytest.unittest as found\n\nfound.TestCaseFunction.addSubTest = lambda *args: None\n",
    "all reports": "import pytest\n\npytest.TestReport.__name__ = 'SubtestReport'\n",
    "skips": "import unittest\n\ndef larger(mita, rovo):\n    raise unittest.SkipTest('no')\n",
}


def test_swallowed_subtests_solve_nothing(address: str) -> None:
    right = "def larger(mita, rovo):\n    return max(mita, rovo)\n"
    names = ("tests/test_hidden.py::Larger::test_all", "tests/test_hidden.py::test_fixture")
    reference = file_diff("app.py", MODULE.decode(), right)
    task = dataclasses.replace(
        TASK, hidden_files={"tests/test_hidden.py": SUBTESTS}, tests=names, reference_diff=reference
    )
    states = {name: text if "def larger" in text else text + MODULE.decode() for name, text in SWALLOWERS.items()}

    async def run() -> dict[str, Verdict]:
        async with SandboxClient(address) as client:
            verifier = Verifier(client, None)
            diffs = {name: file_diff("app.py", MODULE.decode(), text) for name, text in states.items()}
            diffs |= {"right": reference, "untouched": b""}
            return {name: await verifier.grade(task, diff) for name, diff in diffs.items()}

    verdicts = asyncio.run(run())
    assert {name for name, verdict in verdicts.items() if verdict.solved} == {"right"}
    assert {test.status for test in verdicts["untouched"].tests} == {"failed"}
