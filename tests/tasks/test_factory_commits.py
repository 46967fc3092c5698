"""Strategy `revert` over a git history: 30 made commits after the first, of which some can't be undone at HEAD."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from with_client import check_agents, with_client

from contracts.artifacts import Artifact
from contracts.store import Store, open_store
from curation.errors import TaskError
from curation.tasks.factory.functions import Function, Lines, product_sources
from curation.tasks.factory.make import MakeConfig, make_suite
from curation.tasks.factory.source import Repository, read_repository
from curation.tasks.factory.strategies import Candidate, Context, strategy_named
from curation.tasks.importing.splits import DEFAULT_SHARES
from curation.tasks.inspect import suite_tasks
from envd.client import SandboxClient
from envd.local import TRUSTED, LocalEnvd

COUNT, TWICE = 12, 6
"""Functions that a commit mends, and how many of these a later commit changes again on the same line."""
CORE = "pack/core.py"
OVERWRITTEN = {*(f"mend f{n}" for n in (*range(TWICE), COUNT - 1)), "remark 0", "raise the limit"}
"""Commits on whose lines, or beside them, a later one stands."""
UNDONE = {
    "does not apply to HEAD": len(OVERWRITTEN),
    "changes no code of the product": 6,
    "changes no code": 1,
    "adds or removes a file": 1,
    "changes no function that tests run": 1,
    "has no parent in this clone": 1,
}
"""Number of commits without a bug, by reason."""


@pytest.fixture(scope="module")
def trusted() -> Iterator[str]:
    with LocalEnvd(rules=TRUSTED) as envd:
        yield envd.address


def function(name: str, line: str) -> str:
    return (
        f'def {name}(value):\n    """Sum of some terms."""\n    first = value\n    second = first + LIMIT\n'
        f"    {line}\n    third = result\n    fourth = third\n    return fourth\n"
    )


class History:
    """A git repository that grows by commits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines = {f"f{n}": "result = first" for n in range(COUNT)} | {"nobody": "result = first"}
        self.limit, self.more = 0, ""
        root.mkdir()
        self._git("init", "--quiet", "--template=")

    def _git(self, *command: str) -> None:
        who = {f"GIT_{role}_{part}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
        subprocess.run(["git", *command], cwd=self.root, check=True, env={**os.environ, **who})

    def commit(self, subject: str, files: dict[str, str] | None = None) -> None:
        """Write the module and these files, and commit them."""
        module = f"LIMIT = {self.limit}\n\n\n" + "\n\n".join(function(*each) for each in self.lines.items()) + self.more
        for path, text in {CORE: module, **(files or {})}.items():
            (self.root / path).parent.mkdir(exist_ok=True)
            (self.root / path).write_text(text)
        self._git("add", "--all")
        self._git("commit", "--quiet", "-m", subject)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    history = History(tmp_path_factory.mktemp("history") / "pack")
    first = {"LICENSE": "Permission is hereby granted, free of charge, to any person", "pack/__init__.py": ""}
    history.commit("begin", first)
    for n in range(COUNT):
        history.lines[f"f{n}"] = f"result = second + {n}"
        history.commit(f"mend f{n}")
    for n in range(TWICE):
        history.lines[f"f{n}"] = f"result = {n} + 2 * second"
        history.commit(f"mend f{n} again")
    for n in range(3):
        history.commit(f"say {n}", {"README.md": f"Sums, version {n}.\n"})
    for path, text in wanted(history).items():
        history.commit(f"test {path}", {path: text})
    for n in range(2):
        history.more += f"\n\n# Remark {n}.\n"
        history.commit(f"remark {n}")
    history.lines["nobody"] = "result = second"
    history.commit("mend what nobody tests")
    history.commit("add a module", {"pack/more.py": "def more():\n    return 1\n"})
    history.limit = 1
    history.commit("raise the limit", wanted(history))
    history.limit, history.lines["f11"] = 2, "result = second + 1 + 10"
    history.commit("raise the limit and simplify f11", wanted(history))
    return history.root


def wanted(history: History) -> dict[str, str]:
    """Test files that expect what the module computes with its LIMIT."""
    found = {}
    for n in range(3):
        numbers = range(4 * n, 4 * n + 4)
        wants = {m: 2 * (1 + history.limit) + m if m < TWICE else 1 + history.limit + m for m in numbers}
        names = ", ".join(f"f{m}" for m in numbers)
        tests = "\n\n".join(f"def test_f{m}():\n    assert f{m}(1) == {want}\n" for m, want in wants.items())
        found[f"tests/test_core_{n}.py"] = f"from pack.core import {names}\n\n\n{tests}"
    return found


def covered(repository: Repository) -> list[Function]:
    sources = product_sources(repository.tree)[0]
    return [each for source in sources for each in source.functions if each.qualname.startswith("f")]


def test_commits_are_undone_at_head_and_the_others_named(clone: Path, tmp_path: Path) -> None:
    repository = read_repository(str(clone), open_store(str(tmp_path)))
    context = Context(repository, covered(repository), Lines({}), 0)
    found = list(strategy_named("revert")(context))
    assert len(found) + len(context.unused) == 31, "30 commits after the first"
    assert Counter(context.unused.values()) == UNDONE
    assert {name.split(" ", 1)[1] for name, why in context.unused.items() if "apply" in why} == OVERWRITTEN
    functions = {each.meta["functions"][0] for each in found}
    assert functions == {f"{CORE}::f{n}" for n in range(COUNT)} and len(found) == COUNT
    bug = next(each for each in found if each.meta["functions"] == [f"{CORE}::f3"])
    changed = bug.apply(repository.tree)
    assert b"    result = second + 3\n" in changed[CORE] and b"result = 3 + 2 * second" not in changed[CORE]
    outside = next(each for each in found if len(each.edits) > 1)
    assert b"LIMIT = 1\n" in outside.apply(repository.tree)[CORE]
    assert all(Candidate.from_row(each.to_row()) == each for each in found)


def test_functions_of_an_older_version_come_back_and_the_others_are_named(clone: Path, tmp_path: Path) -> None:
    repository = read_repository(str(clone), open_store(str(tmp_path)))
    functions = covered(repository)
    (core,) = {each.source.path for each in functions}
    lines = repository.tree[core].decode()
    assert "result = 3 + 2 * second\n" in lines
    changed = lines.replace("result = 3 + 2 * second\n", "result = 3\n").replace("def f4(", "def before_f4(")
    older = {core: changed.replace('"""Sum of some terms."""', '"""Sum."""').encode()}
    reasons = {}
    for before in (older, {}, {core: b"print 'Python 2'\n"}):
        context = Context(repository, functions, Lines({}), 0, older=before)
        reasons[len(reasons)] = ([each.function for each in strategy_named("revert")(context)], context.unused)
    found, unused = reasons[0]
    assert found == [f"{core}::f3"] and len(unused) == len(functions) - 1
    assert unused.pop(f"{core}::f4") == "not in the older version"
    assert set(unused.values()) == {"same code in the older version"}, "its docstring differs"
    assert reasons[1] == ([], {each.key: "its file is not in the older version" for each in functions})
    assert reasons[2] == (
        [],
        {each.key: "its file in the older version: this Python can't read it" for each in functions},
    )


@pytest.mark.slow
def test_versions_without_a_difference_say_so(clone: Path, tmp_path: Path, trusted: str) -> None:
    config = MakeConfig(40, ("revert",), revert_from=str(clone))
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(TaskError, match=r"gave no task: same code in the older version \(\d+\)$"):
        with_client(trusted, lambda client: make_suite(str(clone), config, DEFAULT_SHARES, store, client))


@pytest.mark.slow
def test_undone_commits_become_tasks(clone: Path, tmp_path: Path, trusted: str) -> None:
    store = open_store(str(tmp_path / "store"))
    suite = with_client(trusted, lambda client: make(clone, store, client))
    card, tasks = suite.json("card.json"), list(suite_tasks(suite, None).values())
    assert Counter(card["unused"].values()) == UNDONE
    assert len(tasks) >= COUNT, card["left_out"]
    assert {task.meta["operator"] for task in tasks} == {"revert_commit"}
    check_agents(tasks, store, trusted)


@pytest.mark.slow
def test_a_folder_without_history_asks_for_an_older_version(tmp_path: Path, trusted: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/test_it.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "pack/LICENSE").write_text("Permission is hereby granted, free of charge, to any person")
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(TaskError, match="revert needs a git repository, or an older version: name one by --older"):
        with_client(trusted, lambda client: make(tmp_path / "pack", store, client))


async def make(source: Path, store: Store, client: SandboxClient) -> Artifact:
    return await make_suite(str(source), MakeConfig(40, ("revert",)), DEFAULT_SHARES, store, client)
