import builtins
import keyword
import subprocess
import sys
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.digests import table_digest
from contracts.tasks import Split, Task, read_tasks, tasks_table
from curation.errors import TaskError
from curation.tasks.cases import assertion, draw_cases, mistakes, passes
from curation.tasks.compositions import deal_chains, families_of, family_name
from curation.tasks.names import NAMES, function_names
from curation.tasks.operations import BY_NAME, OPERATIONS, Operation, allowed, evaluate, places, trained, withheld
from curation.tasks.suite import TaskSuiteConfig, generate_tasks, wrong_answers

CHAINS = [chain for length in (2, 3) for chain in product(*(allowed(place) for place in places(length)))]


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return generate_tasks(TaskSuiteConfig())


def of_split(tasks: list[Task], *splits: Split) -> list[Task]:
    return [task for task in tasks if task.split in splits]


def placed(task: Task) -> set[tuple[str, str]]:
    """(place, operation) of everything that the task shows, right or wrong."""
    chain = task.meta["chain"]
    return {*zip(places(len(chain)), chain, strict=True), (task.meta["place"], task.meta["wrong_operation"])}


def test_names_are_256_distinct_words_that_python_does_not_know() -> None:
    assert len(set(NAMES)) == 256
    assert all(len(name) == 4 for name in NAMES)
    assert not [
        name for name in NAMES if keyword.iskeyword(name) or keyword.issoftkeyword(name) or hasattr(builtins, name)
    ]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_splits_are_dealt_different_functions_and_compositions(seed: int) -> None:
    functions = [name for dealt in function_names(seed).values() for name in dealt]
    assert len(functions) == len(set(functions)) == 256
    chains = deal_chains(seed)
    assert chains[Split.TRAIN] == chains[Split.GATE]
    begun = {split: {(len(chain), chain[:2]) for chain in chains[split]} for split in (Split.TRAIN, Split.HELD_OUT)}
    assert not begun[Split.TRAIN] & begun[Split.HELD_OUT]
    assert 0.2 < len(begun[Split.HELD_OUT]) / (len(begun[Split.TRAIN]) + len(begun[Split.HELD_OUT])) < 0.3
    for split in (Split.TRAIN, Split.HELD_OUT):
        for length in (2, 3):
            own = [chain for chain in chains[split] if len(chain) == length]
            for index, place in enumerate(places(length)):
                assert {chain[index] for chain in own} == set(trained(place))


def test_the_default_suite_has_720_tasks_in_the_promised_splits(tasks: list[Task]) -> None:
    assert len({task.task_id for task in tasks}) == len({task.digest for task in tasks}) == 720
    sizes = {split: len(of_split(tasks, split)) for split in Split}
    assert sizes == {Split.TRAIN: 448, Split.GATE: 128, Split.HELD_OUT: 96, Split.UNSEEN: 48}
    for split in Split:
        assert {task.family for task in of_split(tasks, split)} == {family_name(each) for each in families_of(split)}
    assert tasks == sorted(tasks, key=lambda task: (list(Split).index(task.split), task.task_id))


def test_held_out_compositions_occur_in_no_task_that_a_decision_or_the_training_reads(tasks: list[Task]) -> None:
    known = {_beginning(task) for task in of_split(tasks, Split.TRAIN, Split.GATE)}
    new = {_beginning(task) for task in of_split(tasks, Split.HELD_OUT)}
    assert len(new) > 15
    assert not known & new


def test_an_unseen_task_asks_for_an_operation_where_no_other_task_has_it(tasks: list[Task]) -> None:
    shown = set().union(*(placed(task) for task in of_split(tasks, Split.TRAIN, Split.GATE, Split.HELD_OUT)))
    for task in of_split(tasks, Split.UNSEEN):
        new = placed(task) - shown
        assert new == {(task.meta["place"], task.meta["right_operation"])}
    assert all(operation.name in {name for _, name in shown} for place in places(3) for operation in withheld(place))


def test_a_task_has_two_or_three_modules_and_a_wrong_line_at_any_depth(tasks: list[Task]) -> None:
    shapes = {(len(task.meta["paths"]), task.meta["place"]) for task in of_split(tasks, Split.TRAIN)}
    assert shapes == {(2, "inner"), (2, "outer"), (3, "inner"), (3, "middle"), (3, "outer")}
    for task in tasks:
        assert f"fix {task.meta['paths'][-1]}:" in task.instruction
        assert len(task.meta["chain"]) == len(task.meta["paths"]) == len(task.files) - 2
    elsewhere = [task for task in tasks if task.meta["path"] != task.meta["paths"][-1]]
    assert len(elsewhere) > len(tasks) / 2
    assert not [task for task in elsewhere if task.meta["path"] in task.instruction]


def test_splits_of_a_suite_share_no_function_name(tasks: list[Task]) -> None:
    seen = {split: {name for task in of_split(tasks, split) for name in task.meta["functions"]} for split in Split}
    assert sum(map(len, seen.values())) == len(set().union(*seen.values()))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tasks: list[Task]) -> None:
    assert table_digest(tasks_table(tasks)) == table_digest(tasks_table(generate_tasks(TaskSuiteConfig())))
    assert not {task.digest for task in tasks} & {task.digest for task in generate_tasks(TaskSuiteConfig(seed=1))}


def test_tasks_survive_the_table(tasks: list[Task]) -> None:
    assert read_tasks(tasks_table(tasks)) == tasks


@pytest.mark.parametrize("count", [8, 9, 100, pytest.param(1500, marks=pytest.mark.slow)])
def test_any_number_of_tasks_can_be_asked_for(count: int) -> None:
    tasks = generate_tasks(TaskSuiteConfig.of_count(count))
    assert len(tasks) == count
    assert {task.split for task in tasks} == set(Split)


def test_too_few_tasks_are_refused_with_the_fix() -> None:
    with pytest.raises(TaskError, match="at least 8"):
        TaskSuiteConfig.of_count(7)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_computes_what_its_symbol_does(operation: Operation) -> None:
    for a, b in product(range(-3, 10), range(1, 10)):
        answer = eval(f"a {operation.symbol} b", {"a": a, "b": b})
        assert operation.compute(a, b) == answer
        assert type(operation.compute(a, b)) is type(answer)


def test_every_chain_has_assertions_that_no_other_single_operation_passes() -> None:
    for chain in CHAINS:
        flat = [
            case for test in draw_cases(chain, Random(str([each.name for each in chain]))).values() for case in test
        ]
        assert all(passes(chain, chain, case) for case in flat)
        for other in mistakes(chain):
            assert not all(passes(other, chain, case) for case in flat)


@settings(max_examples=60, deadline=None)
@given(chain=st.sampled_from(CHAINS), seed=st.integers(0, 2**40))
def test_assertions_judge_real_functions_as_predicted(chain: tuple[Operation, ...], seed: int) -> None:
    flat = [case for test in draw_cases(chain, Random(seed)).values() for case in test]
    for other in (chain, *mistakes(chain)):
        names = "abcd"[: len(chain) + 1]
        body = names[0]
        for each, name in zip(other, names[1:], strict=True):
            body = f"({body} {each.symbol} {name})"
        namespace: dict[str, object] = {}
        exec(f"def f({', '.join(names)}):\n    return {body}", namespace)
        survived = []
        for case in flat:
            try:
                exec(assertion(chain, "f", case), namespace)
                survived.append(True)
            except (AssertionError, ZeroDivisionError):
                survived.append(False)
        assert survived == [passes(other, chain, case) for case in flat]
        assert all(survived) == (other is chain)


def test_the_modules_of_a_task_compute_its_chain_once_the_fix_is_applied(tasks: list[Task], tmp_path: Path) -> None:
    for number, task in enumerate(tasks[::60]):
        root = tmp_path / str(number)
        _write(task, root)
        subprocess.run(["git", "apply", "-"], cwd=root, input=task.reference_diff, check=True)
        values = [7, 3, 2, 5][: len(task.meta["arguments"])]
        module, function = task.meta["paths"][-1].removesuffix(".py"), task.meta["function"]
        told = subprocess.run(
            [sys.executable, "-c", f"from {module} import {function}; print({function}{tuple(values)})"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.strip() == str(evaluate([BY_NAME[name] for name in task.meta["chain"]], values))


def test_the_reference_fix_applies_with_git_and_changes_the_one_line(tasks: list[Task], tmp_path: Path) -> None:
    for number, task in enumerate(tasks[:: len(tasks) // 8]):
        root = tmp_path / str(number)
        _write(task, root)
        before = (root / task.meta["path"]).read_text().splitlines()
        subprocess.run(["git", "apply", "-"], cwd=root, input=task.reference_diff, check=True)
        after = (root / task.meta["path"]).read_text().splitlines()
        assert before[task.meta["line"] - 1].strip() == task.meta["buggy"]
        before[task.meta["line"] - 1] = "    " + task.meta["right"]
        assert before == after


def test_wrong_answers_are_all_other_operations_of_the_place_and_leave_the_bug_itself_an_empty_patch(
    tasks: list[Task],
) -> None:
    for task in tasks[::20]:
        wrong = wrong_answers(task)
        assert task.reference_diff not in wrong.values()
        assert [name for name, diff in wrong.items() if not diff] == [task.meta["wrong_operation"]]
        assert {*wrong, task.meta["right_operation"]} == {each.name for each in allowed(task.meta["place"])}


def _beginning(task: Task) -> tuple[int, str, str]:
    chain = task.meta["chain"]
    return len(chain), chain[0], chain[1]


def _write(task: Task, root: Path) -> None:
    for path, data in task.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
