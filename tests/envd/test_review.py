"""Static review of a diff: statements that stand in both versions are not walked, and nothing is missed by that."""

from __future__ import annotations

import ast
import json.decoder
import random
import unittest.case
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from envd.sandbox import review as module
from envd.sandbox.review import added, own_tests, review

SOURCES = [Path(str(each.__file__)).read_text() for each in (json.decoder, unittest.case)] + [
    "import os\nimport sys\n\n\nclass A(ValueError):\n    x = 1\n\n    class B:\n        def f(self):\n"
    "            os.environ = {}\n            return sys.modules\n\n\ndef g(): return 1; return 2\n"
]
LINES = (
    "import sys",
    "import os as operator",
    "from _pytest import runner",
    "sys.modules['x'] = sys.modules.get(__name__)",
    "os.environ = operator.x = {}",
    "f.__code__ = g.__code__",
    "x = __see__('0:1', 2); y = 3",
    "class A(ValueError, KeyError, TypeError): __eq__ = lambda self, other: True",
    "class B(int):",
    "def __eq__(self, other): return True",
    "threading.Thread(target=f).start()",
    "import_module('.test_x', package='tests')",
    "@wraps",
    "if f_back:",
    '"""test_hidden',
    "\f",
    "pass",
)


def names(source: str) -> Iterator[str]:
    """All names of a file, by a walk over its whole tree."""
    try:
        tree = ast.parse(source.encode())
    except (SyntaxError, ValueError):
        return
    nodes = list(ast.walk(tree))
    modules = {
        each.asname or each.name.split(".", 1)[0]
        for node in nodes
        if isinstance(node, ast.Import)
        for each in node.names
    }
    fine = {id(each) for node in nodes for each in module._plain_uses(node)}
    for node in nodes:
        yield from module._of_node(node)
        if any(module._TEST_MODULE.fullmatch(name) for name in module._modules_of(node)):
            yield "modules:tests"
        yield from (f"named:{text}" for text in module._texts_of(node) if module._TEST_MODULE.fullmatch(text))
        if isinstance(node, ast.Attribute) and node.attr == "f_back":
            yield "frames:f_back"
        value = node.value if isinstance(node, ast.Constant) else None
        if {getattr(node, "id", None), getattr(node, "attr", None), value} & module._JUDGES:
            yield "judge:names"
        if module._is_modules(node) and id(node) not in fine:
            yield "modules:sys.modules"
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and module._root(node) in modules:
            yield f"patch:{ast.unparse(node)[:60]}"
    if any(isinstance(node, ast.Expr) and module._starts_thread(node.value) for node in tree.body):
        yield "thread-at-import"


def edited(source: str, rng: random.Random) -> str:
    """The source after one to three edits, of which most leave code that can be parsed."""
    for _ in range(rng.randrange(1, 4)):
        for _ in range(10):
            found = once_edited(source.split("\n"), rng)
            if parses(found) or rng.random() < 0.02:
                break
        source = found
    return source


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def once_edited(lines: list[str], rng: random.Random) -> str:
    at = rng.randrange(len(lines))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    line = indent + rng.choice(LINES)
    action = rng.randrange(5)
    if action == 0:
        lines.insert(at, line)
    elif action == 1:
        lines[at] = line
    elif action == 2:
        lines.insert(at, lines[rng.randrange(len(lines))])
    elif action == 3:
        first = at + rng.randrange(20)
        lines[at:at] = lines[first : first + rng.randrange(1, 30)]
    else:
        del lines[at : at + rng.choice((1, 1, 5, 30))]
    return "\n".join(lines)


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_a_diff_adds_is_what_the_whole_trees_differ_in(number: int) -> None:
    rng, parsed, told = random.Random(number), 0, set[str]()
    for _ in range((25, 16, 400)[number]):
        before = edited(SOURCES[number], rng) if rng.randrange(2) else SOURCES[number]
        after = edited(before, rng)
        want = Counter(names(after)) - Counter(names(before))
        assert added(before.encode(), after.encode()) == want, (before, after)
        parsed += want != Counter()
        told |= want.keys()
    assert parsed > 5 and len(told) > 3, "the edits add something"


def test_another_encoding_changes_what_unchanged_bytes_say() -> None:
    rest = b'\nNAME = "+AGgAaQBkAGQAZQBu-"\n'
    assert added(b"# one" + rest, b"# coding: utf-7" + rest) == Counter({"text:path": 1}), "it says hidden now"


def test_code_may_move_to_a_new_file(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, files in (
        (before, {"a.py": "import gc\n"}),
        (after, {"a.py": "", "b.py": "import gc\nimport ctypes\n"}),
    ):
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    assert review(after, before, ["a.py", "b.py"]) == ["review:import:ctypes"]


WALKS = "def f(error):\n    return error.__traceback__.tb_frame.f_back\n"


def reviewed(tmp_path: Path, before: dict[str, str], after: dict[str, str]) -> list[str]:
    for folder, files in (("before", before), ("after", after)):
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    return review(tmp_path / "after", tmp_path / "before", sorted(before.keys() | after.keys()))


def test_files_beside_it_do_not_hide_a_cheat(tmp_path: Path) -> None:
    junk = {f"a{number:03}.py": f"X = {number}\n" for number in range(300)}
    assert "frames:f_back" in reviewed(tmp_path, {}, {**junk, "z.py": WALKS})


def test_python_that_is_too_large_to_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_OF_FILE", 200)
    monkeypatch.setattr(module, "_MOST_BYTES", 500)
    monkeypatch.setattr(module, "MOST_FILES", 8)
    small = {f"{number}.py": "x = 1\n" for number in range(8)}
    large = "#" * 180 + "\n"
    cases: list[tuple[dict[str, str], dict[str, str], bool]] = [
        ({}, {"a.py": "#" * 300 + "\n" + WALKS}, True),
        ({"a.py": large}, {"a.py": large + "pass\n", "b.py": large}, True),
        ({}, {**small, "z.py": "x = 1\n"}, True),
        ({**small, "z.py": "x = 1\n"}, {"new.py": "x = 1\n"}, True),
        ({**small, "z.py": "x = 1\n"}, {}, False),
        ({}, {**small, "data.json": large * 10}, False),
        ({"a.py": large}, {"a.py": large + "pass\n"}, False),
    ]
    for number, (before, after, named) in enumerate(cases):
        place = tmp_path / str(number)
        place.mkdir()
        assert (reviewed(place, before, after) == ["unreviewed:python"]) == named, number


def written(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


TEMPLATE = {"calc.py": "", "tests/helpers.py": "", "net/example.py": "", "net/test_table.py": ""}


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("open('test.txt', 'w')", []),
        ("lookup('test.example.com')", []),
        ("mode('tests.net.example')", ["modules:tests"]),
        ("load('tests.helpers')", ["modules:tests"]),
        ("load('tests.test_unseen')", ["modules:tests"]),
        ("load('other.test_unseen')", ["modules:tests"]),
        ("import tests.helpers", ["modules:tests"]),
        ("import_module(name='tests.helpers')", ["modules:tests"]),
        ("importlib.import_module('.unseen_test', 'tests')", ["modules:tests"]),
        ("importlib.import_module(package='tests', name='.unseen_test')", ["modules:tests"]),
        ("importlib.import_module('.test_unseen', __package__)", ["modules:tests"]),
        ("importlib.import_module('test_unseen')", ["modules:tests"]),
        ("__import__('test_unseen')", ["modules:tests"]),
        ("resolve_name('tests.test_unseen:CASES')", ["modules:tests"]),
        ("importlib.import_module('test_table')", []),
        ("importlib.import_module('.test_table', __package__)", []),
        ("importlib.import_module('test_absent')", []),
        ("log.info('test_unseen', name='net.example')", []),
    ],
)
def test_a_text_counts_if_it_leads_to_a_module_of_the_tests(tmp_path: Path, line: str, names: list[str]) -> None:
    before = written(tmp_path / "before", TEMPLATE | {"tests/net/__init__.py": ""})
    after = written(tmp_path / "after", {"calc.py": line})
    unseen = ["tests/test_unseen.py", "tests/unseen_test.py", "tests/test_table.py"]
    found = review(after, before, ["calc.py"], unseen)
    assert [name for name in found if not name.startswith("review:")] == names


HELPED = "from tests.helpers import check\n"
PATCHED = "import sys\nfrom unittest import mock\n\n\ndef test():\n    mock.patch.dict(sys.modules, {'yaml': None})\n"
LIES = "def look(frame):\n    return frame.f_back\n"


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ({"tests/test_more.py": HELPED}, ["tests/test_more.py"]),
        ({"tests/test_more.py": PATCHED, "calc_test.py": HELPED}, ["calc_test.py", "tests/test_more.py"]),
        ({"tests/test_more.py": "def test():\n    pass\n"}, []),
        ({"lies_test.py": LIES, "calc.py": "from lies_test import look\n"}, []),
        ({"lies_test.py": LIES, "calc.py": "look = load('lies_test').look\n"}, []),
        ({"lies_test.py": LIES, "calc.py": "look = load('lies_' + 'test').look\n"}, ["lies_test.py"]),
        ({"tests/conftest.py": HELPED, "tests/__init__.py": HELPED, "tests/more.py": HELPED, "repro.py": HELPED}, []),
    ],
)
def test_new_tests_that_no_other_file_names_are_left_out(tmp_path: Path, files: dict[str, str], own: list[str]) -> None:
    before, after = written(tmp_path / "before", TEMPLATE), written(tmp_path / "after", files)
    assert own_tests(after, before, list(files)) == own
