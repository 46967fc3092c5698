"""Forged and honest final states, graded by the real verifier, and the duration of one verification.

    tests/redteam  ->  states  ->  Verifier on a server of its own  ->  counts
    quickstart's reference fixes, one after the other               ->  milliseconds

The states are part of the test suite, so this requires a checkout.
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from benchmarks.measure import percentile
from benchmarks.result import NotHereError, Options, Result
from curation.tasks.suite import TaskSuiteConfig, generate_tasks
from curation.verify import Verifier
from envd.client import SandboxClient

if TYPE_CHECKING:
    from tests.redteam.grading import Graded, Grader

_WARM = 5
_TASKS_SEED = 11


class VerdictsOptions(Options):
    """Options of `python -m benchmarks verdicts`."""

    timed: int = Field(default=100, ge=1)
    """Number of timed verifications, in sequence, each of another quickstart task."""
    tasks: int = Field(default=5, ge=1)
    """Local tasks for which each honest style is graded twice, in addition to one package."""
    packages: bool = True
    """Also grade states of three packages of PyPI; needs a package index."""
    states: bool = True
    """Whether to grade states; else only the time is measured, and goals are not judged."""


OPTIONS = VerdictsOptions


def run(options: VerdictsOptions) -> Result:
    """Grade all states and time verifications.

    Raises NotHereError outside a checkout, or without a package index.
    """
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    if importlib.util.find_spec("tests.redteam") is None:
        raise NotHereError("the forged states are part of the tests: run this in a checkout's root")
    from tests.redteam.grading import Grader

    with Grader() as grader:
        # before any state that keeps memory or processes
        seconds = asyncio.run(_timed(grader.address, options.timed))
        metrics |= {f"verify_p{percent}_ms": percentile(seconds, percent) * 1000 for percent in (50, 90)}
        if options.states:
            counts, rows, notes = _states(grader, options)
            metrics |= counts
    return Result(metrics, rows, notes, judged=options.states)


async def _timed(address: str, count: int) -> list[float]:
    """Seconds of sequential verifications of reference fixes. No verdict is cached; the tasks contain their checks, as
    in a suite.
    """
    tasks = generate_tasks(TaskSuiteConfig.of_count(max(6, count + _WARM), _TASKS_SEED))[: count + _WARM]
    found = []
    async with SandboxClient(address) as client:
        prover, verifier = Verifier(client, None), Verifier(client, None)
        proven = await asyncio.gather(*(prover.checks(task) for task in tasks))
        for task in (replace(task, checks=checks) for task, checks in zip(tasks, proven, strict=True)):
            begin = time.perf_counter()
            verdict = await verifier.grade(task, task.reference_diff)
            found.append(time.perf_counter() - begin)
            assert verdict.solved, f"the reference of {task.task_id} is not solved: {verdict}"
    return found[_WARM:]


def _states(grader: Grader, options: VerdictsOptions) -> tuple[dict[str, float], list[dict[str, Any]], list[str]]:
    from tests.redteam.catalogue import ALL, Case, cases, packaged
    from tests.redteam.grading import State
    from tests.redteam.handmade import handmade
    from tests.redteam.honest import HonestCase, honest_cases
    from tests.redteam.packages import NoIndexError, imported
    from tests.redteam.worlds import quickstart

    quick, hand = quickstart(14), list(handmade())
    forged: list[State] = [*cases(quick, 1), *cases(hand, 1)]
    honest = honest_cases([*hand, *quick], options.tasks)
    if options.packages:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                found = imported(Path(scratch))
            except NoIndexError as error:
                raise NotHereError(f"{error}; leave packages out by --packages false") from error
        forged += packaged(found)
        honest += honest_cases(found, 1)
    caught = grader.grade(*forged)
    first, second = (grader.grade(*honest) for _ in range(2))
    wanted = {case.name: case.honest.solved for case in honest}
    flaky = [one.state.name for one, other in zip(first, second, strict=True) if _decided(one) != _decided(other)]
    counts = {
        "forged_kinds": float(len(ALL)),
        **{f"forged_{name}": float(number) for name, number in _forged(caught).items()},
        **{f"honest_{name}": float(number) for name, number in _honest(first, wanted).items()},
        "flaky": float(len(flaky)),
    }
    rows = []
    for family in dict.fromkeys(each.family for each in ALL):
        members = [each for each in caught if isinstance(each.state, Case) and each.state.forgery.family == family]
        rows.append({"family": family, **_forged(members)})
    styles = len({case.honest.name for case in honest if isinstance(case, HonestCase)})
    notes = [f"{styles} styles of honest states, each graded twice", *_names("flaky", flaky)]
    notes += _names("solved, forged", [each.state.name for each in caught if each.verdict and each.verdict.solved])
    notes += _names("without a finding", [each.state.name for each in caught if not each.findings])
    notes += _names("honest, with findings", [f"{each.state.name} {each.findings}" for each in first if each.findings])
    return counts, rows, notes


def _decided(found: Graded) -> tuple[object, ...]:
    """Parts of a verdict that must be equal; messages may contain values of a random answer."""
    verdict = found.verdict
    return (
        ()
        if verdict is None
        else (verdict.solved, verdict.exit, [test.status for test in verdict.tests], found.findings)
    )


def _forged(found: Sequence[Graded]) -> dict[str, int]:
    return {
        "states": len(found),
        "solved": sum(each.verdict is not None and each.verdict.solved for each in found),
        "unscored": sum(each.verdict is None for each in found),
        "without_finding": sum(not each.findings for each in found),
    }


def _honest(found: Sequence[Graded], wanted: dict[str, bool]) -> dict[str, int]:
    return {
        "states": len(found),
        "misjudged": sum(each.verdict is None or each.verdict.solved != wanted[each.state.name] for each in found),
        "unscored": sum(each.verdict is None for each in found),
        "with_findings": sum(bool(each.findings) for each in found),
    }


def _names(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {', '.join(names)}"] if names else []
