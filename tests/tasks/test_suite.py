import builtins
import keyword
import subprocess
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.digests import table_digest
from contracts.tasks import Split, Task, read_tasks, tasks_table
from curation.errors import TaskError
from curation.tasks.families import FAMILIES, Family, assertion, draw_cases, others, passes
from curation.tasks.names import NAMES, name_pools
from curation.tasks.suite import TaskSuiteConfig, generate_tasks, wrong_answers


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return generate_tasks(TaskSuiteConfig())


def test_names_are_256_distinct_words_that_python_does_not_know() -> None:
    assert len(set(NAMES)) == 256
    assert all(len(name) == 4 for name in NAMES)
    assert not [
        name for name in NAMES if keyword.iskeyword(name) or keyword.issoftkeyword(name) or hasattr(builtins, name)
    ]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_splits_are_dealt_different_functions_and_pairs(seed: int) -> None:
    pools = list(name_pools(seed).values())
    functions = [name for pool in pools for name in pool.functions]
    pairs = [frozenset(pair) for pool in pools for pair in pool.pairs]
    assert len(functions) == len(set(functions)) == 256
    assert len(pairs) == len(set(pairs))


def test_the_default_suite_has_768_tasks_of_14_families_in_the_promised_splits(tasks: list[Task]) -> None:
    assert len({task.task_id for task in tasks}) == len({task.digest for task in tasks}) == 768
    assert len({task.family for task in tasks}) == 14
    sizes = {split: sum(task.split == split for task in tasks) for split in Split}
    assert sizes == {Split.TRAIN: 448, Split.GATE: 128, Split.HELD_OUT: 192}
    order = [Split.TRAIN, Split.GATE, Split.HELD_OUT]
    assert tasks == sorted(tasks, key=lambda task: (order.index(task.split), task.task_id))


def test_splits_of_a_suite_share_no_function_name_and_no_argument_pair(tasks: list[Task]) -> None:
    for fact in ("function", "arguments"):
        seen = {split: {frozenset([task.meta[fact]] if fact == "function" else task.meta[fact]) for task in tasks if task.split == split}
                for split in Split}  # fmt: skip
        assert not seen[Split.TRAIN] & seen[Split.GATE]
        assert not seen[Split.TRAIN] & seen[Split.HELD_OUT]
        assert not seen[Split.GATE] & seen[Split.HELD_OUT]


def test_every_argument_name_of_gate_and_held_out_also_occurs_in_training_pairs() -> None:
    pools = name_pools(0)
    assert {name for pair in pools[Split.TRAIN].pairs for name in pair} == set(NAMES)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tasks: list[Task]) -> None:
    assert table_digest(tasks_table(tasks)) == table_digest(tasks_table(generate_tasks(TaskSuiteConfig())))
    assert not {task.digest for task in tasks} & {task.digest for task in generate_tasks(TaskSuiteConfig(seed=1))}


def test_tasks_survive_the_table(tasks: list[Task]) -> None:
    assert read_tasks(tasks_table(tasks)) == tasks


@pytest.mark.parametrize("count", [6, 7, 100, 1500])
def test_any_number_of_tasks_can_be_asked_for(count: int) -> None:
    assert len(generate_tasks(TaskSuiteConfig.of_count(count))) == count


def test_too_few_tasks_are_refused_with_the_fix() -> None:
    with pytest.raises(TaskError, match="at least 6"):
        TaskSuiteConfig.of_count(5)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_expression_computes_what_its_family_does(family: Family) -> None:
    for a, b in product(range(1, 10), repeat=2):
        assert eval(family.expression.format(a="a", b="b"), {"a": a, "b": b}) == family.compute(a, b)


@settings(max_examples=60, deadline=None)
@given(family=st.sampled_from(FAMILIES), seed=st.integers(0, 2**40))
def test_drawn_cases_accept_the_right_expression_and_no_other(family: Family, seed: int) -> None:
    flat = [case for test in draw_cases(family, Random(seed)).values() for case in test]
    for other in FAMILIES:
        namespace: dict[str, object] = {}
        exec(f"def f(a, b):\n    return {other.expression.format(a='a', b='b')}", namespace)
        survived = []
        for case in flat:
            try:
                exec(assertion(family, "f", case), namespace)
                survived.append(True)
            except AssertionError:
                survived.append(False)
        assert survived == [passes(other, family, case) for case in flat]
        assert all(survived) == (other is family)


def test_the_reference_fix_applies_with_git_and_changes_the_one_line(tasks: list[Task], tmp_path: Path) -> None:
    for number, task in enumerate(tasks[:: len(tasks) // 8]):
        root = tmp_path / str(number)
        for path, data in task.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        before = (root / task.meta["path"]).read_text().splitlines()
        subprocess.run(["git", "apply", "-"], cwd=root, input=task.reference_diff, check=True)
        after = (root / task.meta["path"]).read_text().splitlines()
        assert before[task.meta["line"] - 1].strip() == task.meta["buggy"]
        before[task.meta["line"] - 1] = "    " + task.meta["right"]
        assert before == after


def test_wrong_answers_are_one_a_family_and_leave_the_bug_itself_an_empty_patch(tasks: list[Task]) -> None:
    for task in tasks[:20]:
        wrong = wrong_answers(task)
        assert len(wrong) == 13
        assert task.reference_diff not in wrong.values()
        assert [name for name, diff in wrong.items() if not diff] == [task.meta["bug_family"]]
        assert set(wrong) == {family.name for family in others(next(f for f in FAMILIES if f.name == task.family))}
