"""The task factory in real sandboxes, over a small planted package: unstable tests, screen, proof, resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from with_client import check_agents, with_client

from contracts.artifacts import list_artifacts
from contracts.store import Store, open_store
from contracts.tasks import Split, Task
from curation.endpoint import Endpoint
from curation.errors import TaskError
from curation.tasks.factory import prove
from curation.tasks.factory.baseline import run_baseline
from curation.tasks.factory.environment import surroundings_of
from curation.tasks.factory.functions import product_sources
from curation.tasks.factory.guest import Guest
from curation.tasks.factory.make import MakeConfig, covered_functions, make_suite
from curation.tasks.factory.screen import CHUNK, Substitute, emptied_function, screen
from curation.tasks.factory.source import read_repository
from curation.tasks.factory.strategies import Context, strategy_named
from curation.tasks.factory.strategies.asked import Model
from curation.tasks.importing.splits import DEFAULT_SHARES
from curation.tasks.inspect import suite_tasks
from envd.client import SandboxClient
from envd.local import TRUSTED, LocalEnvd
from tests.curation.judge_server import Reply, judge_server, said

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

TEXT = '''\
def squeeze(text, most=2):
    """Shorten runs of equal characters."""
    found = []
    for each in text:
        if len(found) >= most and found[-most:] == [each] * most:
            continue
        found.append(each)
    return "".join(found)


def title(words, stop=("of", "the")):
    """Capitalize all words but small ones."""
    return " ".join(word if word in stop else word.capitalize() for word in words.split())
'''
NUMBERS = '''\
def clamp(value, low=0, high=10):
    """Keep value within bounds."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def mean(values):
    """Arithmetic mean; None without values."""
    if not values:
        return None
    return sum(values) / len(values)
'''
TESTS = {
    "tests/test_text.py": """\
from pack.text import squeeze, title


def test_squeeze():
    assert squeeze("aaab") == "aab"
    assert squeeze("aaab", 1) == "ab"


def test_title():
    assert title("lord of the rings") == "Lord of the Rings"


def test_title_empty():
    assert title("") == ""
""",
    "tests/test_numbers.py": """\
import pytest

from pack.numbers import clamp, mean


@pytest.mark.parametrize(("value", "want"), [(-1, 0), (0, 0), (5, 5), (10, 10), (11, 10)])
def test_clamp(value, want):
    assert clamp(value) == want


def test_clamp_low():
    assert clamp(1, low=3) == 3


def test_mean():
    assert mean([1, 2]) == 1.5
    assert mean([]) is None
""",
}
THREADS = """\
import threading


def test_many_threads_reserve_more_addresses_than_a_run_may_use_memory():
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(40)]
    for each in threads:
        each.start()
    done.set()
    for each in threads:
        each.join()
    assert done.is_set()
"""
_SHARED = "import tests.shared as s\n\n\n"
UNSTABLE = {
    "order": (
        "another order",
        f"{_SHARED}def test_order():\n    s.seen.append(1)\n    assert len(s.seen) == 1\n\n\n"
        "def test_order_second():\n    s.seen.append(1)\n    assert len(s.seen) == 2\n",
    ),
    "hash": ("another hash seed", "def test_hash():\n    assert hash('some text') % 1009 == PARITY\n"),
    "zone": ("another time zone", "import time\n\n\ndef test_zone():\n    assert time.localtime(0).tm_hour == 0\n"),
    "alone": (
        "alone",
        f"{_SHARED}def test_first():\n    s.ready = True\n\n\n"
        "def test_follows():\n    assert getattr(s, 'ready', False)\n",
    ),
    "random": (
        "unstable",
        "import random\nimport pytest\n\n\n@pytest.mark.parametrize('n', range(8))\n"
        "def test_random(n):\n    assert random.random() < 0.5\n",
    ),
    "endless": ("endless", "def test_spins():\n    while True:\n        pass\n"),
    "waits": (
        "endless: ended by waiting",
        "import threading\n\n\ndef test_waits():\n    assert threading.Event().wait()\n",
    ),
    "kills": ("kills", "import os\n\n\ndef test_kills():\n    os._exit(3)\n"),
}
"""File of an unstable test: words of the cause that names it, and its text."""


def package(root: Path, more: dict[str, str] | None = None) -> Path:
    files = {
        "LICENSE": "Permission is hereby granted, free of charge, to any person",
        "pack/__init__.py": "",
        "pack/text.py": TEXT,
        "pack/numbers.py": NUMBERS,
        **TESTS,
        **(more or {}),
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture(scope="module")
def trusted() -> object:
    with LocalEnvd(rules=TRUSTED) as envd:
        yield envd.address


def made(source: Path, store: Store, address: str, **settings: object) -> str:
    config = MakeConfig(**settings)  # type: ignore[arg-type]
    return with_client(
        address, lambda client: make_suite(str(source), config, DEFAULT_SHARES, store, client)
    ).ref.digest


def test_tasks_of_a_package_are_solved_by_their_reference_alone(tmp_path: Path, trusted: str) -> None:
    source, store = package(tmp_path / "pack"), open_store(str(tmp_path / "store"))
    made(source, store, trusted, count=10, strategies=("mutate", "remove", "combine"))
    (suite,) = list_artifacts(store, "task_suite")
    tasks = list(suite_tasks(suite, None).values())
    assert len(tasks) == 10
    stored = {row["path"] for row in suite.table("tasks.parquet").column("files").to_pylist()[0]}
    assert "LICENSE" in tasks[0].files and "LICENSE" not in stored, "the tree is stored once, tasks as overlays"
    assert {task.environment.timeout_s for task in tasks} == {None}, "their tests are fast"
    places = {str(task.meta["path"]): task.split for task in tasks}
    assert len(set(places.values())) == 2 == len(places), "one file, one split"
    assert {str(task.meta["strategy"]) for task in tasks} == {"mutate", "remove", "combine"}
    for task in tasks:
        check_task(task, source)
    check_agents(tasks, store, trusted)
    again = open_store(str(tmp_path / "again"))
    assert made(source, again, trusted, count=10, strategies=("mutate", "remove", "combine")) == suite.ref.digest


def test_a_model_that_errs_makes_tasks_and_is_asked_once(tmp_path: Path, trusted: str) -> None:
    source, store = package(tmp_path / "pack"), open_store(str(tmp_path / "store"))
    wrong = {
        "squeeze": "def squeeze(text, most=2):\n    return text[:most]\n",
        "mean": "def mean(values):\n    return sum(values) / len(values)\n",
        "clamp": "def clamp(value, low=1, high=10, step=1):\n    return min(max(value, low), high) // step\n",
    }

    def behave(path: str, body: dict[str, Any]) -> Reply:
        asked = body["messages"][1]["content"].partition("\n")[0]
        name = next((each for each in wrong if f" {each}" in asked), "")
        return said(f"```python\n{wrong.get(name, 'no idea')}```")

    with judge_server(behave) as server:
        model = Model(name="writer", endpoint=Endpoint(url=f"{server.url}/v1"))
        made(source, store, trusted, count=6, strategies=("rewrite", "feature"), model=model)
        asked, (suite,) = len(server.asked), list_artifacts(store, "task_suite")
        made(
            source, store, trusted, count=5, strategies=("rewrite", "feature"), model=model
        )  # its replies are found in the store
        assert 0 < asked == len(server.asked)
    tasks = list(suite_tasks(suite, None).values())
    assert {task.family for task in tasks} == {"rewrite/rewrite_function", "feature/feature_function"}
    assert {task.meta["function"] for task in tasks} >= {"pack/text.py::squeeze", "pack/numbers.py::clamp"}
    check_agents(tasks, store, trusted)


def test_more_candidates_than_one_sandbox_screens_give_tasks(tmp_path: Path, trusted: str) -> None:
    functions = "".join(
        f"def scaled_{n}(value, low=0):\n    if value < low:\n        return low\n    return value * {n} + low\n\n\n"
        for n in range(2, 42)
    )
    tests = "from pack import scaled\n\n\n" + "".join(
        f"def test_scaled_{n}():\n    assert [scaled.scaled_{n}(v) for v in (-1, 0, 2)] == [0, 0, {2 * n}]\n\n\n"
        for n in range(2, 42)
    )
    source = package(tmp_path / "pack", {"pack/scaled.py": functions, "tests/test_scaled.py": tests})
    store = open_store(str(tmp_path / "store"))
    repository = read_repository(str(source), store)

    async def screened(client: SandboxClient) -> float:
        guest = Guest(client, repository.tree, surroundings_of(repository, store))
        baseline = await run_baseline(repository, guest, store)
        found = covered_functions(product_sources(repository.tree)[0], baseline)
        context = Context(repository, found, baseline.lines, 0, 8, None)
        candidates = list(strategy_named("mutate")(context))
        assert len(candidates) > CHUNK
        kept = await screen(candidates, {each.key: each for each in found}, baseline, guest, store)
        return len(kept.kept) / len(candidates)

    assert with_client(trusted, screened) > 0.5


def test_the_screen_tells_which_tests_notice_a_function_that_does_nothing(tmp_path: Path, trusted: str) -> None:
    code = (
        "def add(a, b):\n    return a + b\n\n\n"
        "def remember(value, kept=[]):\n    kept.append(value)\n    return None\n\n\n"
        "def step(value):\n    return value - 1\n\n\n"
        "def count_down(value):\n    while value is None or value > 0:\n        value = step(value)\n    return value\n"
    )
    test = (
        "from pack.steps import add, count_down, remember\n\n\n"
        "def test_add():\n    assert add(1, 2) == 3\n\n\n"
        "def test_add_is_called():\n    add(1, 2)\n\n\n"
        "def test_remember():\n    assert remember(1) is None\n\n\n"
        "def test_count_down():\n    assert count_down(3) == 0\n"
    )
    source = package(tmp_path / "pack", {"pack/steps.py": code, "tests/test_steps.py": test})
    store = open_store(str(tmp_path / "store"))
    repository = read_repository(str(source), store)

    async def screened(client: SandboxClient) -> dict[str, Substitute]:
        guest = Guest(client, repository.tree, surroundings_of(repository, store))
        baseline = await run_baseline(repository, guest, store)
        found = {each.key: each for each in covered_functions(product_sources(repository.tree)[0], baseline)}
        asked = [emptied_function(each) for each in found.values()]
        screening = await screen([], found, baseline, guest, store, substitutes=asked)
        assert screening.kept == [] and screening.reasons == {}
        return {each.candidate.function: each for each in screening.substitutes}

    found = with_client(trusted, screened)
    tests = {
        name: sorted(test.split("::")[1] for test in found[f"pack/steps.py::{name}"].failed)
        for name in ("add", "remember", "step", "count_down")
    }
    assert tests == {
        "add": ["test_add"],
        "remember": [],
        "step": ["test_count_down"],
        "count_down": ["test_count_down"],
    }
    ended = {name: found[f"pack/steps.py::{name}"].ended for name in tests}
    assert ended == {"add": True, "remember": True, "step": False, "count_down": True}, "step is called for ever"


def test_a_function_whose_namesake_elsewhere_passes_its_tests_makes_no_task(tmp_path: Path, trusted: str) -> None:
    code = (
        "def isleap(year):\n    if year % 400 == 0:\n        return True\n"
        "    return year % 4 == 0 and year % 100 != 0\n\n\n"
        "def monthrange(year, month):\n    days = 28 + isleap(year)\n    return days if month == 2 else 31\n"
    )
    test = (
        "from pack.dates import isleap, monthrange\n\n\n"
        "def test_isleap():\n    assert [isleap(year) for year in (1900, 2000, 2023, 2024)] == [0, 1, 0, 1]\n\n\n"
        "def test_monthrange():\n    assert [monthrange(2024, month) for month in (1, 2)] == [31, 29]\n"
    )
    source = package(tmp_path / "pack", {"pack/dates.py": code, "tests/test_dates.py": test})
    store = open_store(str(tmp_path / "store"))
    made(source, store, trusted, count=12)
    (suite,) = list_artifacts(store, "task_suite")
    of_dates = [task for task in suite_tasks(suite, None).values() if task.meta["path"] == "pack/dates.py"]
    assert of_dates and {task.meta["function"] for task in of_dates} == {"pack/dates.py::monthrange"}
    assert suite.json("card.json")["left_out"]["leak: a function of the same name passes its tests"] > 0


def test_a_fix_that_looks_at_frames_solves_its_task(tmp_path: Path, trusted: str) -> None:
    frames = (
        "import sys\n\n\n"
        "def caller():\n    frame = sys._getframe(1)\n    name = frame.f_code.co_name\n    return name\n"
    )
    test = "from pack.frames import caller\n\n\ndef test_caller():\n    assert caller() == 'test_caller'\n"
    source = package(tmp_path / "pack", {"pack/frames.py": frames, "tests/test_frames.py": test})
    store = open_store(str(tmp_path / "store"))
    made(source, store, trusted, count=5, strategies=("remove",))
    (suite,) = list_artifacts(store, "task_suite")
    tasks = [task for task in suite_tasks(suite, None).values() if task.meta["path"] == "pack/frames.py"]
    assert tasks, suite.json("card.json")["left_out"]
    check_agents(tasks, store, trusted)


def test_inherited_and_waiting_tests_in_several_files_give_tasks(tmp_path: Path, trusted: str) -> None:
    more = {
        "pack/box.py": (
            "import threading\n\n\nclass Box:\n    def __init__(self):\n        self.lock = threading.Lock()\n"
            "        self.items = []\n\n    def put(self, item):\n        with self.lock:\n"
            "            self.items.append(item)\n        return len(self.items)\n"
        ),
        "tests/common.py": (
            "class Puts:\n    def test_put(self):\n        assert self.box().put(1) == 1\n\n"
            "    def test_put_twice(self):\n        box = self.box()\n"
            "        assert [box.put(1), box.put(2)] == [1, 2]\n"
        ),
        **{
            f"tests/test_box_{name}.py": (
                "from tests.common import Puts\nfrom pack.box import Box\n\n\n"
                f"class Test{name.title()}(Puts):\n    box = Box\n"
            )
            for name in ("a", "b")
        },
    }
    source, store = package(tmp_path / "pack", more), open_store(str(tmp_path / "store"))
    made(source, store, trusted, count=30, strategies=("mutate", "remove"))
    (suite,) = list_artifacts(store, "task_suite")
    tasks = [task for task in suite_tasks(suite, None).values() if task.meta["path"] == "pack/box.py"]
    assert tasks, suite.json("card.json")["left_out"]
    for task in tasks:
        (file,) = {test.split("::")[0] for test in task.meta["fail_to_pass"] + task.meta["pass_to_pass"]}
        assert set(task.hidden_files) == {"tests/common.py", file}
    check_agents(tasks, store, trusted)


def test_a_function_that_does_nothing_solves_no_task(tmp_path: Path, trusted: str) -> None:
    """Tests that only call a function notice bugs that raise, and not that nothing is left of it."""
    limits = (
        'def check(value, most=10):\n    """Raise ValueError above the limit."""\n    total = value + 1\n'
        "    if total > most:\n        raise ValueError(value)\n"
    )
    called = "from pack.limits import check\n\n\ndef test_check():\n    check(1)\n    check(3)\n"
    raising = called.replace("    check(3)\n", "") + (
        "\n\ndef test_check_raises():\n    try:\n        check(99)\n    except ValueError:\n        return\n"
        "    assert check is None\n"
    )
    for name, test, tasks in (("called", called, False), ("raising", raising, True)):
        source = package(tmp_path / name, {"pack/limits.py": limits, "tests/test_limits.py": test})
        store = open_store(str(tmp_path / f"store-{name}"))
        made(source, store, trusted, count=40, strategies=("mutate", "remove"))
        (suite,) = list_artifacts(store, "task_suite")
        assert any(task.meta["path"] == "pack/limits.py" for task in suite_tasks(suite, None).values()) == tasks
        left_out = suite.json("card.json")["left_out"]
        assert ("verdict: a function that does nothing passes its tests" in left_out) != tasks, left_out


def check_task(task: Task, source: Path) -> None:
    """The agent gets neither the failing tests nor a line of the fix."""
    for test in task.meta["fail_to_pass"]:
        path, _, name = test.partition("::")
        assert f"def {name}(" not in task.files[path].decode()
        assert f"def {name}(" in task.hidden_files[path].decode()
    lines = task.reference_diff.decode().split("\n")
    added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert added and not any(line in task.instruction.split("\n") for line in added if line)
    assert task.split in Split and task.files["pack/text.py"] + task.files["pack/numbers.py"] != (
        (source / "pack/text.py").read_bytes() + (source / "pack/numbers.py").read_bytes()
    )


def test_unstable_tests_are_named_with_their_cause_and_never_used(tmp_path: Path, trusted: str) -> None:
    code = "print(hash('some text') % 1009, end='')"
    parity = subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": "0"}, text=True)
    files = {f"tests/test_unstable_{name}.py": text.replace("PARITY", parity) for name, (_, text) in UNSTABLE.items()}
    more = {f"tests/test_more_{n}.py": f"def test_more_{n}():\n    assert {n} == {n}\n" for n in range(30)}
    more["tests/test_threads.py"] = THREADS
    source = package(tmp_path / "pack", {**files, **more, "tests/shared.py": "seen = []\n", "tests/__init__.py": ""})
    store = open_store(str(tmp_path / "store"))
    repository = read_repository(str(source), store)
    baseline = with_client(
        trusted,
        lambda client: run_baseline(
            repository, Guest(client, repository.tree, surroundings_of(repository, store)), store
        ),
    )
    for name, (words, _) in UNSTABLE.items():
        causes = [cause for test, cause in baseline.bad.items() if f"test_unstable_{name}.py" in test]
        assert any(words in cause for cause in causes), (name, baseline.bad)
    assert "tests/test_text.py::test_squeeze" in baseline.good
    assert any("test_threads.py" in test for test in baseline.good)
    assert "tests/test_text.py::test_squeeze" in baseline.lines.tests("pack/text.py", 1, 9)
    assert {test for test in baseline.good if "unstable" in test} <= {"tests/test_unstable_alone.py::test_first"}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no tests: files named"),
        ({"test_a.py": "import nothing_here\n"}, "only 0 of 1 tests .* No module named 'nothing_here'"),
        ({"test_a.py": "def test_a():\n    assert 1 == 2\n"}, "only 0 of 1 tests .* failed: assert 1 == 2"),
        ({"test_a.py": "def test_a():\n    assert 1\n"}, "has no function that its tests run"),
        (
            {"test_a.py": "def test_a():\n    assert 1\n", "dos.py": "def one():\r\n    return 1\r\n"},
            "no function that its tests run.*; dos.py is not used: it has carriage returns",
        ),
    ],
)
def test_unusable_repository_is_one_clear_error(
    files: dict[str, str], words: str, tmp_path: Path, trusted: str
) -> None:
    source, store = tmp_path / "pack", open_store(str(tmp_path / "store"))
    source.mkdir()
    for path, text in {"LICENSE": "permission is hereby granted, free of charge", **files}.items():
        (source / path).write_text(text)
    with pytest.raises(TaskError, match=words) as raised:
        made(source, store, trusted, count=2)
    assert "\n" not in str(raised.value)
    assert not list(list_artifacts(store, "task_suite"))


def test_killed_command_resumes_to_the_same_digest(tmp_path: Path) -> None:
    source = package(tmp_path / "pack")

    def command(store: str) -> list[str]:
        module = [sys.executable, "-m", "triplane_dagster.cli", "--store", str(tmp_path / store)]
        return [*module, "tasks", "make", str(source), "--count", "4", "--strategy", "mutate", "--json"]

    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    began = time.monotonic()
    whole = subprocess.run(command("whole"), env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    seconds = time.monotonic() - began
    for share in (0.5, 0.75, 0.9):
        process = subprocess.Popen(command("killed"), env=environment, stdout=subprocess.DEVNULL, cwd=tmp_path)
        try:
            process.wait(timeout=seconds * share)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    resumed = subprocess.run(
        command("killed"), env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert json.loads(resumed.stdout)["digest"] == json.loads(whole.stdout)["digest"]


def test_tasks_of_slow_tests_have_the_deadline_of_their_proof(
    tmp_path: Path, trusted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "SLOW_S", 0.0)
    source, store = package(tmp_path / "pack"), open_store(str(tmp_path / "store"))
    made(source, store, trusted, count=2, strategies=("mutate",))
    (suite,) = list_artifacts(store, "task_suite")
    tasks = list(suite_tasks(suite, None).values())
    assert [task.environment.timeout_s for task in tasks] == [prove.VERIFY_TIMEOUT_S] * 2
    for task in tasks:
        check_task(task, source)


def test_proof_beyond_its_time_is_a_named_reason(tmp_path: Path, trusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "PROOF_S", 0.01)
    source, store = package(tmp_path / "pack"), open_store(str(tmp_path / "store"))
    with pytest.raises(TaskError, match="the proof of its test file takes longer than"):
        made(source, store, trusted, count=4, strategies=("mutate",))
    assert not list(list_artifacts(store, "task_suite"))
