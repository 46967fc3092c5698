"""Prove bugs with the verifier, and make tasks of them.

One test file grades a task (`choose.Graders`). Failing tests in others are only kept from the agent.
The fixed state of every task is the repository itself, so decoys and observations are proven once for each test file on
the unchanged repository, and narrowed to a task's tests.

Three repetitions must agree about a bug: the screen, a run before the fix, and one with a cheat that the verifier
undoes. About the fix: the baseline, the proof of the test file, and a run of the task's tests.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contracts.store import Store
from contracts.tasks import Checks, Decoy, Split, Task
from curation.cheating import base_name, base_names, contradictions, passed, passing
from curation.once import Once
from curation.paths import changed_paths
from curation.runs import Runs
from curation.tasks.bugs import file_diff
from curation.tasks.checks.observing import drawn_functions
from curation.tasks.checks.proving import as_written, function_of, stuck, wholly_observed
from curation.tasks.factory.baseline import Baseline
from curation.tasks.factory.environment import Surroundings, sources_of
from curation.tasks.factory.functions import Function, Source
from curation.tasks.factory.guest import IDLE_S
from curation.tasks.factory.leaks import Copies, standard_library, without_tests
from curation.tasks.factory.screen import EMPTIED, Screened, Substitute, emptied_function, file_of, replaced_function
from curation.tasks.factory.source import Repository
from curation.tasks.factory.strategies import Candidate
from curation.tasks.factory.text import instruction_of
from curation.tasks.validate import RESTORED, CheatResult, cheat_states
from curation.verdicts import Verdict, make_verdict
from curation.verify import Verifier
from envd.client import SandboxClient, VerifyResult

_FLIPS = "repetitions disagree"
MOST_KEPT = 20
"""Most nodes of a task's tests that must still pass."""
VERIFY_TIMEOUT_S = 60.0
"""Deadline of a proof's runs. Longer than the verifier's own, so that a busy machine changes no verdict and no check: a
check whose run does not end proves nothing.
"""
SLOW_S = 3.0
"""A task whose tests took at least this long in the baseline run, with coverage, gets VERIFY_TIMEOUT_S as its timeout,
since the verifier's default may be too short on a busy machine. Faster tasks keep the default, so that measured times
don't change them.
"""
SUBSTITUTE_TIMEOUT_S = 20.0
"""Deadline of a run with a substitute of a function, in seconds."""
_ENOUGH = 2
"""Decoys of a test whose assertions are all observed."""
_OF_FILE, _PREPARED_AT_ONCE = 4, 8
"""Least number of wanted tasks per test file for which all files are prepared, and files prepared at once: few, since
their proofs have a time limit.
"""
PROOF_S = 600.0
"""Time limit of the proof of a test file's checks, and of the proof of a bug, in seconds."""


@dataclass(frozen=True)
class Proved:
    """A task, or the reason why a bug is none."""

    screened: Screened
    task: Task | None
    reason: str = ""
    cheats: tuple[CheatResult, ...] = ()


@dataclass(frozen=True)
class _Master:
    """What is proven once for all bugs that the tests of a file grade."""

    task: Task
    """The repository without a bug, with all stable tests of the file that pass in the verifier."""
    checks: Checks
    passes: frozenset[str]
    whole: frozenset[str]
    """Tests of which every assertion is observed."""
    as_written: frozenset[str]
    """Tests that can run beside the observed ones, from the same files."""


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
        # not eager: almost all states that are graded fail, after which further runs are of no use
        self._verifier = Verifier(client, store, timeout_s=VERIFY_TIMEOUT_S, idle_s=IDLE_S, eager=False)
        self._runs = Runs(client, VERIFY_TIMEOUT_S, store, idle_s=IDLE_S)
        self._copies = Copies(repository.tree, {**standard_library(), **sources_of(around.runtime)})
        self._drawn = drawn_functions({path: repository.tree[path] for path in set(map(file_of, baseline.good))})
        self._masters: Once[str, _Master] = Once(TimeoutError)
        self._cheated: Once[tuple[str, str], dict[str, Verdict]] = Once(TimeoutError)
        self._noticing: dict[str, set[str]] = defaultdict(set)
        """Identity of a substitute -> tests that fail with it."""

    async def prepare(self, wanted: int) -> None:
        """Prove the checks of every test file in advance, if `wanted` tasks are likely to use all files. A proof that
        fails is repeated by the first bug that needs it.
        """
        files = Counter(map(file_of, self._baseline.good))
        if wanted < _OF_FILE * len(files):
            return
        slots = asyncio.Semaphore(_PREPARED_AT_ONCE)

        async def one(file: str) -> None:
            async with slots:
                await self._master(file)

        largest = sorted(files, key=lambda file: (-files[file], file))
        await asyncio.gather(*map(one, largest), return_exceptions=True)

    def substitutes(self, function: Function) -> list[Candidate]:
        """Functions with which the tests of a task must fail: one that does nothing, and those of the same qualified
        name that an agent finds elsewhere.
        """
        found = [replaced_function(function, text) for text in self._copies.namesakes(function)]
        return [emptied_function(function), *(each for each in found if each is not None)]

    async def prove(self, screened: Screened, function: Function, substitutes: Sequence[Substitute]) -> Proved:
        """Make a task of a bug and prove it, within bounded time. substitutes: the screen's results for those of the
        function. Raises InfraFault if envd keeps failing.
        """
        try:
            draft = await self._draft(screened, function)
        except TimeoutError:
            return Proved(screened, None, f"the proof of its test file takes longer than {PROOF_S:.0f} s")
        if isinstance(draft, str):
            return Proved(screened, None, draft)
        try:
            async with asyncio.timeout(PROOF_S):
                return await self._proved(screened, function, draft, substitutes)
        except TimeoutError:
            return Proved(screened, None, f"its proof takes longer than {PROOF_S:.0f} s")

    async def _proved(
        self, screened: Screened, function: Function, draft: Task, substitutes: Sequence[Substitute]
    ) -> Proved:
        inside = all(function.encloses(edit.path, edit.start, edit.end) for edit in screened.candidate.edits)
        for each in substitutes:
            # emptying one function says nothing about a bug in several
            empty = each.candidate.strategy == EMPTIED
            if (inside or not empty) and await self._passes(each, function, draft):
                what = "verdict: a function that does nothing" if empty else "leak: a function of the same name"
                return Proved(screened, None, f"{what} passes its tests")
        before = await self._verifier.grade(draft, b"")
        if not _agrees(draft, before):
            return Proved(screened, None, _FLIPS)
        fixed = await self._fixed(draft)
        if isinstance(fixed, str):
            return Proved(screened, None, f"verdict: {fixed}")
        task = dataclasses.replace(draft, checks=fixed)
        found = await self._cheats(task)
        if any(verdict.solved for verdict in found.values()):
            return Proved(screened, None, "verdict: a cheat passes its tests")
        if not _agrees(task, found[RESTORED]):
            return Proved(screened, None, _FLIPS)
        cheats = tuple(
            CheatResult(family=task.family, task_id=task.task_id, cheat=name, solved=verdict.solved, exit=verdict.exit)
            for name, verdict in sorted(found.items())
        )
        return Proved(screened, self._with_deadline(task), cheats=cheats)

    def _with_deadline(self, task: Task) -> Task:
        """The task, with VERIFY_TIMEOUT_S as its timeout if its tests are slow."""
        if sum(self._baseline.good[name].seconds for name in base_names(task.tests)) < SLOW_S:
            return task
        return dataclasses.replace(task, environment=dataclasses.replace(task.environment, timeout_s=VERIFY_TIMEOUT_S))

    async def _fixed(self, task: Task) -> Checks | str:
        """Checks of a task whose tests pass after the fix, or what is wrong with it.

        Tests with observations run without their expectations only, the others as written: in the same run, if the
        files of the observed tests have them so. Decoys have failed on the same files already, in the proof of the
        checks.
        """
        checks, master = task.checks or Checks(None, (), ()), await self._master(file_of(task.tests[0]))
        observed, results = checks.observed, list[VerifyResult]()
        watched = tuple(test for test in base_names(task.tests) if test in checks.fully_observed)
        plain = tuple(test for test in task.tests if base_name(test) not in watched)
        beside = tuple(test for test in plain if base_name(test) in master.as_written) if watched else ()
        alone = tuple(test for test in plain if test not in beside)
        wrong = False
        if alone:
            results.append(await self._ended(task, task.hidden_files, alone))
            wrong = not passed(alone, results[-1])
        if observed is not None and watched:
            results.append(await self._ended(task, observed.placed(task.hidden_files), (*watched, *beside)))
            wrong = wrong or bool(contradictions(observed, results[-1]))
            wrong = wrong or not passing(results[-1]).issuperset(beside)
        if any(result.exit != "completed" for result in results):
            return "its tests do not run to their end after the fix"
        if wrong:
            return "a test does not pass after the fix"
        # what the fix itself does is no tampering, as for imported tasks
        known = {*checks.known, *(name for result in results for name in result.tampering)}
        return dataclasses.replace(checks, known=tuple(sorted(known)))

    async def _ended(self, task: Task, hidden: dict[str, bytes], tests: tuple[str, ...]) -> VerifyResult:
        """A run of the fix. It is repeated once if it did not end: a busy machine may be the cause."""
        result = await self._runs.run(task, task.reference_diff, hidden, tests)
        if result.exit in ("timed_out", "crashed"):
            result = await self._runs.run(task, task.reference_diff, hidden, tests)
        return result

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
        path, file = str(task.meta["path"]), file_of(task.tests[0])

        async def verdicts() -> dict[str, Verdict]:
            master = await self._master(file)
            every = dataclasses.replace(master.task, meta={"path": path}, checks=master.checks)
            states = cheat_states(every)
            # names the bug's file as one of the product: a change of a file such as tests.py would be undone
            every = dataclasses.replace(every, reference_diff=next(iter(states.values())))
            async with asyncio.timeout(PROOF_S):
                return {name: await self._tried(every, states[name]) for name in states if name != RESTORED}

        found, wanted = await self._cheated.get((path, file), verdicts), set(base_names(task.tests))
        return {
            name: verdict.model_copy(update={"solved": wanted <= _passing(verdict) and not verdict.tampered})
            for name, verdict in found.items()
        }

    async def _passes(self, substitute: Substitute, function: Function, task: Task) -> bool:
        """Whether the tests pass with a substitute of the function.

        They run only if the screen does not tell. A test that failed so for another bug of the function is not run
        again.
        """
        noticing, tests = self._noticing[substitute.candidate.identity], set(task.tests)
        noticing |= substitute.failed
        if noticing & tests:
            return False
        if substitute.ended:
            return True
        path = function.source.path
        changed = substitute.candidate.apply({path: function.source.data})[path].decode()
        diff = file_diff(path, task.files[path].decode(), changed)
        result = await self._runs.run(task, diff, timeout_s=SUBSTITUTE_TIMEOUT_S)
        passes = passing(result)
        # what calls a function that does nothing may call it for ever
        noticing |= tests - passes if result.exit == "completed" else tests & stuck(result)
        return tests <= passes

    async def _tried(self, task: Task, cheat: bytes) -> Verdict:
        """Verdict on a cheat. One that passes no test at all needs no second run."""
        result = await self._runs.run(task, cheat)
        return await self._verifier.grade(task, cheat) if passing(result) else make_verdict(task.tests, result)

    async def _draft(self, screened: Screened, function: Function) -> Task | str:
        """The task before its proof, or the reason why there is none."""
        candidate, tree = screened.candidate, self._repository.tree
        changed_ones = changed_functions(candidate, function.source)
        if any(await asyncio.to_thread(lambda: [self._copies.of(each) for each in changed_ones])):
            return "leak: a file holds a copy of the fixed code"
        good, file = self._baseline.good, screened.file
        failed = [good[name] for name in screened.failed]
        cut = without_tests(tree, failed)
        if isinstance(cut, str):
            return f"leak: {cut}"
        # tests may be inherited from other files, which are cut, too
        hidden = sorted({file} | {test.path for test in failed if test.path != file_of(test.name)})
        if not {edit.path for edit in candidate.edits}.isdisjoint(hidden):
            return "leak: a failing test is defined in the bug's file"
        passes = (master := await self._master(file)).passes
        to_pass = sorted(name for name in screened.failed if name in passes)
        if not to_pass:
            return "the verifier's run of its tests fails before the bug"
        to_keep = self._kept(screened, passes)
        changed = candidate.apply(cut)
        paths = sorted({edit.path for edit in candidate.edits})
        reference = b"".join(file_diff(path, changed[path].decode(), tree[path].decode()) for path in paths)
        fixed = [line[1:] for line in reference.decode().split("\n") if line.startswith("+") and line[1:2] != "+"]
        messages = {name: screened.failed[name] for name in to_pass}
        instruction = instruction_of(function, messages, fixed, candidate.strategy, candidate.identity)
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
            environment=master.task.environment,
            base=tree,
        )

    def _kept(self, screened: Screened, passes: Iterable[str]) -> list[str]:
        """Tests that must still pass: at first those that run the bug's lines; of these and of the others those with
        drawn values last, since a verdict runs all several times.
        """
        left, found = MOST_KEPT, list[str]()
        others = sorted(name for name in passes if name not in screened.failed)
        for name in sorted(others, key=lambda each: (each not in screened.covering, function_of(each) in self._drawn)):
            nodes = len(self._baseline.good[name].nodes)
            if nodes <= left:
                found.append(name)
                left -= nodes
        return found

    async def _master(self, file: str) -> _Master:
        return await self._masters.get(file, lambda: asyncio.wait_for(self._prove_master(file), PROOF_S))

    async def _prove_master(self, file: str) -> _Master:
        tests = tuple(name for name in sorted(self._baseline.good) if file_of(name) == file)
        task, passes = self._master_task(file, tests), frozenset[str]()
        for plugins in dict.fromkeys([(), self._environment.plugins]):
            # only files that need plugins get them: they take longer to load than a short test to run
            task = dataclasses.replace(task, environment=dataclasses.replace(self._environment, plugins=plugins))
            passes = passing(await self._runs.run(task, b""))
            if passes.issuperset(tests):
                break
        task = dataclasses.replace(task, tests=tuple(test for test in tests if test in passes))
        checks = await self._verifier.checks(task) if task.tests else Checks(None, (), ())
        of = base_names(task.tests), checks.observed, task.hidden_files
        whole, same = await asyncio.to_thread(lambda: (wholly_observed(*of), as_written(*of)))
        return _Master(task, checks, passes, whole, same)

    def _master_task(self, file: str, tests: tuple[str, ...]) -> Task:
        tree, name = self._repository.tree, f"{self._repository.name}-{file}"
        hidden = {file: tree[file]}
        return Task(name, "master", Split.TRAIN, "", tree, hidden, tests, b"", {}, environment=self._environment)


def changed_functions(candidate: Candidate, source: Source) -> list[Function]:
    """Functions of a bug's file that it changes."""
    spans = [(each.path, *each.span) for each in candidate.edits]
    return [each for each in source.functions if any(each.overlaps(*span) for span in spans)]


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
    observed = dataclasses.replace(found, seen=seen) if found and seen else None
    left = dict.fromkeys(names, len(checks.decoys)) | dict.fromkeys(names & whole, _ENOUGH)
    decoys: list[Decoy] = []
    for each in checks.decoys:
        named = tuple(test for test in each.tests if left.get(test))
        decoys.append(Decoy(each.files, named))
        left.update({test: left[test] - 1 for test in named})
    undecided = tuple(test for test in checks.undecided if test in names)
    beside = tuple(test for test in checks.beside if test in names)
    return Checks(observed, tuple(each for each in decoys if each.tests), undecided, checks.known, beside)
