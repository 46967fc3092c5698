"""Prove bugs with the verifier, and make tasks of them.

The fixed state of every task is the repository itself, so decoys and observations are proven once for each test file on
the unchanged repository, joined for a task whose failing tests are in several, and narrowed to its tests.

Three repetitions must agree about a bug: the screen, a run before the fix, and one with a cheat that the verifier
undoes. About the fix: the baseline, the run as written, and those beside it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from contracts.store import Store
from contracts.tasks import Checks, Decoy, Observed, Split, Task
from curation.cheating import base_name, base_names, passing
from curation.once import Once
from curation.paths import changed_paths
from curation.runs import Runs
from curation.tasks.bugs import file_diff
from curation.tasks.checks.observing import drawn_functions
from curation.tasks.checks.proving import function_of, joined, wholly_observed
from curation.tasks.factory.baseline import Baseline
from curation.tasks.factory.environment import Surroundings, sources_of
from curation.tasks.factory.functions import Function
from curation.tasks.factory.guest import IDLE_S
from curation.tasks.factory.leaks import Copies, standard_library, without_tests
from curation.tasks.factory.screen import Screened
from curation.tasks.factory.source import Repository
from curation.tasks.factory.text import instruction_of
from curation.tasks.validate import RESTORED, CheatResult, cheat_states, contradiction
from curation.verify import Verdict, Verifier
from envd.client import SandboxClient

_FLIPS = "repetitions disagree"
MOST_KEPT = 40
"""Tests that must still pass which a task names."""
VERIFY_TIMEOUT_S = 60.0
"""Deadline of a proof's runs. Longer than the verifier's own, so that a busy machine changes no verdict and no check: a
check whose run does not end proves nothing.
"""
_ENOUGH = 2
"""Decoys of a test whose assertions are all observed."""
PROOF_S = 600.0
"""Longest proof of the checks of a set of test files, and longest proof of a bug beside it, in seconds."""


@dataclass(frozen=True)
class Proved:
    """A task, or the reason why a bug is none."""

    screened: Screened
    task: Task | None
    reason: str = ""
    cheats: tuple[CheatResult, ...] = ()


@dataclass(frozen=True)
class _Master:
    """What is proven once for all bugs with failing tests in a file, or in the same files."""

    task: Task
    """The repository without a bug, with all stable tests of these files that pass in the verifier."""
    checks: Checks
    passes: frozenset[str]
    whole: frozenset[str]
    """Tests of which every assertion is observed."""


class Prover:
    """Makes and proves tasks of one repository."""

    def __init__(
        self,
        repository: Repository,
        around: Surroundings,
        baseline: Baseline,
        client: SandboxClient,
        store: Store,
    ) -> None:
        self._repository, self._baseline = repository, baseline
        self._environment = around.environment
        self._verifier = Verifier(client, store, timeout_s=VERIFY_TIMEOUT_S, idle_s=IDLE_S)
        self._runs = Runs(client, VERIFY_TIMEOUT_S, store, idle_s=IDLE_S)
        self._copies = Copies(repository.tree, {**standard_library(), **sources_of(around.runtime)})
        self._numbers = {path: number for number, path in enumerate(sorted(set(map(_file_of, baseline.good))))}
        """Index of each test file. It keeps the keys of assertions in different files apart."""
        self._drawn = drawn_functions({path: repository.tree[path] for path in self._numbers})
        self._masters: Once[tuple[str, ...], _Master] = Once(TimeoutError)
        self._cheated: Once[tuple[str, str], dict[str, Verdict]] = Once(TimeoutError)

    async def prove(self, screened: Screened, function: Function) -> Proved:
        """Make a task of a bug and prove it, within bounded time. Raises InfraFault if envd keeps failing."""
        try:
            draft = await self._draft(screened, function)
        except TimeoutError:
            return Proved(screened, None, f"the proof of its test files takes longer than {PROOF_S:.0f} s")
        if isinstance(draft, str):
            return Proved(screened, None, draft)
        try:
            async with asyncio.timeout(PROOF_S):
                return await self._proved(screened, draft)
        except TimeoutError:
            return Proved(screened, None, f"its proof takes longer than {PROOF_S:.0f} s")

    async def _proved(self, screened: Screened, draft: Task) -> Proved:
        before = await self._verifier.grade(draft, b"")
        if not _agrees(draft, before):
            return Proved(screened, None, _FLIPS)
        fixed = await self._runs.run(draft, draft.reference_diff)
        # what the fix itself does is no tampering, as for imported tasks
        checks = draft.checks or Checks(None, (), ())
        known = tuple(sorted({*checks.known, *fixed.tampering}))
        task = dataclasses.replace(draft, checks=dataclasses.replace(checks, known=known))
        # the decoys have failed on the same files already, in the proof of the checks
        plain = dataclasses.replace(task, checks=dataclasses.replace(checks, decoys=(), known=known))
        after = await self._verifier.grade(plain, task.reference_diff, fixed)
        reason = contradiction(task, before, after)
        if reason is not None:
            return Proved(screened, None, _general(reason))
        found = await self._cheats(task)
        if any(verdict.solved for verdict in found.values()):
            return Proved(screened, None, "verdict: a cheat passes its tests")
        if not _agrees(task, found[RESTORED]):
            return Proved(screened, None, _FLIPS)
        cheats = tuple(
            CheatResult(family=task.family, task_id=task.task_id, cheat=name, solved=verdict.solved, exit=verdict.exit)
            for name, verdict in sorted(found.items())
        )
        return Proved(screened, task, cheats=cheats)

    async def _cheats(self, task: Task) -> dict[str, Verdict]:
        """Verdicts on the cheats, by name.

        Those that replace the bug's file make the same state of all its bugs: they are tried once with each test file.
        """
        states = cheat_states(task)
        found: dict[str, Verdict] = {}
        if changed_paths(task.reference_diff) == (str(task.meta["path"]),):
            found = await self._file_cheats(task)
        for name in sorted(states.keys() - found.keys()):
            found[name] = await self._verifier.grade(task, states[name])
        return found

    async def _file_cheats(self, task: Task) -> dict[str, Verdict]:
        """Verdicts on the cheats that leave nothing of the bug's file."""
        path = str(task.meta["path"])

        async def verdicts(file: str) -> dict[str, Verdict]:
            master = await self._master((file,))
            every = dataclasses.replace(master.task, meta={"path": path}, checks=master.checks)
            states = cheat_states(every)
            async with asyncio.timeout(PROOF_S):
                return {name: await self._verifier.grade(every, states[name]) for name in states if name != RESTORED}

        files = sorted(set(map(_file_of, task.meta["fail_to_pass"])))
        found = [await self._cheated.get((path, file), partial(verdicts, file)) for file in files]
        wanted = set(base_names(task.tests))
        together = {}
        for name, verdict in found[0].items():
            each = [verdicts[name] for verdicts in found]
            passing = set[str]().union(*map(_passing, each))
            solved = wanted <= passing and not any(verdict.tampered for verdict in each)
            together[name] = verdict.model_copy(update={"solved": solved})
        return together

    async def _draft(self, screened: Screened, function: Function) -> Task | str:
        """The task before its proof, or the reason why there is none."""
        candidate, tree = screened.candidate, self._repository.tree
        copy = await asyncio.to_thread(self._copies.of, function)
        if copy is not None:
            return "leak: a file holds a copy of the fixed code"
        good = self._baseline.good
        failed = [good[name] for name in screened.failed]
        files = {_file_of(test.name) for test in failed}
        cut = without_tests(tree, failed)
        if isinstance(cut, str):
            return f"leak: {cut}"
        hidden = sorted(files | {test.path for test in failed})
        if not {edit.path for edit in candidate.edits}.isdisjoint(hidden):
            return "leak: a failing test is defined in the bug's file"
        master = await self._master(tuple(sorted(files)))
        passes = master.passes
        to_pass = sorted(screened.failed)
        if not set(to_pass) <= passes:
            return "the verifier's run of its tests fails before the bug"
        kept = [name for name in screened.covering if name not in screened.failed and name in passes]
        others = sorted(name for name in passes if name not in screened.failed and name not in kept)
        # each verdict runs them several times, and those with drawn values take the longest
        to_keep = [*sorted(kept, key=self._is_drawn), *sorted(others, key=self._is_drawn)][:MOST_KEPT]
        changed = candidate.apply(cut)
        paths = sorted({edit.path for edit in candidate.edits})
        reference = b"".join(file_diff(path, changed[path].decode(), tree[path].decode()) for path in paths)
        fixed = [line[1:] for line in reference.decode().split("\n") if line.startswith("+") and line[1:2] != "+"]
        instruction = instruction_of(function, screened.failed, fixed, candidate.strategy, candidate.identity)
        if instruction is None:
            return "text: every text holds a line of the fix"
        tests = tuple(sorted([*to_pass, *to_keep]))
        return Task(
            task_id=f"{self._repository.name}-{candidate.strategy}-{candidate.identity[:12]}",
            family=f"{candidate.strategy}/{candidate.operator}",
            split=Split.TRAIN,
            instruction=instruction,
            files=changed,
            hidden_files={path: tree[path] for path in hidden},
            tests=tests,
            reference_diff=reference,
            meta={
                "path": candidate.path,
                "function": candidate.function,
                "strategy": candidate.strategy,
                "operator": candidate.operator,
                "repository": self._repository.name,
                "fail_to_pass": to_pass,
                "pass_to_pass": to_keep,
                **candidate.meta,
            },
            checks=_narrowed(master, tests),
            environment=self._environment,
            base=tree,
        )

    def _is_drawn(self, test: str) -> bool:
        return function_of(test) in self._drawn

    async def _master(self, files: tuple[str, ...]) -> _Master:
        make = self._joined if len(files) > 1 else self._prove_master
        return await self._masters.get(files, lambda: asyncio.wait_for(make(files), PROOF_S))

    async def _prove_master(self, files: tuple[str, ...]) -> _Master:
        (file,) = files
        tests = tuple(name for name in sorted(self._baseline.good) if _file_of(name) == file)
        task = self._master_task(files, tests)
        passes = passing(await self._runs.run(task, b""))
        task = dataclasses.replace(task, tests=tuple(test for test in tests if test in passes))
        number = self._numbers[file]
        checks = await self._verifier.checks(task, number) if task.tests else Checks(None, (), ())
        names, hidden = base_names(task.tests), task.hidden_files
        whole = await asyncio.to_thread(wholly_observed, names, checks.observed, hidden, number)
        return _Master(task, checks, passes, whole)

    async def _joined(self, files: tuple[str, ...]) -> _Master:
        """What is proven of several files. Only tests that pass together count, and decoys that they fail together."""
        masters = await asyncio.gather(*(self._master((file,)) for file in files))
        task = self._master_task(files, tuple(sorted(test for each in masters for test in each.task.tests)))
        checks = joined([each.checks for each in masters])
        asked = {test for each in checks.decoys for test in each.tests}
        names = tuple(test for test in base_names(task.tests) if test in asked)
        written, *found = await asyncio.gather(
            self._runs.run(task, b""),
            *(self._runs.run(task, b"", task.hidden_files | each.files, names) for each in checks.decoys),
        )
        passes = passing(written)
        decoys = [
            Decoy(decoy.files, failing)
            for decoy, result in zip(checks.decoys, found, strict=True)
            if result.exit != "timed_out"
            and (failing := tuple(test for test in decoy.tests if test not in passing(result)))
        ]
        decided = checks.fully_observed.union(*(each.tests for each in decoys))
        checks = Checks(
            checks.observed,
            tuple(decoys),
            tuple(test for test in base_names(task.tests) if test not in decided),
            tuple(sorted({*checks.known, *(name for each in (written, *found) for name in each.tampering)})),
        )
        return _Master(task, checks, passes, frozenset[str]().union(*(each.whole for each in masters)))

    def _master_task(self, files: tuple[str, ...], tests: tuple[str, ...]) -> Task:
        tree, name = self._repository.tree, f"{self._repository.name}-{'+'.join(files)}"
        hidden = {path: tree[path] for path in files}
        return Task(name, "master", Split.TRAIN, "", tree, hidden, tests, b"", {}, environment=self._environment)


def _file_of(test: str) -> str:
    return test.split("::", 1)[0]


def _passing(verdict: Verdict) -> set[str]:
    return {base_name(row.name) for row in verdict.tests} - {
        base_name(row.name) for row in verdict.tests if row.status != "passed"
    }


def _agrees(task: Task, verdict: Verdict) -> bool:
    """Whether the tests that passed on a state with the bug are those that passed in the screen."""
    return _passing(verdict) == set(task.meta["pass_to_pass"])


def _narrowed(master: _Master, tests: Sequence[str]) -> Checks:
    """The checks that concern these tests. A test of which every assertion is observed needs no more than two decoys:
    the others exist for the assertions that are not.
    """
    checks, whole = master.checks, master.whole
    names = set(base_names(tests))
    found = checks.observed
    seen = {name: keys for name, keys in found.seen.items() if name in names} if found else {}
    observed = Observed(found.files, found.rules, found.hidden, seen) if found and seen else None
    left = dict.fromkeys(names, len(checks.decoys)) | dict.fromkeys(names & whole, _ENOUGH)
    decoys: list[Decoy] = []
    for each in checks.decoys:
        named = tuple(test for test in each.tests if left.get(test))
        decoys.append(Decoy(each.files, named))
        left.update({test: left[test] - 1 for test in named})
    undecided = tuple(test for test in checks.undecided if test in names)
    return Checks(observed, tuple(each for each in decoys if each.tests), undecided, checks.known)


def _general(reason: str) -> str:
    """Reason of `contradiction` without the names of tests and values, for counting."""
    for part in (
        "said to fail before the fix",
        "do not run to their end",
        "does not pass after the fix",
        "counts as tampering",
    ):
        if part in reason:
            return f"verdict: {part}"
    return f"verdict: {reason}"
