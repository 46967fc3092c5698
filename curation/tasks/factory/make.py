"""`triplane tasks make`: a repository's bugs, proved, as a `task_suite` artifact with a card."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import platform
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import action_key, digest_of
from contracts.store import Store
from contracts.suites import add_tasks
from contracts.tasks import Split, Task, files_digest
from curation.errors import TaskError
from curation.tasks.factory.baseline import Baseline, check_tests, run_baseline
from curation.tasks.factory.choose import Caps, Distinct, Graders, in_turns
from curation.tasks.factory.environment import Surroundings, surroundings_of
from curation.tasks.factory.functions import Function, Source, named_once, product_sources
from curation.tasks.factory.guest import PROGRAM, Guest
from curation.tasks.factory.licences import check_licence
from curation.tasks.factory.prove import Proved, Prover
from curation.tasks.factory.screen import Screened, Screening, Substitute, screen
from curation.tasks.factory.source import Repository, head_of, read_repository
from curation.tasks.factory.splits import deal_files
from curation.tasks.factory.steps import FACTORY_VERSION
from curation.tasks.factory.strategies import Candidate, Context, Strategy, asked, installed_strategies, strategy_named
from curation.tasks.factory.strategies.combine import combined
from curation.tasks.importing.splits import DEFAULT_SHARES
from curation.tasks.importing.trees import Tree
from curation.tasks.validate import ValidationReport
from envd.client import SandboxClient

T = TypeVar("T")
R = TypeVar("R")
STRATEGIES = ("mutate", "remove")
"""Strategies used by default."""
REVERT = "revert"
"""Strategy that needs an older version, or a history."""
COMBINE = "combine"
"""Strategy that joins bugs which others found."""
_SPARE = 3.0
"""Candidates of each strategy for each task wanted: the most that are screened."""
_STAGE = 120
"""Least number of candidates that are screened before bugs are proved."""
_HOPED = 0.7
"""Expected share of candidates that become tasks, by which the first stage is sized."""
_FEWER = 1.25
"""Factor by which the stages after the first are larger than the share so far asks for: later bugs are duplicates more
often, and each further stage waits for the deadlines of endless candidates again.
"""
_AT_ONCE = 32
"""Bugs proved at once."""
Report = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""


@dataclass(frozen=True)
class MakeConfig:
    """What to make."""

    count: int = 500
    """Tasks wanted, at most."""
    strategies: tuple[str, ...] = STRATEGIES
    seed: int = 0
    """Chooses among a function's edits."""
    allowed: tuple[str, ...] = ()
    """Licences that are used although they are unknown or not permissive."""
    revert_from: str | None = None
    """Older version for the strategy `revert`, as a SOURCE; None: commits are undone."""
    model: asked.Model | None = None
    """Language model of the strategies `rewrite` and `feature`."""


@dataclass
class _Progress:
    """Accepted tasks and what became of the rest."""

    caps: Caps
    tried: Counter[str] = field(default_factory=Counter)
    """Candidates screened, by strategy."""
    noticed: Counter[str] = field(default_factory=Counter)
    """Candidates that tests notice, by strategy."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Candidates that are no task, by reason."""
    accepted: list[Proved] = field(default_factory=list)

    def count(self, candidates: Iterable[Candidate], screening: Screening) -> None:
        """Count candidates and the results of their screen."""
        self.tried.update(each.strategy for each in candidates)
        self.noticed.update(each.candidate.strategy for each in screening.kept)
        self.left_out.update(screening.reasons)


async def make_suite(
    source: str,
    config: MakeConfig,
    shares: Mapping[Split, float],
    store: Store,
    client: SandboxClient,
    report: Report = lambda phase, done, total: None,
    *,
    index: str | None = None,
    wheelhouse: Path | None = None,
) -> Artifact:
    """Make, prove and publish tasks of a repository, or return the existing suite. A killed run resumes.

    Raises TaskError if the source can't be used or gives no task, InfraFault if envd keeps failing.
    """
    strategies = _strategies(config)
    repository, older = _read(source, config, store, index, wheelhouse)
    around = surroundings_of(repository, store, index=index, wheelhouse=wheelhouse)
    settings = _settings(repository, around, older, config, shares)
    key = action_key("task_suite", {}, settings, FACTORY_VERSION)
    found = find_artifact(store, "task_suite", key)
    if found is not None:
        return found
    guest = Guest(client, repository.tree, around)
    report("baseline", 0, 1)
    baseline = await run_baseline(repository, guest, store)
    report("baseline", 1, 1)
    context = _context(repository, baseline, older, config)
    drawn = await _candidates(strategies, context, config, store, report)
    prover = await asyncio.to_thread(Prover, repository, around, baseline, client, store)  # reads packages for seconds
    preparing = asyncio.create_task(prover.prepare(config.count))  # while the screen waits for what only waits
    try:
        progress = await _Factory(config, context, baseline, guest, prover, store, report).run(drawn)
    finally:
        preparing.cancel()
    if not progress.accepted:
        reasons = progress.left_out + Counter(context.unused.values())
        raise TaskError(f"{source} gave no task: {_commonest(reasons)}")
    return _publish(repository, around, baseline, settings, key, store, progress, context.unused, shares)


def _strategies(config: MakeConfig) -> list[Strategy]:
    """Strategies that read code. Raises TaskError for unknown ones, and for those that lack their model."""
    found = [strategy_named(name) for name in config.strategies if name not in (COMBINE, *asked.ASKED)]
    if config.model is None and (asking := _asking(config)):
        raise TaskError(f"the strategy {asking[0]} needs a language model: name it by --endpoint and --model")
    return found


def _asking(config: MakeConfig) -> list[str]:
    return [name for name in asked.ASKED if name in config.strategies]


def _read(
    source: str, config: MakeConfig, store: Store, index: str | None, wheelhouse: Path | None
) -> tuple[Repository, Tree | None]:
    """The repository, and its older version if the configuration names one. Raises TaskError."""
    repository = read_repository(source, store, index=index, wheelhouse=wheelhouse)
    check_licence(repository.name, repository.licence, config.allowed)
    check_tests(repository)
    if config.revert_from is not None:
        return repository, read_repository(config.revert_from, store, index=index, wheelhouse=wheelhouse).tree
    if REVERT in config.strategies and repository.clone is None:
        raise TaskError(f"the strategy {REVERT} needs a git repository, or an older version: name one by --older")
    return repository, None


def _settings(
    repository: Repository,
    around: Surroundings,
    older: Tree | None,
    config: MakeConfig,
    shares: Mapping[Split, float],
) -> dict[str, Any]:
    """What determines a suite."""
    settings = {
        "kind": "made",
        "repository": repository.digest,
        "name": repository.name,
        "count": config.count,
        "strategies": list(config.strategies),
        "seed": config.seed,
        "older": files_digest(older) if older else None,
        "environment": around.environment.to_values(),
        "program": digest_of(PROGRAM),
        "python": platform.python_version(),
        "shares": {split.value: shares.get(split, 0) for split in DEFAULT_SHARES},
    }
    if REVERT in config.strategies and older is None:
        settings["history"] = head_of(repository.clone) if repository.clone else ""
    if config.model is not None:
        settings["model"] = config.model.name
    if installed := installed_strategies(config.strategies):
        settings["installed"] = installed
    return settings


def _context(repository: Repository, baseline: Baseline, older: Tree | None, config: MakeConfig) -> Context:
    """What strategies get. Raises TaskError if no function can be changed."""
    sources, unused = product_sources(repository.tree)
    covered = covered_functions(sources, baseline)
    functions = [each for each in covered if not each.is_deep]
    unused |= {each.key: "it is nested too deeply" for each in covered if each.is_deep}
    if not functions:
        unread = "".join(f"; {path} is not used: {reason}" for path, reason in islice(unused.items(), 3))
        raise TaskError(
            f"{repository.source} has no function that its tests run: tests must import the code from the repository"
            f"{unread}"
        )
    most = max(8, math.ceil(2 * _SPARE * config.count / len(functions)))
    return Context(repository, functions, baseline.lines, config.seed, most, older, unused)


async def _candidates(
    strategies: Sequence[Strategy], context: Context, config: MakeConfig, store: Store, report: Report
) -> list[Candidate]:
    """Candidates of all strategies, which take turns. Raises TaskError."""
    drawn = list[Candidate]()
    for strategy in strategies:
        drawn += draw(await asyncio.to_thread(list, strategy(context)), config)  # `revert` asks git for seconds
    for name in _asking(config):
        assert config.model is not None, "checked by _strategies"
        wanted = math.ceil(_SPARE * config.count)
        told = partial(report, f"asking for {name}")
        drawn += await asked.ask_for_candidates(name, context, wanted, config.model, store, told)
    return list(in_turns(drawn, lambda each: each.strategy))


def covered_functions(sources: Iterable[Source], baseline: Baseline) -> list[Function]:
    """Functions that stable tests run."""

    def is_run(function: Function) -> bool:
        first, last = function.node.body[0].lineno, function.last
        return bool(baseline.functions_of(baseline.lines.tests(function.source.path, first, last)))

    return list(filter(is_run, named_once(sources)))


def draw(candidates: Sequence[Candidate], config: MakeConfig) -> list[Candidate]:
    """Candidates worth screening: files and functions take turns until there are enough for the tasks wanted."""
    order = in_turns(candidates, lambda each: each.path, lambda each: each.function)
    return list(islice(order, math.ceil(_SPARE * config.count)))


class _Factory:
    """Screens and proves candidates of one repository."""

    def __init__(
        self,
        config: MakeConfig,
        context: Context,
        baseline: Baseline,
        guest: Guest,
        prover: Prover,
        store: Store,
        report: Report,
    ) -> None:
        self._config, self._baseline, self._guest, self._store, self._report = config, baseline, guest, store, report
        self._functions, self._prover = {function.key: function for function in context.functions}, prover
        self._substitutes: dict[str, list[Substitute]] = {}
        """Results of the screen, by the key of each function that was screened."""
        self._graders = Graders()

    async def run(self, candidates: Sequence[Candidate]) -> _Progress:
        """Screen and prove in stages until enough are accepted; then combinations of these, if they are wanted.

        What is accepted depends on verdicts alone, never on which of them came first.
        """
        files = len({each.source.path for each in self._functions.values()})
        operators = len({each.operator for each in candidates})
        caps = Caps(self._config.count, len(self._functions), files, operators)
        progress, distinct = _Progress(caps), Distinct(self._functions)
        combinations = self._config.count // 10 if COMBINE in self._config.strategies else 0
        wanted, begun = self._config.count - combinations, 0
        while len(progress.accepted) < wanted and begun < len(candidates):
            share = len(progress.accepted) / begun / _FEWER if begun else _HOPED
            stage = max(_STAGE, math.ceil((wanted - len(progress.accepted)) / max(share, 0.1)))
            screening = await self._screen(candidates[begun : begun + stage], progress)
            begun += stage
            unique, reasons = distinct.choose(screening.kept)
            progress.left_out.update(reasons)
            await self._prove(unique, wanted, progress)
        if combinations:
            joined = combined([each.screened for each in progress.accepted], self._config.seed, 2 * combinations)
            screening = await self._screen(joined, progress)
            await self._prove(screening.kept, len(progress.accepted) + combinations, progress)
        return progress

    async def _screen(self, candidates: Sequence[Candidate], progress: _Progress) -> Screening:
        new = sorted({each.function for each in candidates} - self._substitutes.keys())
        substitutes = await asyncio.to_thread(  # reads packages
            lambda: [each for key in new for each in self._prover.substitutes(self._functions[key])]
        )
        found = await screen(
            candidates,
            self._functions,
            self._baseline,
            self._guest,
            self._store,
            lambda done, total: self._report("screening", done, total),
            substitutes,
        )
        for each in found.substitutes:
            self._substitutes.setdefault(each.candidate.function, []).append(each)
        progress.count(candidates, found)
        return dataclasses.replace(found, kept=self._graders.choose(found.kept))

    async def _prove(self, screened: Sequence[Screened], count: int, progress: _Progress) -> None:
        queue = in_turns(
            screened,
            lambda each: each.candidate.path,
            lambda each: each.candidate.function,
            lambda each: each.candidate.operator,
        )
        begun = len(progress.accepted)
        results = await first_accepted(
            self._admitted(queue, progress),
            count - begun,
            lambda each: self._prover.prove(
                each, self._functions[each.candidate.function], self._substitutes[each.candidate.function]
            ),
            lambda each: each.task is not None,
            lambda done: self._report("proving", begun + done, self._config.count),
        )
        for result in results:
            if result.task is not None:
                progress.accepted.append(result)
            else:
                progress.left_out[result.reason] += 1

    @staticmethod
    def _admitted(queue: Iterable[Screened], progress: _Progress) -> Iterator[Screened]:
        for each in queue:
            cap = progress.caps.admits(each.candidate)
            if cap is not None:
                progress.left_out[f"cap of its {cap}"] += 1
                continue
            progress.caps.take(each.candidate)
            yield each


async def first_accepted(
    items: Iterator[T],
    wanted: int,
    work: Callable[[T], Coroutine[None, None, R]],
    accepted: Callable[[R], bool],
    report: Callable[[int], None],
) -> list[R]:
    """Results of the shortest beginning of `items` of which `wanted` are accepted, in order; of all if there is none.

    At most _AT_ONCE are worked on at once, in any order of ending: no item begins that would not be needed if all
    begun ones were accepted. report: called with the number accepted so far.
    """
    results: dict[int, R] = {}
    flying: set[asyncio.Task[None]] = set()

    async def one(number: int, item: T) -> None:
        results[number] = await work(item)

    try:
        while True:
            good = sum(map(accepted, results.values()))
            for item in islice(items, max(0, min(_AT_ONCE, wanted - good) - len(flying))):
                flying.add(asyncio.create_task(one(len(results) + len(flying), item)))
            if not flying:
                return [result for _, result in sorted(results.items())]
            done, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
            report(sum(map(accepted, results.values())))
    finally:
        for each in flying:
            each.cancel()
        await asyncio.gather(*flying, return_exceptions=True)


def _commonest(reasons: Counter[str]) -> str:
    return "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3)) or "no strategy had a candidate"


def _publish(
    repository: Repository,
    around: Surroundings,
    baseline: Baseline,
    settings: dict[str, Any],
    key: str,
    store: Store,
    progress: _Progress,
    unused: Mapping[str, str],
    shares: Mapping[Split, float],
) -> Artifact:
    made = [each.task for each in progress.accepted if each.task is not None]
    places = deal_files([str(task.meta["path"]) for task in made], shares)
    tasks = [dataclasses.replace(task, split=places[str(task.meta["path"])]) for task in made]
    tasks.sort(key=lambda task: (list(Split).index(task.split), task.task_id))
    families = dict(sorted(Counter(task.family for task in tasks).items()))
    splits = Counter(task.split.value for task in tasks)
    parents = {"runtime": around.runtime.ref}
    with ArtifactWriter(
        store, "task_suite", key, parents=parents, config=settings, code_version=FACTORY_VERSION
    ) as out:
        add_tasks(out, tasks)
        out.add_json("validation.json", _proof(tasks, families, progress).model_dump())
        card = _card(repository, around, baseline, tasks, progress)
        out.add_json("card.json", card | {"unused": dict(sorted(unused.items()))})
        meta = {
            "tasks": len(tasks),
            "broken": sum(progress.left_out.values()),
            "families": families,
            "splits": {split.value: splits[split.value] for split in DEFAULT_SHARES},
        }
        return out.commit(meta=meta)


def _proof(tasks: Sequence[Task], families: dict[str, int], progress: _Progress) -> ValidationReport:
    checks = {task.task_id: task.checks for task in tasks if task.checks is not None}
    cheats = [cheat for each in progress.accepted for cheat in each.cheats]
    return ValidationReport(
        tasks=len(tasks),
        broken=[],
        families=families,
        cheats=sorted(cheats, key=lambda each: (each.task_id, each.cheat)),
        wrong_answers=0,
        decoys=sum(len(each.decoys) for each in checks.values()),
        observed=sum(len(each.fully_observed) for each in checks.values()),
        undecided={name: list(each.undecided) for name, each in sorted(checks.items()) if each.undecided},
    )


def _card(
    repository: Repository, around: Surroundings, baseline: Baseline, tasks: Sequence[Task], progress: _Progress
) -> dict[str, Any]:
    """Where the tasks come from, what each strategy gave, and why the rest was left out."""
    proved = Counter(str(task.meta["strategy"]) for task in tasks)
    counts = Counter((str(task.meta["path"]), task.split.value) for task in tasks)
    return {
        "source": repository.source,
        "repository": repository.digest,
        "licence": repository.licence,
        "environment": around.environment.to_values(),
        "packages": around.runtime.json("packages.json"),
        "tests": {"stable": len(baseline.good), "unused": dict(sorted(baseline.bad.items()))},
        "strategies": {
            name: {"candidates": progress.tried[name], "noticed": progress.noticed[name], "tasks": proved[name]}
            for name in sorted(progress.tried)
        },
        "operators": dict(sorted(Counter(str(task.meta["operator"]) for task in tasks).items())),
        "files": {path: {"split": split, "tasks": counts[path, split]} for path, split in sorted(counts)},
        "left_out": dict(sorted(progress.left_out.items())),
    }
