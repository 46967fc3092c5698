"""Parts of the task factory that need no sandbox."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import io
import os
import re
import subprocess
import tarfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from import_sources import REPOSITORY, clone, planted, write

from contracts.store import Store, open_store
from contracts.tasks import Observed, Split
from curation.errors import TaskError
from curation.tasks.checks.proving import as_written
from curation.tasks.factory.baseline import Baseline, TestFunction
from curation.tasks.factory.choose import Caps, Distinct, Graders
from curation.tasks.factory.functions import Function, Lines, Source, named_once, product_sources
from curation.tasks.factory.leaks import MOST_NAMESAKES, Copies, standard_library, without_tests
from curation.tasks.factory.licences import UNKNOWN, check_licence, licence_of
from curation.tasks.factory.make import first_accepted
from curation.tasks.factory.prove import changed_functions
from curation.tasks.factory.screen import Screened, screen
from curation.tasks.factory.source import Repository, head_of, read_repository
from curation.tasks.factory.splits import deal_files
from curation.tasks.factory.strategies import (
    Candidate,
    Context,
    Edit,
    changed_text,
    installed_strategies,
    normalized,
    strategy_named,
)
from curation.tasks.factory.strategies.combine import combined
from curation.tasks.factory.strategies.mutate import mutants
from curation.tasks.factory.text import holds_a_line, instruction_of

MODULE = '''\
"""é moves byte offsets."""


def clamp(value, low=0, high=10):
    """Keep value within bounds.

    More words.
    """
    if value < low and not value == high:
        return low
    else:
        value = value - high + 1
    for each in [1, 2]:
        if each > 1:
            break
    try:
        total = max(value, low)
    except ValueError:
        total = None
    return total


class Box:
    def get(self, key, default=None):
        found = self.items.get(key, default) if key else default
        return found
'''


def functions_of(text: str, path: str = "pack/core.py") -> dict[str, Function]:
    data = text.encode()
    return {each.key: each for each in Source(path, data, ast.parse(data)).functions}


def test_every_mutant_is_another_program_and_edits_only_its_function() -> None:
    functions = functions_of(MODULE)
    for function in functions.values():
        found = list(mutants(function, 0))
        assert len({each.identity for each in found}) == len(found) > 8
        for each in found:
            (edit,) = each.edits
            text = each.apply({function.source.path: function.source.data})[function.source.path]
            assert ast.dump(ast.parse(text)) != ast.dump(function.source.module)
            assert edit.start >= function.source.starts[function.first - 1]
            assert edit.end <= function.source.starts[function.last]


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ("change_comparison", "    if value <= low and not value == high:"),
        ("change_logic", "    if value < low or not value == high:"),
        ("drop_not", "    if value < low and value == high:"),
        ("change_operator", "        value = value + high + 1"),
        ("change_number", "        value = value - high + 2"),
        ("swap_arguments", "        total = max(low, value)"),
        ("change_method", "        total = min(value, low)"),
        ("assign_none", "        total = None"),
        ("change_jump", "            continue"),
        ("change_default", "def clamp(value, low=None, high=10):"),
        ("narrow_handler", "    except MemoryError:"),
        ("return_none", "    return None"),
    ],
)
def test_operator_makes_this_line(operator: str, line: str) -> None:
    function = functions_of(MODULE)["pack/core.py::clamp"]
    texts = [changed_text(function, each.edits) for each in mutants(function, 0) if each.operator == operator]
    assert any(line in text.split("\n") for text in texts), texts


def test_mutants_depend_on_the_seed_only() -> None:
    function = functions_of(MODULE)["pack/core.py::clamp"]
    orders = [[each.identity for each in mutants(function, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_remove_takes_helpers_that_only_one_function_reaches() -> None:
    text = (
        "def _own(x):\n    y = x\n    return y\n\n\ndef _shared(x):\n    y = x\n    return y\n\n\n"
        "def f(x):\n    a = _own(x)\n    return _shared(a)\n\n\ndef g(x):\n    a = _shared(x)\n    return a\n"
    )
    functions = list(functions_of(text).values())
    context = Context(repository({}), functions, Lines({}), 0)
    found = {each.function: each for each in strategy_named("remove")(context) if each.operator == "remove_reach"}
    assert set(found) == {"pack/core.py::f"}
    assert found["pack/core.py::f"].meta == {"helpers": ["_own"]}


def test_revert_puts_the_older_function_into_the_present_file() -> None:
    new = MODULE.replace("value - high + 1", "value - high")
    functions = list(functions_of(new).values())
    context = Context(repository({}), functions, Lines({}), 0, older={"pack/core.py": MODULE.encode()})
    (found,) = strategy_named("revert")(context)
    assert found.apply({"pack/core.py": new.encode()}) == {"pack/core.py": MODULE.encode()}


def test_combinations_use_each_bug_once_and_no_function_twice() -> None:
    functions = functions_of(MODULE)
    bugs = [screened(each) for function in functions.values() for each in list(mutants(function, 0))[:6]]
    found = combined(bugs, 0, 10)
    assert found and len({edit for each in found for edit in each.edits}) == sum(len(each.edits) for each in found)
    assert all(len(set(each.meta["functions"])) == len(each.edits) for each in found)


def test_combinations_are_of_bugs_that_the_same_test_file_grades() -> None:
    clamp, other = (next(iter(mutants(each, 0))) for each in list(functions_of(MODULE).values())[:2])
    assert not combined([screened(clamp, "a.py"), screened(other, "b.py")], 0, 10)
    assert combined([screened(clamp, "a.py"), screened(other, "a.py")], 0, 10)


def test_combinations_share_no_helper_and_no_byte() -> None:
    text = (
        "def f(a):\n    b = a + 1\n    return _g(b) * 2\n\n\ndef _g(c):\n    d = c - 3\n    return d\n\n\n"
        "def h(x):\n    y = x + 1\n    return y\n"
    )
    functions = functions_of(text)
    context = Context(repository({}), list(functions.values()), Lines({}), 0)
    (reach,) = (each for each in strategy_named("remove")(context) if each.operator == "remove_reach")
    helper, other = (next(mutants(functions[f"pack/core.py::{name}"], 0)) for name in ("_g", "h"))
    assert not combined([screened(reach), screened(helper)], 0, 10)
    (found,) = combined([screened(reach), screened(other)], 0, 10)
    assert set(found.meta["functions"]) == set(functions)
    ast.parse(found.apply({"pack/core.py": text.encode()})["pack/core.py"])
    commit = Candidate("revert", "revert_commit", "pack/core.py::f", reach.edits, {"functions": sorted(functions)})
    assert not combined([screened(commit), screened(other)], 0, 10)


def test_every_function_that_a_bug_changes_is_one_of_its_functions() -> None:
    functions = functions_of(MODULE + "\n\ndef last():\n    return 1\n")
    clamp, get, last = functions.values()
    lines = clamp.source.starts

    def found(*spans: tuple[int, int]) -> list[Function]:
        edits = tuple(Edit("pack/core.py", start, end, "") for start, end in spans)
        return changed_functions(Candidate("revert", "revert_commit", clamp.key, edits), clamp.source)

    assert found(clamp.body_span, last.body_span) == [clamp, last]
    assert found((lines[clamp.last - 1], lines[get.first])) == [clamp, get], "one edit in two functions"
    assert found((lines[get.first], lines[get.first])) == [get], "an insertion"
    assert found((0, 3)) == []


def test_candidates_change_the_file_of_their_function_alone() -> None:
    functions = functions_of(MODULE)
    edits = (Edit("pack/core.py", 0, 1, "x"), Edit("pack/other.py", 0, 1, "x"))
    candidate = Candidate("mine", "mine", "pack/core.py::clamp", edits)
    baseline = Baseline({}, {}, Lines({}))
    found = asyncio.run(screen([candidate], functions, baseline, None, None))  # type: ignore[arg-type]
    assert found.reasons == {"changes other files than its function's": 1}


def test_installed_strategies_are_known_by_their_source_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "mybugs-1.dist-info"
    about.mkdir()
    (about / "entry_points.txt").write_text("[triplane.strategies]\nmine = mybugs:candidates\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for version, code in (("1", "[]"), ("1", "[]"), ("1", "()"), ("2", "()")):
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mybugs\nVersion: {version}\n")
        (tmp_path / "mybugs.py").write_text(f"def candidates(context):\n    return {code}\n")
        found.append(installed_strategies(["mutate", "mine"])["mine"])
    assert found[0] == found[1] and len(set(found)) == 3
    assert installed_strategies(["mutate", "remove"]) == {}


def test_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(TaskError, match="'guess': choose of combine, feature, mutate, remove, revert, rewrite"):
        strategy_named("guess")


def test_failing_tests_are_cut_with_their_decorators_and_the_rest_stays() -> None:
    text = (
        "import x\n\n\nclass TestA:\n    @deco\n    def test_a(self):\n        pass\n\n\ndef test_b():\n    assert 1\n"
    )
    tree = {"test_x.py": text.encode()}
    cut = without_tests(tree, [placed("test_x.py::TestA::test_a", 5)])
    assert isinstance(cut, dict)
    assert cut["test_x.py"].decode() == "import x\n\n\nclass TestA:\n    pass\n\n\ndef test_b():\n    assert 1\n"
    assert without_tests(tree, [placed("test_x.py::test_c", 8)]) == "a failing test can't be cut out of its file"
    returns = {"test_x.py": b'X = """\r"""\n' + text.encode()}
    found = without_tests(returns, [placed("test_x.py::test_b", 11)])
    assert found == "a failing test can't be cut out of its file", "its lines can't be counted"


def test_copies_of_a_function_are_found_wherever_they_are() -> None:
    functions = functions_of(MODULE)
    clamp = functions["pack/core.py::clamp"]
    tree = {"pack/core.py": MODULE.encode(), "other/old.txt": MODULE.replace("value", "value").encode()}
    alone = {"pack/core.py": MODULE.encode()}
    assert Copies(tree, {}).of(clamp) == "other/old.txt"
    assert Copies(alone, {}).of(clamp) is None
    packages = {"x.py": b"", "vendored/copy.py": MODULE.encode() + b"x = 1\n"}
    assert Copies(alone, packages).of(clamp) == "vendored/copy.py"
    twice = functions_of(MODULE + MODULE.replace('"""é moves byte offsets."""', ""))["pack/core.py::clamp"]
    assert Copies({"pack/core.py": twice.source.data}, {}).of(twice) == "pack/core.py"


def test_copies_of_short_functions_are_found_by_name_and_code() -> None:
    text = 'class Box:\n    def put(self, item):\n        """Put."""\n        self.items.append(item)\n'
    put = functions_of(text)["pack/core.py::Box.put"]
    copy, other = text.replace('"""Put."""', '"""Another text."""'), text.replace("append", "remove")
    tree = {"pack/core.py": text.encode(), "pack/other.py": other.encode(), "notes.txt": copy.encode()}
    assert Copies(tree, {"more.py": text.replace("Box", "Bag").encode()}).of(put) is None
    assert Copies({**tree, "pack/vendored.py": copy.encode()}, {}).of(put) == "pack/vendored.py"
    assert Copies(tree, {"installed.py": b"x = 1\n" + copy.encode()}).of(put) == "installed.py"
    pos = "    def __pos__(a):\n        return Fraction(a._numerator, a._denominator, _normalize=False)\n"
    positive = functions_of(f"class Fraction:\n{pos}")["pack/core.py::Fraction.__pos__"]
    taking = b'def take(n, items):\n    "Return first n items."\n    return list(islice(items, n))\n'
    library = {"recipes.py": taking, **standard_library()}
    assert Copies({}, library).of(positive) == "python/fractions.py"
    recipe = '    """First items."""\n    return list(islice(iterable, n))\n'
    take = functions_of(f"def take(n, iterable):\n{recipe}")["pack/core.py::take"]
    assert Copies({}, library).of(take) == "recipes.py", "its parameter has another name there"
    other = functions_of(f"def take(n, iterable):\n{recipe.replace('islice', 'slice')}")["pack/core.py::take"]
    assert Copies({}, library).of(other) is None


def test_namesakes_are_other_functions_of_the_same_qualified_name_the_most_similar_first() -> None:
    text = "class Box:\n    @property\n    def size(self):\n        return self.width * self.height\n"
    size = functions_of(text)["pack/core.py::Box.size"]
    near, far = text.replace(" * ", " + "), "class Box:\n    def size(self):\n        return len(self)\n"
    tree = {
        "pack/core.py": near.encode(),
        "pack/far.py": far.encode(),
        "pack/bag.py": near.replace("Box", "Bag").encode(),
    }
    packages = {"near.py": near.encode(), "again.py": near.encode(), "same.py": text.encode(), "bad.py": b"def size(:"}
    assert Copies(tree, packages).namesakes(size) == [
        "    def size(self):\n        return self.width * self.height",
        "    def size(self):\n        return self.width + self.height",
        "    def size(self):\n        return len(self)",
    ]
    many = {f"{n}.py": f"class Box:\n    def size(self):\n        return {n}\n".encode() for n in range(20)}
    assert len(Copies({}, many).namesakes(size)) == MOST_NAMESAKES
    first = functions_of("def size(box):\n    return box.size\n")["pack/core.py::size"]
    assert Copies({}, {**packages, "module.py": b"def size(x):\n    return 3\n"}).namesakes(first) == [
        "def size(x):\n    return 3"
    ]


def test_a_long_copy_with_other_local_names_is_found() -> None:
    functions = functions_of(MODULE)
    clamp = functions["pack/core.py::clamp"]
    text = MODULE
    for name, new in (("value", "number"), ("low", "least"), ("high", "most"), ("total", "found"), ("each", "step")):
        text = re.sub(rf"\b{name}\b", new, text)
    assert Copies({}, {"installed.py": text.encode()}).of(clamp) == "installed.py"
    assert Copies({}, {"installed.py": text.replace("def clamp", "def other").encode()}).of(clamp) is None


def test_a_function_whose_name_stands_twice_is_left_out() -> None:
    text = (
        "class A:\n    @property\n    def size(self):\n        return 1\n\n    @size.setter\n"
        "    def size(self, value):\n        pass\n\n    def other(self):\n        pass\n\n\ndef size():\n    pass\n"
    )
    sources = product_sources({"pack/core.py": text.encode(), "pack/more.py": b"def size():\n    pass\n"})[0]
    keys = ["pack/core.py::A.other", "pack/core.py::size", "pack/more.py::size"]
    assert [each.key for each in named_once(sources)] == keys


def test_a_body_begins_with_the_decorators_of_its_first_statement() -> None:
    text = 'def wrap(f):\n    """Doc."""\n    @other\n    def inner():\n        return f()\n    return inner\n'
    (wrap,) = product_sources({"pack/core.py": text.encode()})[0][0].functions
    start, end = wrap.body_span
    assert text[start:end] == text[text.index("@other") : -1]
    (bare,) = product_sources({"pack/core.py": b'def f():\n    """Doc."""\n'})[0][0].functions
    assert bare.body_span == (23, 23)


def test_tests_that_run_beside_observed_ones_are_as_written() -> None:
    before = (
        "import m\n\ndef helper():\n    return 1\n\nclass TestA:\n    def test_same(self):\n        m.f()\n\n"
        "    def test_seen(self):\n        assert m.f() == 1\n\ndef test_plain():\n    assert helper()\n"
    )
    tests = [f"t.py::{name}" for name in ("TestA::test_same", "TestA::test_seen", "test_plain")]

    def found(after: str) -> set[str]:
        observed = Observed({"t.py": after.encode()}, {}, {}, {})
        return set(as_written(tests, observed, {"t.py": before.encode()}))

    changed = "import seen\n" + before.replace("assert m.f() == 1", "seen.see(m.f())")
    assert found(changed) == {tests[0], tests[2]}
    assert found(before.replace("\n\nclass", "\n\n\n# comment\nclass")) == set(tests)
    assert found(changed.replace("return 1", "return seen.see(1)")) == set()
    assert found(changed.replace("import m\n", "import n as m\n")) == set()
    assert found(changed.replace("class TestA:", "class TestA(seen.Base):")) == set()
    assert as_written(tests, None, {"t.py": before.encode()}) == set(tests)


def test_no_text_holds_a_line_of_the_fix() -> None:
    clamp = functions_of(MODULE)["pack/core.py::clamp"]
    message = "assert 3 == 4\n +  where 3 = clamp(3)\nreturn total"
    text = instruction_of(clamp, {"t.py::test_clamp": message}, ["    return total"], "mutate", "id")
    assert text is not None and "return total" not in text and "Keep value within bounds." in text
    plain = instruction_of(clamp, {"t.py::test_clamp": "assert 3 == 4"}, ["    return total"], "mutate", "id")
    assert plain is not None and "assert 3 == 4" in plain
    assert holds_a_line("see:  total =   max(value, low) there", ["        total = max(value, low)"])
    assert not holds_a_line("passed everything else", ["    pass", "    else:"])


def test_no_file_is_in_two_splits_and_sizes_follow_the_shares() -> None:
    files = ["a.py"] * 60 + ["b.py"] * 25 + ["c.py"] * 10 + ["d.py"] * 5
    places = deal_files(files, {Split.TRAIN: 0.6, Split.GATE: 0.2, Split.HELD_OUT: 0.2})
    assert places["a.py"] == Split.TRAIN
    assert {places["b.py"], places["c.py"]} == {Split.GATE, Split.HELD_OUT}
    assert set(deal_files(["a.py"] * 3, {Split.TRAIN: 0.6, Split.GATE: 0.4}).values()) == {Split.TRAIN}
    assert len(set(deal_files(["a", "a", "a", "b", "c"], dict.fromkeys(list(Split)[:3], 1 / 3)).values())) == 3


def test_bugs_of_one_function_with_the_same_failures_are_limited() -> None:
    functions = functions_of(MODULE)
    bugs = [screened(each) for each in mutants(functions["pack/core.py::clamp"], 0)]
    chosen = Distinct(functions)
    kept, reasons = chosen.choose(bugs)
    assert len(kept) == 4 and sum(reasons.values()) == len(bugs) - 4
    assert Distinct(functions).choose([*bugs, *bugs])[0] == kept
    assert chosen.choose(bugs)[0] == []


def test_the_file_that_notices_most_bugs_of_a_function_grades_them() -> None:
    first, second, third = list(mutants(functions_of(MODULE)["pack/core.py::clamp"], 0))[:3]
    graders = Graders()
    both = {"test_make.py": 70, "test_clamp.py": 2}
    assert graders.choose([dataclasses.replace(screened(first), files=both)])[0].file == "test_make.py"
    found = graders.choose([dataclasses.replace(screened(second), files=both), screened(third, "test_clamp.py")])
    assert [each.file for each in found] == ["test_clamp.py", "test_clamp.py"], "calls of clamp break test_make.py"


def test_caps_admit_no_more_of_a_function_than_their_share() -> None:
    caps = Caps(8, functions=8, files=1, operators=8)
    candidates = list(mutants(functions_of(MODULE)["pack/core.py::clamp"], 0))[:6]
    admitted = [each for each in candidates if caps.admits(each) is None and caps.take(each) is None]
    assert len(admitted) == 4
    assert caps.admits(candidates[5]) == "function"


def test_the_only_operator_of_a_strategy_has_no_cap_and_one_of_many_has() -> None:
    candidates = [Candidate("revert", "revert_commit", f"pack/core.py::f{n}", ()) for n in range(12)]
    for operators, wanted in ((1, 12), (20, 4)):
        caps = Caps(12, functions=12, files=1, operators=operators)
        assert sum(caps.admits(each) is None and caps.take(each) is None for each in candidates) == wanted


@given(
    good=st.lists(st.booleans(), max_size=80),
    wanted=st.integers(0, 60),
    seconds=st.lists(st.floats(0, 0.002), min_size=80, max_size=80),
)
@settings(max_examples=60, deadline=None)
def test_what_is_accepted_does_not_depend_on_what_ends_first(
    good: list[bool], wanted: int, seconds: list[float]
) -> None:
    begun: list[int] = []

    async def work(number: int) -> int:
        begun.append(number)
        await asyncio.sleep(seconds[number])
        return number

    found = asyncio.run(
        first_accepted(iter(range(len(good))), wanted, work, lambda number: good[number], lambda done: None)
    )
    ends = [end for end in range(len(good) + 1) if sum(good[:end]) == wanted]
    assert found == begun == list(range(min(ends, default=len(good))))


def test_a_fault_of_one_ends_the_others() -> None:
    ended: list[int] = []

    async def work(number: int) -> int:
        try:
            await asyncio.sleep(0 if number == 3 else 60)
            raise TaskError("envd is gone")
        finally:
            ended.append(number)

    with pytest.raises(TaskError, match="envd is gone"):
        asyncio.run(first_accepted(iter(range(5)), 5, work, lambda number: True, lambda done: None))
    assert sorted(ended) == list(range(5))


MIT_TEXT = b"Permission is hereby granted, free of charge, to any person"


@pytest.mark.parametrize(
    ("tree", "licence"),
    [
        ({"PKG-INFO": b"License-Expression: MIT\n"}, "MIT"),
        ({"PKG-INFO": b"Classifier: License :: OSI Approved :: BSD License\n"}, "BSD-3-Clause"),
        ({"pyproject.toml": b"[project]\nlicense = 'Apache-2.0 OR MIT'\n"}, "Apache-2.0 OR MIT"),
        ({"LICENSE": b"Permission is hereby granted,\nfree of charge, to any"}, "MIT"),
        ({"COPYING": b"GNU GENERAL PUBLIC LICENSE\nVersion 3"}, "GPL-3.0-only"),
        ({"COPYING": b"GNU GENERAL PUBLIC LICENSE\n Version 2 GNU Lesser General Public License"}, "GPL-2.0-only"),
        ({"COPYING": b"GNU GENERAL PUBLIC LICENSE Version 3 GNU AFFERO GENERAL PUBLIC LICENSE"}, "GPL-3.0-only"),
        ({"COPYING": b"GNU LESSER GENERAL PUBLIC LICENSE\nVersion 2.1, February 1999"}, "LGPL-2.1-only"),
        ({"LICENSE": b"Mozilla Public License Version 1.1 ... GNU General Public License"}, "MPL-1.1"),
        ({"LICENSE": b"Permission is hereby granted, free of charge; GNU General Public License v2"}, "GPL-2.0-only"),
        ({"README.md": b"MIT"}, UNKNOWN),
        ({"LICENSE": b"Business Source License 1.1\nChange License: Apache License, Version 2.0"}, "BUSL-1.1"),
        ({"LICENSE": b"Functional Source License, Version 1.1, ALv2 Future License. Apache License"}, "LicenseRef-FSL"),
        ({"LICENSE": b"FSL-1.1-MIT, Functional Source License. " + MIT_TEXT}, "LicenseRef-FSL"),
        (
            {"LICENSE": "“Commons Clause” License Condition v1.0\nApache License 2.0".encode()},
            "LicenseRef-Commons-Clause",
        ),
        ({"LICENSE": b"Server Side Public License\nGNU Affero General Public License"}, "SSPL-1.0"),
        ({"LICENSE": b"Elastic License 2.0 (ELv2) ... Apache License"}, "Elastic-2.0"),
        ({"LICENSE": b"<https://polyformproject.org/licenses/strict/1.0.0> " + MIT_TEXT}, "LicenseRef-PolyForm"),
        ({"LICENSE": b"Attribution-NonCommercial 4.0 International; code: " + MIT_TEXT}, "LicenseRef-CC-BY-NC"),
        (
            {"pyproject.toml": b"[project]\nlicense = 'LicenseRef-Proprietary'\n", "LICENSE": MIT_TEXT},
            "LicenseRef-Proprietary",
        ),
        ({"PKG-INFO": b"License-Expression: Mine-1.0\nLicense: MIT\n", "LICENSE": MIT_TEXT}, UNKNOWN),
        ({"PKG-INFO": b"License: Other/Proprietary License\n", "LICENSE": MIT_TEXT}, "LicenseRef-Proprietary"),
        ({"PKG-INFO": b"License: \xe9, ()\n", "LICENSE": MIT_TEXT}, "MIT"),
        ({"PKG-INFO": b"License: ()\n", "pyproject.toml": b"[project]\nlicense = {file = 'LICENSE'}\n"}, UNKNOWN),
        ({"pyproject.toml": b"[project]\nlicense = {text = 'MIT'}\n"}, "MIT"),
    ],
)
def test_licence_of_a_repository(tree: dict[str, bytes], licence: str) -> None:
    assert licence_of(tree) == licence


def test_copyleft_and_unknown_licences_need_permission() -> None:
    for licence in ("MIT", "GPL-3.0-only OR MIT", "(GPL-3.0-only OR MIT) AND (Apache-2.0 OR MPL-2.0)"):
        check_licence("pack", licence, ())
    check_licence("pack", "GPL-3.0-only", ("GPL-3.0-only",))
    with pytest.raises(TaskError, match=r"--allow-license GPL-3\.0-only"):
        check_licence("pack", "GPL-3.0-only", ())
    for licence in (
        "GPL-3.0-only AND (MIT OR Apache-2.0)",
        "(MIT OR GPL-3.0-only) AND GPL-3.0-only",
        "GPL-2.0-only WITH Classpath-exception-2.0",
        "BUSL-1.1",
        "SSPL-1.0",
        "Elastic-2.0",
        "MIT AND LicenseRef-Commons-Clause",
    ):
        with pytest.raises(TaskError, match="is not permissive"):
            check_licence("pack", licence, ())
    with pytest.raises(TaskError, match=r"no known licence: .*--allow-license unknown"):
        check_licence("pack", UNKNOWN, ())


def test_product_sources_leave_out_tests_and_name_what_they_can_not_read() -> None:
    tree = {"a.py": b"x = 1\n", "latin.py": b"# \xe9\n", "tests/helper.py": b"", "pack/test_a.py": b"", "bad.py": b"("}
    deep = b"x = " + b"+".join([b"1"] * 5000)
    sources, unused = product_sources(tree | {"dos.py": b"x = 1\r\n", "deep.py": deep})
    assert [each.path for each in sources] == ["a.py"]
    assert unused == {
        "bad.py": "this Python can't read it",
        "deep.py": "this Python can't read it",
        "dos.py": "it has carriage returns",
        "latin.py": "it is not UTF-8",
    }


def test_functions_that_are_nested_too_deeply_are_known() -> None:
    chain = "".join(f"    elif x == {n}:\n        return {n}\n" for n in range(1, 340))
    functions = functions_of(f"def f(x):\n    if x == 0:\n        return 0\n{chain}\n\ndef g(x):\n    return x + 1\n")
    assert [each.qualname for each in functions.values() if each.is_deep] == ["f"]
    assert normalized(functions["pack/core.py::f"].text) is None
    within = "".join(f"if x:\n    def f{n}():\n        pass\nel" for n in range(300))
    assert len(functions_of(f"{within}se:\n    pass\n")) == 300


def test_archive_is_read_without_products(tmp_path: Path, store: Store) -> None:
    made = ["build/lib/pack/a.py", "p.egg-info/SOURCES.txt", "pack/__pycache__/a.pyc", "tests/data/.git"]
    names = ["p-1/pack/a.py", *(f"p-1/{path}" for path in made)]
    archive(tmp_path / "p-1.tar.gz", {**dict.fromkeys(names, b"x = 1\n"), "p-1/PKG-INFO": b"License: MIT\n"})
    found = read_repository("pypi:p==1", store, wheelhouse=tmp_path)
    assert sorted(found.tree) == ["PKG-INFO", "pack/a.py"] and found.licence == "MIT"
    (tmp_path / "p-1.tar.gz").unlink()
    assert read_repository("pypi:p==1", store, wheelhouse=tmp_path).digest == found.digest, "kept in the store"


def test_a_damaged_archive_is_not_kept_and_each_place_has_its_own(tmp_path: Path, store: Store) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, text in ((first, b"x = 1\n"), (second, b"x = 2\n")):
        folder.mkdir()
        archive(folder / "p-1.tar.gz", {"p-1/a.py": text, "p-1/noise": os.urandom(4000)})
    whole = (first / "p-1.tar.gz").read_bytes()
    flipped = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]  # in what is stored uncompressed
    for damaged in (whole[:2000], whole[:10] + b"\xff" * 100, flipped):
        (first / "p-1.tar.gz").write_bytes(damaged)
        with pytest.raises(TaskError, match=r"is damaged .*: delete it"):
            read_repository("pypi:p==1", store, wheelhouse=first)
    (first / "p-1.tar.gz").write_bytes(whole)
    found = [read_repository("pypi:p==1", store, wheelhouse=each).tree["a.py"] for each in (first, second)]
    assert found == [b"x = 1\n", b"x = 2\n"]


def test_an_error_page_of_an_index_is_no_archive(tmp_path: Path, store: Store) -> None:
    archive(tmp_path / "p-1.tar.gz", {"p-1/a.py": b"x = 1\n"})
    (tmp_path / "simple/p").mkdir(parents=True)
    (tmp_path / "simple/p/index.html").write_text('<a href="../../p-1.tar.gz">p-1.tar.gz</a>')
    (tmp_path / "p-1.tar.gz").rename(tmp_path / "hidden")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}/simple/"
        with pytest.raises(TaskError, match=r"does not give p==1 .*404"):
            read_repository("pypi:p==1", store, index=index)
        (tmp_path / "hidden").rename(tmp_path / "p-1.tar.gz")
        assert read_repository("pypi:p==1", store, index=index).tree == {"a.py": b"x = 1\n"}
        server.shutdown()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "nowhere is no folder: give a folder"),
        ("pypi:toolz", "does not pin a version"),
        ("pypi:absent==1", "has no source distribution of absent==1"),
    ],
)
def test_wrong_source_is_one_clear_error(source: str, words: str, tmp_path: Path, store: Store) -> None:
    with pytest.raises(TaskError, match=words) as raised:
        read_repository(source, store, wheelhouse=tmp_path)
    assert "\n" not in str(raised.value)
    assert store.list("factory/") == []


def test_archive_with_a_name_that_is_not_utf8_is_refused(tmp_path: Path, store: Store) -> None:
    archive(tmp_path / "p-1.tar.gz", {"p-1/caf\udce9.py": b"x"})
    with pytest.raises(TaskError, match="has a name that is not UTF-8"):
        read_repository("pypi:p==1", store, wheelhouse=tmp_path)


def test_archive_that_leads_out_of_its_folder_is_refused(tmp_path: Path, store: Store) -> None:
    archive(tmp_path / "p-1.tar.gz", {"p-1/../../x.py": b"x"})
    with pytest.raises(TaskError, match="lead out of it"):
        read_repository("pypi:p==1", store, wheelhouse=tmp_path)


def test_git_repository_is_read_at_head_and_a_submodule_is_named(tmp_path: Path, store: Store) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q")
    with pytest.raises(TaskError, match="no commit to read"):
        read_repository(str(repo), store)
    (repo / "a.py").write_text("x = 1\n")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "one")
    (repo / "a.py").write_text("x = 2\n")
    assert read_repository(str(repo), store).tree == {"a.py": b"x = 1\n"}
    git(repo, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},vendor/lib")
    git(repo, "commit", "-qm", "two")
    with pytest.raises(TaskError, match="submodule vendor/lib"):
        read_repository(str(repo), store)


def test_neither_the_configuration_of_a_repository_nor_its_hooks_run(tmp_path: Path, store: Store) -> None:
    commit, mark = clone(tmp_path / "repo"), tmp_path / "mark"
    git(tmp_path / "repo", "commit", "-qm", "a commit\x0bon\u2028two lines", "--allow-empty")
    planted(tmp_path / "repo", mark)
    found = read_repository(str(tmp_path / "repo"), store)
    assert sorted(found.tree) == sorted({*REPOSITORY, ".gitattributes"}) and head_of(tmp_path / "repo") != commit
    context = Context(found, list(functions_of(MODULE).values()), Lines({}), 0)
    assert list(strategy_named("revert")(context)) == []
    assert set(context.unused.values()) == {"changes no code of the product", "has no parent in this clone"}
    assert not mark.exists()


def test_commits_that_change_several_files_are_named(tmp_path: Path, store: Store) -> None:
    repo = tmp_path / "repo"
    write(repo, {"a.py": MODULE, "b.py": MODULE})
    git(repo, "init", "-q")
    for text in (MODULE, MODULE.replace("value - high + 1", "value - high")):
        write(repo, {"a.py": text, "b.py": text})
        git(repo, "add", "-A")
        git(repo, "commit", "-qm", "both")
    found = read_repository(str(repo), store)
    functions = named_once(product_sources(found.tree)[0])
    context = Context(found, functions, Lines({}), 0)
    assert list(strategy_named("revert")(context)) == []
    assert sorted(context.unused.values()) == ["changes several files of the product", "has no parent in this clone"]


def test_too_large_a_folder_is_named_before_it_is_read(tmp_path: Path, store: Store) -> None:
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(TaskError, match="holds 1024 MiB, at most 48 fit"):
        read_repository(str(tmp_path), store)


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("store")))


def repository(tree: dict[str, bytes]) -> Repository:
    return Repository("pack", "pack", tree, "MIT")


def screened(candidate: Candidate, file: str = "t.py") -> Screened:
    return Screened(candidate, {f"{file}::test": "assert 1 == 2"}, (f"{file}::test",), {file: 1}, file)


def placed(name: str, line: int) -> TestFunction:
    return TestFunction(name, (name,), name.split("::")[0], line, 0.0)


def archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))


def git(where: Path, *command: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *who, *command], cwd=where, check=True, capture_output=True)
