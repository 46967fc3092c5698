"""Expected values that are functions of `math` or hidden files count as literals: no observed run has them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.tasks import Checks, Observed, Split, Task
from curation.tasks.checks import decoys, observing
from curation.tasks.checks.mentions import candidates
from curation.tasks.checks.values import MOST_BYTES
from curation.tasks.importing.trees import tree_patch
from curation.verdicts import Verdict
from curation.verify import Verifier
from envd.client import SandboxClient
from envd.local import LocalEnvd

HEAD = """import io, json, math, os
import math as m
import os.path as osp
from math import pi, sqrt as root
from pathlib import Path

import pytest
from out import f

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden.txt"
"""
DATA = {
    "tests/golden.txt": "a\r\né: 5010\n".encode(),
    "tests/data/want.json": b'{"rows": [1, null, 2.5], "name": "x5010"}\n',
    "tests/other.txt": b"other 5010",
}
TEXT, WANT = "a\né: 5010\n", {"rows": [1, None, 2.5], "name": "x5010"}


def suite(body: str, head: str = HEAD) -> dict[str, bytes]:
    return {"tests/test_it.py": f"{head}\n\n{body}\n".encode()}


def case_of(check: str, head: str = HEAD) -> dict[str, bytes]:
    return suite(f"def test_it(tmp_path):\n    {check}", head)


def wants(made: Observed) -> list[object]:
    """Expected values of the rules, in order."""
    return [eval(rule.want) if rule.want else None for rule in made.rules.values()]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("math.pi", math.pi),
        ("-m.tau / 4", -math.tau / 4),
        ("pi", math.pi),
        ("root(2)", math.sqrt(2)),
        ("2 * math.sqrt(3) - 1", 2 * math.sqrt(3) - 1),
        ("math.gcd(12, 18)", 6),
        ("-math.inf", -math.inf),
        ("[math.e, {'a': (root(5), 1)}]", [math.e, {"a": (math.sqrt(5), 1)}]),
        ("1 / 3", 1 / 3),
        ("2 ** 70 + 60 * 60", 2**70 + 3600),
        ("7 // 2 % 2", 1),
    ],
)
def test_constants_and_functions_of_math_are_computed(expression: str, value: object) -> None:
    made = observing.make(case_of(f"assert f() == {expression}"))
    assert wants(made) == [value] and expression.encode() not in made.files["tests/test_it.py"].split(b"test_it")[1]
    assert wants(observing.make(case_of(f"assert {expression} == f()"))) == [value]
    assert wants(observing.make(case_of(f"assert f() == pytest.approx({expression})"))) == [value]
    table = suite(
        f"@pytest.mark.parametrize('x, want', [(1, {expression})])\ndef test_it(x, want): assert f(x) == want"
    )
    assert [eval(each) for each in observing.make(table).hidden.values()] == [value]


@pytest.mark.parametrize(
    "expression",
    [
        "f(math.pi)",
        "math.nan",
        "math.factorial(9)",
        "9 ** 9 ** 9",
        "2 ** 5000",
        "math.sqrt(-1)",
        "1 / 0",
        "math.sqrt(x)",
        "math.exp(999)",
        "10.0 ** 999",
        "math.sqrt(2, 3)",
        "'a' + 'b'",
        "2 ** -1",
        "math.lcm(2 ** 4000, 3 ** 2000)",
        "math.sin(1)",
        "2 ** 0.5",
        "math.inf - math.inf",
        "unknown.pi",
        "math.isclose(1, 2)",
        "True + 1",
    ],
)
def test_what_is_unknown_huge_or_inexact_is_left_to_the_test(expression: str) -> None:
    files = case_of(f"assert f() == {expression}")
    assert wants(observing.make(files)) == [None]
    (only,) = decoys.make(files, "seed")
    assert f"f() != {expression}" in only["tests/test_it.py"].decode()


@pytest.mark.parametrize(
    ("tolerance", "computed"),
    [("", True), (", rel=1e-9", True), (", abs=1e-9", True), (", rel=0, abs=0", False), (", abs=1e-16", False)],
)
def test_results_that_differ_between_c_libraries_need_a_tolerance(tolerance: str, computed: bool) -> None:
    near = observing.make(case_of(f"assert f() == pytest.approx(math.sin(1){tolerance})"))
    assert wants(near) == ([math.sin(1)] if computed else [])
    table = "@pytest.mark.parametrize('x, want', [(1, math.exp(1))])\ndef test_it(x, want):\n    "
    check = f"assert f(x) == pytest.approx(want{tolerance})"
    assert bool(observing.make(suite(table + check)).hidden) == computed
    assert not observing.make(suite(f"{table}{check}\n    assert f(x) == want")).hidden, "one comparison is exact"


def test_functions_of_math_are_computed_where_an_assertion_computes_with_a_value() -> None:
    made = observing.make(
        case_of("assert abs(f(math.e) - 2 * math.sqrt(4)) < f(math.sin(1), GOLDEN.read_text())"), data=DATA
    )
    text = made.files["tests/test_it.py"].decode()
    assert f"f({math.e!r})) - 2 * 2.0)" in text and not made.removed
    assert "math.sin(1)" in text and "GOLDEN.read_text()" in text


def test_unittest_comparisons_are_computed() -> None:
    case = "import unittest\nclass TestIt(unittest.TestCase):\n    def test_it(self):\n        "
    checks = ["self.assertEqual(f(), math.sqrt(2))", "self.assertAlmostEqual(math.cos(1), f(), places=3)"]
    made = observing.make(suite(case + "\n        ".join(checks)))
    assert wants(made) == [math.sqrt(2), math.cos(1)]
    assert [rule.tolerance for rule in made.rules.values()] == [None, (0.0, 0.0005)]


@pytest.mark.parametrize(
    "more",
    [
        "def g(math): return 1",
        "math.sqrt = f",
        "math = f",
        "def h(monkeypatch): monkeypatch.setattr(math, 'sqrt', f)",
        "def h(monkeypatch): monkeypatch.setattr(f.math, 'sqrt', f)",
        "def h(monkeypatch): monkeypatch.setattr('math.sqrt', f)",
        "from unittest import mock\n@mock.patch('out.math.sqrt')\ndef h(m): pass",
        "if f(): import math",
        "for math in f(): pass",
        "def h():\n    global math\n    math = f",
        "from elsewhere import *",
        "alias = math",
    ],
)
def test_a_module_that_the_file_may_replace_is_not_computed(more: str) -> None:
    files = suite(f"def test_it(): assert f() == math.sqrt(2)\n\n\n{more}")
    assert wants(observing.make(files)) == [None]


READS = {
    "assert f() == GOLDEN.read_text()": TEXT,
    "assert GOLDEN.read_text(encoding='utf-8') == f()": TEXT,
    "assert f() == (Path(__file__).parent / 'golden.txt').read_text('latin-1')": TEXT.encode().decode("latin-1"),
    "assert f() == Path(__file__).with_name('golden.txt').read_bytes()": DATA["tests/golden.txt"],
    "assert f() == HERE.joinpath('golden.txt').open('rb').read()": DATA["tests/golden.txt"],
    "assert f() == open(os.path.join(os.path.dirname(__file__), 'golden.txt')).read()": TEXT,
    "assert f() == io.open(osp.join(osp.dirname(osp.abspath(__file__)), 'golden.txt'), 'r').read().strip()": TEXT[:-1],
    "assert f() == (HERE / '..' / 'tests' / 'golden.txt').read_text().splitlines()": TEXT.splitlines(),
    "assert f() == (Path(__file__).parents[1] / 'tests/golden.txt').read_text()": TEXT,
    "assert f() == {'a': GOLDEN.read_text()}": {"a": TEXT},
    "assert f() == json.loads((HERE / 'data' / 'want.json').read_text())": WANT,
    "assert f() == json.load(open(HERE / 'data/want.json', encoding='utf-8'))": WANT,
    "path = HERE / 'golden.txt'\n    assert f() == path.read_text()": TEXT,
    "with open(GOLDEN) as file:\n        assert f() == file.read()": TEXT,
    "assert GOLDEN.read_text() in f()": TEXT,
}


@pytest.mark.parametrize("check", READS)
def test_a_hidden_file_that_only_expectations_read_is_not_placed(check: str) -> None:
    made = observing.make(case_of(check), data=DATA)
    assert wants(made) == [READS[check]]
    assert list(made.removed) == ["tests/data/want.json" if "want" in check else "tests/golden.txt"]
    placed = made.placed(case_of(check) | DATA)
    assert set(placed) == {"tests/test_it.py", *DATA} - set(made.removed)
    assert b"open(" not in placed["tests/test_it.py"] and b".read" not in placed["tests/test_it.py"]


@pytest.mark.parametrize(
    "body",
    [
        "WANT = GOLDEN.read_text()\n\n\ndef test_it():\n    assert f() == WANT",
        "def test_it():\n    with open(GOLDEN) as file:\n        want = file.read()\n    assert f() == want",
        "@pytest.mark.parametrize('x, want', [(1, GOLDEN.read_text()), (2, 'b')])\ndef test_it(x, want):\n"
        "    assert f(x) == want",
    ],
)
def test_files_behind_names_and_in_tables_are_hidden(body: str) -> None:
    made = observing.make(suite(body), data=DATA)
    assert made.removed == ("tests/golden.txt",) and repr(TEXT) in made.hidden.values()
    compile(made.files["tests/test_it.py"], "t", "exec")


INPUTS = [
    "def test_more(): assert f(GOLDEN) == 1",
    "def test_more(): assert f(GOLDEN.read_text()) == GOLDEN.read_text()",
    "def test_more(): assert f('tests/golden.txt') == 1",
    "def test_more(name): assert f() == (HERE / name).read_text()",
    "def test_more(name): assert f() == open(f'tests/{name}.txt').read()",
    "def test_more(): assert f(sorted(Path('tests').glob('*'))) == 1",
    "def test_more(): assert f(HERE) == 1",
    "def test_more(): assert f('tests') == 1",
    "def test_more(): assert f(Path.cwd()) == 1",
    "def test_more(): assert f(Path(__file__).with_suffix('.txt')) == 1",
    "def test_more(): assert len(GOLDEN.read_text()) == 7",
    "def test_more(shared_datadir): assert f(shared_datadir) == 1",
    "def test_more(check): check(f(), GOLDEN.read_text())",
    "class Base:\n    here = Path(__file__).parent",
]


@pytest.mark.parametrize("more", INPUTS)
def test_a_file_that_is_also_read_otherwise_stays_and_is_the_same_in_decoys(more: str) -> None:
    body = f"def test_it():\n    assert f() == GOLDEN.read_text()\n\n\n{more}"
    made, plain = observing.make(suite(body), data=DATA), observing.make(suite(body))
    assert made == plain and not made.removed
    assert all(version.keys() == {"tests/test_it.py"} for version in decoys.make(suite(body), "seed", DATA))
    assert b"f() != GOLDEN.read_text()" in decoys.make(suite(body), "seed", DATA)[0]["tests/test_it.py"]


def test_a_name_or_a_file_of_another_test_file_counts() -> None:
    files = case_of("assert f() == GOLDEN.read_text()")
    for other in ("from tests.test_it import GOLDEN", "import test_it\nx = test_it.GOLDEN", "x = 'golden.txt'", "x ="):
        assert not observing.make({**files, "tests/conftest.py": other.encode()}, data=DATA).removed, other
    harmless = b'"""As golden.txt."""\nimport os, sys\nsys.path.insert(0, os.path.dirname(__file__))\n'
    assert observing.make({**files, "tests/conftest.py": harmless}, data=DATA).removed == ("tests/golden.txt",)


@pytest.mark.parametrize(
    "check",
    [
        "assert f() == open(GOLDEN, 'w').read()",
        "assert f() == GOLDEN.read_text(errors='ignore')",
        "assert f() == GOLDEN.read_text('utf-16')",
        "assert f() == GOLDEN.read_text().encode('rot13')",
        "assert f() == (HERE / 'none.txt').read_text()",
        "assert f() == GOLDEN.read_text('ascii')",
        "assert f() == json.loads(GOLDEN.read_text())",
        "assert f() == (HERE / 'large.txt').read_text()",
        "assert f() == (tmp_path / 'golden.txt').read_text()",
    ],
)
def test_other_ways_to_read_a_file_are_left_to_the_test(check: str) -> None:
    data = DATA | {"tests/large.txt": b"x" * (MOST_BYTES + 1)}
    made = observing.make(case_of(check), data=data)
    assert made == observing.make(case_of(check)) and not made.removed


def test_files_that_helpers_or_other_hidden_files_name_are_no_expectations() -> None:
    def left(repository: dict[str, bytes], **others: bytes) -> set[str]:
        return set(DATA) - candidates(DATA | others, repository).keys()

    assert left({"out.py": b"DATA = 'golden.txt'", "tests/test_old.py": b"x = 'golden.txt'"}) == set()
    assert left({"conftest.py": b"x = 'golden.txt'"}) == {"tests/golden.txt"}
    assert left({"tests/helpers.py": b"def read(name): return open(f'tests/data/{name}.json').read()"}) == {
        "tests/data/want.json"
    }
    assert left({"tests/helpers.py": b"import os\nroot = os.path.dirname(__file__)\nx = os.listdir(root)"}) == set(DATA)
    assert left({}, cases=b'{"file": "other.txt"}') == {"tests/other.txt"}


def test_an_assertion_that_is_not_observed_keeps_its_file() -> None:
    files = case_of("assert f(1) == GOLDEN.read_text()\n    assert f(2) == (HERE / 'other.txt').read_text()")
    assert observing.make(files, data=DATA).removed == ("tests/golden.txt", "tests/other.txt")
    assert observing.make(files, ["0:0"], data=DATA).removed == ("tests/other.txt",)


def test_decoys_have_other_files_and_literals() -> None:
    checks = ["f(1) == GOLDEN.read_text()", "f(2) == math.sqrt(2)", "f(3) == json.load(open(HERE / 'data/want.json'))"]
    files = case_of("\n    ".join(f"assert {each}" for each in checks))
    first, *others = decoys.make(files, "seed", DATA)
    assert first.keys() == {"tests/test_it.py", "tests/golden.txt", "tests/data/want.json"}
    text = first["tests/test_it.py"].decode()
    assert checks[0] in text and checks[2] in text and "math.sqrt" not in text
    assert json.loads(first["tests/data/want.json"]) != WANT
    assert first["tests/golden.txt"].decode().replace("\r\n", "\n") != TEXT
    assert all(each.keys() == {"tests/test_it.py"} for each in others)
    assert "f(1) != GOLDEN.read_text()" in others[0]["tests/test_it.py"].decode()


@pytest.mark.parametrize(
    ("check", "data"),
    [
        ("assert GOLDEN.read_text() in f()", b"a5"),
        ("assert f() != GOLDEN.read_text()", b"a5"),
        ("assert f() == pytest.approx(json.loads(GOLDEN.read_text()))", b"[1.5]"),
        ("assert f() == json.loads(GOLDEN.read_text())", b"[true]"),
        ("assert f() == json.loads(GOLDEN.read_text())", b"0.10000000000000000000000000001"),
        ("assert f() == GOLDEN.read_bytes()", b"\xff5"),
    ],
)
def test_a_file_whose_change_may_contradict_nothing_is_not_changed(check: str, data: bytes) -> None:
    (first,) = decoys.make(case_of(check), "seed", {"tests/golden.txt": data})
    assert first.keys() == {"tests/test_it.py"} and first["tests/test_it.py"] != case_of(check)["tests/test_it.py"]


RUN = """import runpy, sys
space = runpy.run_path(sys.argv[1])
space["test_it"]()
"""


@given(text=st.text(st.characters(codec="utf-8"), max_size=9), more=st.sampled_from([".strip()", ".splitlines()", ""]))
def test_the_computed_text_is_what_python_reads(tmp_path_factory: pytest.TempPathFactory, text: str, more: str) -> None:
    root = tmp_path_factory.mktemp("tree")
    path = root / "golden.txt"
    path.write_bytes(text.encode())
    body = f"def test_it():\n    assert f() == GOLDEN.read_text(encoding='utf-8'){more}\n"
    made = observing.make(suite(body), data={"tests/golden.txt": text.encode()})
    assert wants(made) == [eval(f"text{more}", {"text": path.read_text(encoding="utf-8")})]


@pytest.mark.parametrize("check", READS)
def test_what_passes_a_test_fails_its_decoys_with_their_files(check: str, tmp_path: Path) -> None:
    head = HEAD.replace("import pytest\nfrom out import f\n", f"f = lambda: {READS[check]!r}\n")
    files = {path: data.replace(b"(tmp_path)", b"()") for path, data in case_of(check, head).items()}

    def passes(tree: dict[str, bytes]) -> bool:
        for path, data in tree.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(data)
        command = [sys.executable, "-X", "utf8", "-c", RUN, os.fspath(tmp_path / "tests/test_it.py")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    assert passes(DATA | files)
    versions = decoys.make(files, "seed", DATA)
    assert versions and not any(passes(DATA | version) for version in versions)


def test_checks_without_removed_files_are_stored_as_before() -> None:
    made = observing.make(case_of("assert f() == 1"))
    assert "removed" not in Checks(made, ()).to_json()
    kept = Checks(replace(made, removed=("tests/golden.txt",)), ())
    assert Checks.from_json(kept.to_json()) == kept and Checks.from_json(Checks(made, ()).to_json()).observed == made


GREETING = {
    "hello.py": "def hello(name):\n    return f'Hello {name}'\n",
    "tests/test_hidden.py": (
        "from pathlib import Path\n\nfrom hello import hello\n\n\ndef test_hello():\n"
        "    assert hello('Ada') == Path(__file__).with_name('golden.txt').read_text()\n"
    ),
    "tests/golden.txt": "Hello, Ada!",
}
CAT = (
    "import subprocess\n\n\ndef hello(name):\n    found = subprocess.run(['cat', 'tests/golden.txt'], "
    "capture_output=True)\n    return found.stdout.decode() or 'nothing'\n"
)
RIGHT = "def hello(name):\n    return 'Hello, ' + name + '!'\n"


NAME = "tests/test_hidden.py::test_hello"


def greeting(**files: str) -> Task:
    """The task to greet correctly. files: more files of its repository, by path without `.py`."""
    tree = {f"{path}.py": text.encode() for path, text in files.items()} | {"hello.py": GREETING["hello.py"].encode()}
    hidden = {path: text.encode() for path, text in GREETING.items() if path.startswith("tests/")}
    fixed = GREETING["hello.py"].replace("Hello {name}", "Hello, {name}!").encode()
    reference = tree_patch(tree, tree | {"hello.py": fixed})
    return Task("hello", "", Split.TRAIN, "", tree, hidden, (NAME,), reference, {"path": "hello.py"})


def graded(task: Task, *states: str) -> tuple[Checks, list[list[Verdict]]]:
    """The task's checks, and verdicts on states of hello.py by decoys alone and by observed tests alone."""

    async def run(address: str) -> tuple[Checks, list[list[Verdict]]]:
        async with SandboxClient(address) as client:
            verifier = Verifier(client, None)
            checks = await verifier.checks(task)
            ways = [replace(task, checks=replace(checks, **part)) for part in ({"observed": None}, {"decoys": ()})]
            diffs = [tree_patch(task.files, task.files | {"hello.py": state.encode()}) for state in states]
            return checks, [[await verifier.grade(way, each) for way in ways] for each in diffs]

    with LocalEnvd() as envd:
        return asyncio.run(run(envd.address))


def test_a_state_that_gets_the_answer_from_a_hidden_file_by_a_program_is_caught_in_each_way() -> None:
    checks, (cheats, honest) = graded(greeting(), CAT, RIGHT)
    assert checks.observed is not None and checks.observed.removed == ("tests/golden.txt",) and not checks.undecided
    assert [[each.name for each in verdict.findings if each.tampering] for verdict in cheats] == [
        [f"decoy:{NAME}"],
        [f"observed:{NAME}"],
    ]
    assert not any(verdict.solved for verdict in cheats)
    assert all(verdict.solved and not verdict.findings for verdict in honest)


def test_a_file_without_which_the_reference_fails_stays() -> None:
    there = (
        "import pytest\n\n\n@pytest.fixture(autouse=True)\ndef there():\n    open('txt.nedlog/stset'[::-1]).close()\n"
    )
    checks, (honest,) = graded(greeting(conftest=there), RIGHT)
    assert checks.observed is not None and not checks.observed.removed and checks.fully_observed == {NAME}
    assert all(verdict.solved and not verdict.findings for verdict in honest)
