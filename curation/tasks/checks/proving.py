"""Generate a task's decoys and observed tests, and prove them on its reference solution."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from contracts.digests import digest_of
from contracts.syntax import parse_python
from contracts.tasks import Checks, Decoy, Observed, Task, files_digest
from curation.cheating import base_name, base_names, passed, passing
from curation.tasks.checks import decoys, observing
from curation.tasks.checks.expectations import agrees, rights
from curation.tasks.checks.mentions import candidates
from envd.client import VerifyResult

CHECKS_VERSION = "5"
"""Bump if the same tests get other decoys or observations."""
_SEED = "3"
"""Of decoys. A bump gives all tasks other digests, also those whose tests get the same checks as before."""
_ROUNDS = 3
_MOST_STUCK = 2
"""Times that a decoy's run is repeated, without the test that did not end."""
_WAYS = [(tables, plain, data) for data in (True, False) for plain in (True, False) for tables in (True, False)]
"""Variants of observing: hide dictionaries' values, strip values in computations of their methods, leave out hidden
files that are expectations.
"""
Run = Callable[[Mapping[str, bytes] | None, Sequence[str] | None], Coroutine[None, None, VerifyResult]]
"""One run of the reference solution, with these hidden files and tests, or the task's own."""


@dataclass(frozen=True)
class Proof:
    """Proven checks, and the run of the reference as written."""

    checks: Checks
    written: VerifyResult


async def prove(task: Task, run: Run) -> Proof:
    """Generate and prove the checks of a task. Raises the errors of `run`.

    If the reference fails the tests as written, nothing can be proven: then only decoys are used, of tests with
    assertions. Checks run tests with all of their parameters: a test of which parameters that the task does not name
    are skipped or fail is undecided.
    """
    files = {path: content for path, content in task.hidden_files.items() if path.endswith(".py")}
    data = {path: content for path, content in task.hidden_files.items() if path not in files}
    repository = {path: content for path, content in task.files.items() if path not in files}
    data = await asyncio.to_thread(candidates, data, repository)
    tests = base_names(task.tests)
    seed = digest_of([_SEED, task.task_id, files_digest(task.hidden_files), list(task.tests)])
    versions = await asyncio.to_thread(decoys.make, files, seed, data)  # thousands of assertions take seconds
    moved = await asyncio.to_thread(decoys.make_moved, files, seed)
    always = 2 if versions and moved else 1
    versions[1:1] = [moved] if versions and moved else []
    keys = await asyncio.to_thread(observing.functions_of, files)
    sound = tests
    if set(tests) != set(task.tests):
        good = passing(await run(None, tests))
        sound = tuple(test for test in tests if test in good)
        always = always if sound else 0

    async def decoy(version: dict[str, bytes]) -> VerifyResult:
        hidden, left = task.hidden_files | version, sound
        result = await run(hidden, left)
        for repetition in range(_MOST_STUCK):
            hanging = stuck(result)
            left = tuple(test for test in left if test not in hanging)
            if result.exit != "timed_out" or not left or (repetition and not hanging):
                break
            result = await run(hidden, left)
        return result

    async def failed(chosen: Sequence[dict[str, bytes]]) -> list[VerifyResult]:
        return await asyncio.gather(*map(decoy, chosen))

    written, observed, results = await asyncio.gather(
        run(None, None), _observe(task, files, data, sound, keys, run), failed(versions[:always])
    )
    if not passed(task.tests, written):
        holding = tuple(test for test in tests if function_of(test) in keys)
        kept = (Decoy(versions[0], holding),) if versions and holding else ()
        return Proof(Checks(None, kept, tuple(test for test in tests if test not in holding)), written)
    if len(versions) > always > 0 and _unobserved(sound, observed, keys):
        results += await failed(versions[always:])
    # a busy machine is no proof that the tests fail
    ended = [each for each in zip(versions, results, strict=False) if each[1].exit != "timed_out"]
    # a verdict runs the same tests in every decoy, so a test that hangs in one decoy is left out of all
    ending = set(sound).intersection(*(_asked(result) for _, result in ended))
    literal = await asyncio.to_thread(_by_literals, tests, observed, task.hidden_files)
    chosen = []
    for version, result in ended:
        # with another input, a right state may give the value that a literal asks for
        decided = ending - passing(result) - (literal if version is moved else frozenset())
        if failing := tuple(test for test in _asked(result) if test in decided):
            chosen.append(Decoy(version, failing))
    failing_once = {test for each in chosen for test in each.tests}
    decided = failing_once | set(observed.seen if observed else ())
    return Proof(
        Checks(
            observed,
            tuple(chosen),
            tuple(test for test in tests if test not in decided),
            tuple(sorted({name for result in (written, *results) for name in result.tampering})),
            tuple(test for test in tests if chosen and test in ending - failing_once),
        ),
        written,
    )


def stuck(result: VerifyResult) -> set[str]:
    """Tests that a run began and did not end, by name without parameters."""
    return {
        base_name(each.name)
        for each in result.outcomes
        if each.status == "missing" and each.message.startswith("no report of its")
    }


def _asked(result: VerifyResult) -> tuple[str, ...]:
    """Tests that were asked for, without their parameters, in order."""
    return base_names([each.name for each in result.outcomes])


def _unobserved(tests: Sequence[str], observed: Observed | None, keys: Mapping[str, list[str]]) -> bool:
    """Whether a test has an assertion that is not observed, so that each assertion needs its own decoy."""
    if observed is None:
        return True
    return any(test not in observed.seen for test in tests) or any(
        key not in observed.rules for each in keys.values() for key in each
    )


def wholly_observed(tests: Sequence[str], observed: Observed | None, files: dict[str, bytes]) -> frozenset[str]:
    """Tests, by name without parameters, of which every assertion is observed, with those of all helpers beside them.

    tests: all tests of the files that run. files: the hidden tests.
    """
    keys, named = observing.functions_of(files), {function_of(test) for test in tests}
    if observed is None:
        return frozenset()
    partly = {function for function, each in keys.items() if not set(each) <= observed.rules.keys()}
    if not partly <= named:
        return frozenset()
    return frozenset(test for test in tests if test in observed.seen and function_of(test) not in partly)


def _by_literals(tests: Sequence[str], observed: Observed | None, files: dict[str, bytes]) -> frozenset[str]:
    """Wholly observed tests that compare values with literals or expect exceptions, and do nothing else."""
    if observed is None:
        return frozenset()
    rules = observed.rules

    def literal(key: str, hidden: Sequence[str]) -> bool:
        compared = rules[key].form == "compare" and (rules[key].want != "" or all(hidden))
        return compared or rules[key].form in ("raises", "kind")

    whole = wholly_observed(tests, observed, files)
    return frozenset(test for test in whole if all(literal(*each) for each in observed.seen[test].items()))


def as_written(tests: Sequence[str], observed: Observed | None, files: Mapping[str, bytes]) -> frozenset[str]:
    """Tests, by name without parameters, whose code the files of observed tests leave as it is in `files`, the hidden
    tests. None of a file in which they change anything but tests, or that is nested too deeply to be compared.
    """
    after = {**files, **(observed.files if observed else {})}
    found = set[str]()
    for path in {test.split("::", 1)[0] for test in tests}:
        names = {test.split("::", 1)[1]: test for test in tests if test.startswith(f"{path}::")}
        try:
            old, new = (_definitions(each.get(path, b"")) for each in (files, after))
        except RecursionError:
            continue
        changed = {name for name, code in old.items() if new.get(name) != code}
        if changed <= names.keys():
            found |= {test for name, test in names.items() if name not in changed}
    return frozenset(found)


def _definitions(data: bytes) -> dict[str, str]:
    """Code of a file's functions by `Class::name`, and its other statements, without positions."""
    found: dict[str, str] = {}

    def add(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}::")
                node.body = []
            name = prefix + node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
            code = ast.dump(node)
            found[name or prefix + code] = found.get(name, "") + code

    add(parse_python(data).body, "")
    return found


async def _observe(
    task: Task,
    files: dict[str, bytes],
    data: Mapping[str, bytes],
    tests: Sequence[str],
    keys: Mapping[str, list[str]],
    run: Run,
) -> Observed | None:
    """Observed tests that agree with the reference, of the variant that leaves the fewest assertions unobserved."""
    if not tests:
        return None
    best: tuple[int, Observed | None] = (len(files) + sum(map(len, keys.values())), None)
    tried: list[dict[str, bytes]] = []
    for tables, plain, hides in _WAYS:
        make = partial(observing.make, files, tables=tables, plain=plain, data=data if hides else None)
        made = await asyncio.to_thread(make)
        if made.files in tried:
            continue
        tried.append(made.files)
        without, found = await _observed(task, made, make, tests, keys, run)
        if found is not None and len(without) < best[0]:
            best = (len(without), found)
        if not without:
            break
    drawn = await asyncio.to_thread(observing.drawn_functions, files)
    return _repeatable(best[1], drawn)


def _repeatable(observed: Observed | None, drawn: set[str]) -> Observed | None:
    """The observed tests without those that see other values in every run."""
    if observed is None or not drawn:
        return observed
    seen = {test: keys for test, keys in observed.seen.items() if function_of(test) not in drawn}
    return dataclasses.replace(observed, seen=seen) if seen else None


async def _observed(
    task: Task,
    made: Observed,
    make: Callable[[Collection[str]], Observed],
    tests: Sequence[str],
    keys: Mapping[str, list[str]],
    run: Run,
) -> tuple[set[str], Observed | None]:
    """Observed tests of one variant, and the keys of assertions that it leaves unobserved.

    made: with all assertions. make: makes the variant without some.
    """
    without: set[str] = set()
    for _ in range(_ROUNDS):
        if not made.files:
            break
        placed = made.placed(task.hidden_files)
        result = await run(placed, tests)
        if result.exit == "timed_out" and not without:  # perhaps since the machine was busy
            result = await run(placed, tests)
        hanging = stuck(result) if result.exit == "timed_out" else set()
        told = tuple(test for test in tests if test in hanging or test in passing(result)) if hanging else tests
        bad = _disagreeing(made, result, told, keys)
        if not bad:
            seen = _seen(made, result)
            return without, dataclasses.replace(made, seen=seen) if seen else None
        if bad <= without:
            break
        without |= bad
        made = await asyncio.to_thread(make, without)
    return without, None


def _disagreeing(made: Observed, result: VerifyResult, tests: Sequence[str], keys: Mapping[str, list[str]]) -> set[str]:
    """Keys of assertions that can't be observed: they contradict the reference, or their test fails without
    expectations.
    """
    bad = {
        each.key
        for each in result.observations
        if each.key not in made.rules or agrees(made, each.key, each.value) is not True
    }
    good = passing(result)
    for test in tests:
        if test not in good:
            bad |= set(keys.get(function_of(test), [])) or set(made.rules)
    return bad


def _seen(made: Observed, result: VerifyResult) -> dict[str, dict[str, list[str]]]:
    seen: dict[str, dict[str, list[str]]] = {}
    for each in result.observations:
        seen.setdefault(base_name(each.test), {}).setdefault(each.key, []).append(rights(each.value))
    return seen


def function_of(test: str) -> str:
    """`path::function` of a test's name."""
    path, _, rest = test.partition("::")
    return f"{path}::{rest.rpartition('::')[2]}"
