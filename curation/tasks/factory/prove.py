"""Prove bugs with the verifier, and make tasks of them.

The fixed state of every task is the repository itself, so decoys and observations are proven once for each set of test
files on the unchanged repository, and narrowed to a task's tests.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType

from contracts.store import Store
from contracts.tasks import Checks, Decoy, Environment, Observed, Split, Task
from curation.cheating import base_names, passing
from curation.runs import Runs
from curation.tasks.bugs import file_diff
from curation.tasks.factory.baseline import Baseline
from curation.tasks.factory.functions import Function
from curation.tasks.factory.leaks import Copies, without_tests
from curation.tasks.factory.screen import Screened
from curation.tasks.factory.source import Repository
from curation.tasks.factory.text import instruction_of
from curation.tasks.validate import CheatResult, validate_tasks
from curation.verify import Verifier
from envd.client import SandboxClient, VerifyResult

MOST_KEPT = 40
"""Tests that must still pass which a task names."""
REPETITIONS = 3
"""Verdicts of a task that must agree, before the fix and after it."""
VERIFY_TIMEOUT_S = 60.0
"""Deadline of a proof's runs. Longer than the verifier's own, so that a busy machine changes no verdict and no check: a
check whose run does not end proves nothing.
"""
PROOF_S = 600.0
"""Longest proof of the checks of a set of test files, and longest proof of a bug beside it, in seconds."""


@dataclass(frozen=True)
class Proved:
    """A task, or the reason why a bug is none."""

    screened: Screened
    task: Task | None
    reason: str = ""
    cheats: tuple[CheatResult, ...] = ()


class Prover:
    """Makes and proves tasks of one repository."""

    def __init__(
        self,
        repository: Repository,
        environment: Environment,
        baseline: Baseline,
        client: SandboxClient,
        store: Store,
    ) -> None:
        self._repository, self._baseline, self._store, self._client = repository, baseline, store, client
        self._environment = environment
        self._verifier = Verifier(client, store, timeout_s=VERIFY_TIMEOUT_S)
        self._runs = Runs(client, VERIFY_TIMEOUT_S, store)
        self._copies = Copies(repository.tree)
        self._masters: dict[tuple[str, ...], asyncio.Task[tuple[Checks, frozenset[str]]]] = {}

    async def prove(self, screened: Screened, function: Function) -> Proved:
        """Make a task of a bug and prove it, within bounded time. Raises InfraFault if envd keeps failing."""
        draft = await self._draft(screened, function)
        if isinstance(draft, str):
            return Proved(screened, None, draft)
        try:
            async with asyncio.timeout(PROOF_S):
                return await self._proved(screened, draft)
        except TimeoutError:
            return Proved(screened, None, f"its proof takes longer than {PROOF_S:.0f} s")

    async def _proved(self, screened: Screened, draft: Task) -> Proved:
        fixed = await self._runs.run(draft, draft.reference_diff)
        # what the fix itself does is no tampering, as for imported tasks
        checks = draft.checks or Checks(None, (), ())
        known = tuple(sorted({*checks.known, *fixed.tampering}))
        draft = dataclasses.replace(draft, checks=dataclasses.replace(checks, known=known))
        report, sound = await validate_tasks([draft], self._client, store=self._store, verifier=self._verifier)
        if not sound:
            return Proved(screened, None, _general(report.broken[0].reason))
        flip = await self._flips(draft, fixed)
        return Proved(screened, None, flip) if flip else Proved(screened, sound[0], cheats=tuple(report.cheats))

    async def _draft(self, screened: Screened, function: Function) -> Task | str:
        """The task before its proof, or the reason why there is none."""
        candidate, tree = screened.candidate, self._repository.tree
        copy = self._copies.of(function)
        if copy is not None:
            return "leak: a file holds a copy of the fixed code"
        good = self._baseline.good
        failed = [good[name] for name in screened.failed]
        files = {test.name.split("::", 1)[0] for test in failed}
        cut = without_tests(tree, failed)
        if isinstance(cut, str):
            return f"leak: {cut}"
        try:
            checks, passes = await self._master(tuple(sorted(files)))
        except TimeoutError:
            return f"the proof of its test files takes longer than {PROOF_S:.0f} s"
        to_pass = sorted(screened.failed)
        if not set(to_pass) <= passes:
            return "the verifier's run of its tests fails before the bug"
        kept = [name for name in screened.covering if name not in screened.failed and name in passes]
        others = sorted(name for name in passes if name not in screened.failed and name not in kept)
        to_keep = [*kept, *others][:MOST_KEPT]
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
            hidden_files={path: tree[path] for path in sorted(files)},
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
            checks=_narrowed(checks, tests),
            environment=self._environment,
            base=tree,
        )

    async def _master(self, files: tuple[str, ...]) -> tuple[Checks, frozenset[str]]:
        """Checks of all stable tests of these files, and those that pass in the verifier, on the repository itself."""
        work = self._masters.get(files)
        if work is None or (
            work.done() and (work.cancelled() or not isinstance(work.exception(), (TimeoutError, NoneType)))
        ):
            proof = asyncio.wait_for(self._prove_master(files), PROOF_S)
            work = self._masters[files] = asyncio.create_task(proof)
        return await asyncio.shield(work)

    async def _prove_master(self, files: tuple[str, ...]) -> tuple[Checks, frozenset[str]]:
        tests = tuple(name for name in sorted(self._baseline.good) if name.split("::", 1)[0] in files)
        tree = self._repository.tree
        hidden = {path: tree[path] for path in files}
        name = f"{self._repository.name}-{'+'.join(files)}"
        task = Task(name, "master", Split.TRAIN, "", tree, hidden, tests, b"", {}, environment=self._environment)
        passes = passing(await self._runs.run(task, b""))
        task = dataclasses.replace(task, tests=tuple(test for test in tests if test in passes))
        checks = await self._verifier.checks(task) if task.tests else Checks(None, (), ())
        return checks, passes

    async def _flips(self, task: Task, fixed: VerifyResult) -> str | None:
        """Why repeated runs disagree with the verdicts, or None. fixed: of a run after the fix.

        The verdict on the fix has run its tests twice more, as written and without expectations or repeated.
        """
        results = await asyncio.gather(*(self._runs.run(task, b"") for _ in range(REPETITIONS - 1)))
        if passing(fixed) != set(base_names(task.tests)):
            return "repetitions disagree"
        kept, to_pass = set(task.meta["pass_to_pass"]), set(task.meta["fail_to_pass"])
        agree = all(passing(result) == kept and not to_pass & passing(result) for result in results)
        return None if agree else "repetitions disagree"


def _narrowed(checks: Checks, tests: Sequence[str]) -> Checks:
    """The checks that concern these tests."""
    names = set(base_names(tests))
    found = checks.observed
    seen = {name: keys for name, keys in found.seen.items() if name in names} if found else {}
    observed = Observed(found.files, found.rules, found.hidden, seen) if found and seen else None
    decoys = [Decoy(each.files, tuple(test for test in each.tests if test in names)) for each in checks.decoys]
    undecided = tuple(test for test in checks.undecided if test in names)
    return Checks(observed, tuple(each for each in decoys if each.tests), undecided, checks.known)


def _general(reason: str) -> str:
    """Reason of a broken task without the names of tests and values, for counting."""
    for part in (
        "passes before the fix",
        "said to fail before the fix",
        "do not run to their end",
        "does not pass after the fix",
        "counts as tampering",
        "the cheat",
        "pass before the fix",
    ):
        if part in reason:
            return f"verdict: {part}"
    return f"verdict: {reason}"
