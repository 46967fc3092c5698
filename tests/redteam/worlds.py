"""Tasks that final states are forged and written honestly for: a task and what a state must know of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from contracts.tasks import Split, Task
from curation.tasks.importing.trees import Tree, patched_tree, tree_patch
from curation.tasks.suite import TaskSuiteConfig, generate_tasks

_SEED = 7


@dataclass(frozen=True)
class World:
    """One task, the function that its hidden tests call, and what kind of tests these are."""

    name: str
    task: Task
    tested: str
    """The function that the hidden tests call."""
    path: str
    """The file that defines it."""
    kinds: frozenset[str] = frozenset()
    """What the hidden tests use: int, bool, text, float, raises, approx, fixture, conftest, parametrize, unittest,
    helper, class, package; compared: by `==`; object: an object of the repository's own class; golden: a file; roots:
    functions of `math`.
    """
    module: str = ""
    """The name that tests import it by; the file's own unless said."""
    fixed: Tree = field(default_factory=dict, compare=False)
    """The repository with the reference fix."""

    def has(self, kinds: Collection[str]) -> bool:
        """Whether its tests use all of these."""
        return set(kinds) <= self.kinds

    def diff(self, changes: Mapping[str, bytes | str | None]) -> bytes:
        """The final state with these files written, or removed where the content is None."""
        after = dict(self.task.files)
        for path, content in changes.items():
            if content is None:
                after.pop(path)
            else:
                after[path] = content.encode() if isinstance(content, str) else content
        return tree_patch(self.task.files, after)

    def repaired(self) -> dict[str, str]:
        """The files that the reference changes, as it leaves them."""
        return {path: data.decode() for path, data in self.fixed.items() if self.task.files.get(path) != data}

    def with_one_more_test(self) -> World:
        """The world with another hidden test, which the reference passes, but neither `fixed` nor any forgery does."""
        task, path = self.task, self.task.tests[0].split("::", 1)[0]
        test = self.filled("\n\ndef test_one_more():\n    import MOD as module\n\n    assert module.ONE_MORE == 1\n")
        fixed = {**self.fixed, self.path: self.fixed[self.path] + b"\n\nONE_MORE = 1\n"}
        more = replace(
            task,
            task_id=f"{task.task_id}-more",
            hidden_files={**task.hidden_files, path: task.hidden_files[path] + test.encode()},
            tests=(*task.tests, f"{path}::test_one_more"),
            reference_diff=tree_patch(task.files, fixed),
            checks=None,
        )
        return replace(self, name=f"{self.name}-more", task=more)

    def filled(self, text: str) -> str:
        """`text` about this task: FN is the tested function, MOD its module."""
        module = self.module or self.path.removesuffix(".py").replace("/", ".")
        return re.sub(r"\bMOD\b", module, re.sub(r"\bFN\b", self.tested, text))

    def replaced(self, code: str) -> str:
        """The module under test with `code` after it, which defines the tested function again."""
        return self.task.files[self.path].decode() + "\n\n" + self.filled(code)


def world_of(
    name: str, task: Task, kinds: Collection[str], *, tested: str = "", path: str = "", module: str = ""
) -> World:
    """The task's world. tested, path: by default the first function that its hidden tests import from a file of its
    own.
    """
    if not tested:
        tested, path = _imported(task)
    fixed = patched_tree(task.files, task.reference_diff, "reference")
    return World(name, task, tested, path, frozenset(kinds), module, fixed)


def _imported(task: Task) -> tuple[str, str]:
    for _, data in sorted(task.hidden_files.items()):
        for node in ast.walk(ast.parse(data)):
            path = f"{(node.module or '').replace('.', '/')}.py" if isinstance(node, ast.ImportFrom) else ""
            if path in task.files and isinstance(node, ast.ImportFrom):
                return node.names[0].name, path
    raise LookupError(f"the hidden tests of {task.task_id} import nothing from its files")


def quickstart(count: int) -> list[World]:
    """`count` tasks of the quickstart, of as many families as there are."""
    by_family: dict[str, Task] = {}
    for task in generate_tasks(TaskSuiteConfig.of_count(240, _SEED)):
        by_family.setdefault(task.family, task)
    worlds = []
    for family, task in by_family.items():
        hidden = b"".join(task.hidden_files.values())
        kind = "bool" if b" is True" in hidden or b" is False" in hidden else "int"
        worlds.append(
            world_of(
                f"quickstart-{family}", task, {kind, "plain", "quickstart", *(["compared"] if kind == "int" else [])}
            )
        )
    return worlds[:count]


def by_hand(
    name: str, kinds: str, tested: str, path: str, files: Mapping[str, str], right: str, wrong: str, *, module: str = ""
) -> World:
    """A task of a repository written here. files: as fixed, with hidden files (tests/test_hidden*). right, wrong: the
    text that the bug changes.
    """
    tree = {each: text.encode() for each, text in files.items()}
    hidden = {each: tree.pop(each) for each in [each for each in tree if "test_hidden" in each]}
    good = tree[path].decode()
    assert good.count(right) == 1, f"{name}: {right!r} occurs {good.count(right)} times"
    broken = tree | {path: good.replace(right, wrong).encode()}
    tests = tuple(test for each, data in hidden.items() if each.endswith(".py") for test in _tests(each, data))
    task = Task(
        f"hand-{name}",
        name,
        Split.TRAIN,
        f"fix {path}: {tested}",
        broken,
        hidden,
        tests,
        tree_patch(broken, tree),
        {"path": path, "fail_to_pass": []},
    )
    return world_of(name, task, kinds.split(), tested=tested, path=path, module=module)


def _tests(path: str, data: bytes) -> list[str]:
    names = []
    for node in ast.parse(data).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            names.append(f"{path}::{node.name}")
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test")]
            names += [f"{path}::{node.name}::{each.name}" for each in methods]
    return names
