"""Evaluate any policy on any suite, and read the results.

    Evaluation + policy -> Reading, PlaySettings -> ops.evaluation.play_readings -> an `evaluation_run`

The run is that of an iteration with equal settings: whoever asks second finds it. A result belongs to a named
evaluation if that evaluation gives its key, so the store keeps no second list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from contracts.artifacts import Artifact, list_artifacts
from contracts.chat import ChatTokenizer
from contracts.errors import ArtifactMissing, ConfigError
from contracts.store import Store
from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.measures import measures
from curation.statistics import pass_rate
from inference.engines.base import SamplingParams
from inference.engines.config import OUTSIDE_POLICY
from inference.errors import RequestTooLong
from inference.rollouts.environment import EpisodeEnvironment
from inference.rollouts.episode import Player
from ops.costs import sampling_costs
from ops.evaluation import Playing, play_readings, run_samples
from ops.ledger.trained import trained_tasks
from ops.loading import load_tasks, split_tasks
from ops.policies import is_imported
from ops.readings import EVALUATION_RUN, EVALUATION_RUN_VERSION, Reading
from ops.report.comparison import difference
from resources.evaluation import Evaluation, EvaluationSettings
from resources.refs import note

Row = dict[str, Any]


def reading_of(evaluation: Evaluation) -> Reading:
    """The reading that an evaluation takes."""
    return Reading(evaluation.split, evaluation.samples, evaluation.greedy)


def settings_for(evaluation: Evaluation, policy: Artifact) -> EvaluationSettings:
    """Settings of an evaluation for a policy, whose chat template says how it writes tool calls."""
    folder = {policy.path(name).parent for name in policy.names() if name.startswith(("tokenizer.", "chat_template."))}
    spaced = ChatTokenizer.from_directory(folder.pop()).spaced
    return evaluation.settings(spaced=spaced, imported=is_imported(policy))


def played_tasks(suite: Artifact, split: Split) -> list[Task]:
    """The tasks of a suite's split. Raises TaskError if there are none."""
    tasks = load_tasks(suite.store, suite.ref)
    found = split_tasks(tasks, split)
    if not found:
        counts = {each: len(split_tasks(tasks, each)) for each in Split}
        known = ", ".join(f"{each.value} ({count} tasks)" for each, count in counts.items() if count)
        raise TaskError(f"task suite {suite.ref.short} has no task in split {split.value}: it has {known}")
    return found


def evaluate_policy(playing: Playing, evaluation: Evaluation, policy: Artifact, suite: Artifact) -> Artifact:
    """The `evaluation_run` of a policy, played unless it exists. A killed call goes on.

    Raises TaskError for a split without tasks and for tasks that leave the policy no room, EvaluationIncomplete, and
    errors of the engine.
    """
    played_tasks(suite, evaluation.split)
    prepared = replace(playing, prepare=_require_room)
    (run,) = play_readings(prepared, [reading_of(evaluation)], policy.ref, suite.ref).values()
    note(playing.store, run.ref)  # no asset refers to it, and `recall` is to know it
    return run


async def _require_room(player: Player, tasks: Sequence[Task]) -> None:
    """Sample one token after the longest prompt, so that what no episode can do ends the evaluation at once, instead of
    making it 0.
    """
    config = player.config
    asked = [(EpisodeEnvironment(task, config, player.tokenizer), task) for task in tasks]
    longest, environment, task = max(
        ((len(each.prompt()), each, task) for each, task in asked), key=lambda each: each[0]
    )
    if longest >= config.max_tokens:
        raise TaskError(
            f"the prompt of task {task.task_id} has {longest} tokens, which rollouts.max_tokens {config.max_tokens}"
            f" leaves no room for: allow more, such as --set rollouts.max_tokens={2 * longest}"
        )
    params = SamplingParams(
        config.temperature, 1, 0, environment.stops, top_p=config.top_p, grammar=environment.grammar
    )
    try:
        await player.engine.generate(environment.prompt(), params)
    except RequestTooLong as error:
        raise TaskError(
            f"the prompt of task {task.task_id} has {longest} tokens, more than the policy's context holds ({error}):"
            " evaluate it on a suite with shorter tasks"
        ) from None


def find_run(store: Store, prefix: str) -> Artifact:
    """The one `evaluation_run` whose digest or key begins with `prefix`. Raises ArtifactMissing."""
    runs = list_artifacts(store, EVALUATION_RUN)
    found = [each for each in runs if each.ref.digest.startswith(prefix) or each.ref.key.startswith(prefix)]
    if len(found) != 1:
        raise ArtifactMissing(
            f"{prefix!r} matches {len(found)} evaluations in {store.url}, expected one: `triplane evaluations list`"
            " lists them"
        )
    return found[0]


def results(
    store: Store, definitions: Iterable[Evaluation], *, policy: str = "", suite: str = "", split: Split | None = None
) -> list[Artifact]:
    """Runs of all policies, the newest first. policy, suite: beginnings of their digests. definitions: if there are
    any, only runs of these evaluations.
    """
    wanted = list(definitions)
    found = [
        run
        for run in list_artifacts(store, EVALUATION_RUN)
        if run.manifest.parents["policy"].digest.startswith(policy)
        and run.manifest.parents["task_suite"].digest.startswith(suite)
        and split in (None, run.meta["split"])
        and (not wanted or any(is_result_of(each, run) for each in wanted))
    ]
    return sorted(found, key=lambda run: run.manifest.created_unix, reverse=True)


def is_result_of(evaluation: Evaluation, run: Artifact) -> bool:
    """Whether a run is what an evaluation gives for its policy."""
    config, parents = run.manifest.config, run.manifest.parents
    settings = evaluation.settings(spaced=config["spaced"], imported="chat_version" in config)
    wanted = reading_of(evaluation).slice(settings)
    if parents["policy"].kind == OUTSIDE_POLICY:
        wanted["engine"] = config["engine"]
    same_suite = parents["task_suite"].digest.startswith(evaluation.suite)
    return same_suite and run.manifest.code_version == EVALUATION_RUN_VERSION and wanted == config


def rows_of(store: Store, runs: Sequence[Artifact], definitions: Sequence[Evaluation]) -> list[Row]:
    """Results as JSON-compatible values: pass rate with its interval, measures, costs, contamination."""
    trained = trained_tasks(store, [run.manifest.parents["policy"] for run in runs])
    return [_row(run, definitions, trained[run.manifest.parents["policy"].digest]) for run in runs]


def _row(run: Artifact, definitions: Iterable[Evaluation], trained: set[tuple[str, str | None]]) -> Row:
    manifest, rewards = run.manifest, run.table("rewards.parquet", ["task_id", "solved"])
    policy, config = manifest.parents["policy"], manifest.config
    temperature, samples = config["rollouts"]["temperature"], run_samples(run)
    greedy = temperature == 0
    return {
        "evaluation": run.ref.digest,
        "key": run.ref.key,
        "names": [each.name for each in definitions if is_result_of(each, run)],
        "policy": policy.digest,
        "policy_kind": policy.kind,
        "imported": "chat_version" in config,
        "suite": manifest.parents["task_suite"].digest,
        "split": config["split"],
        "samples": config["samples"],
        "pass_rate": asdict(pass_rate(rewards)),
        "measures": measures({} if greedy else samples, samples if greedy else {}, temperature),
        "costs": sampling_costs(run),
        "created_unix": manifest.created_unix,
        **contamination(run, trained),
    }


def contamination(run: Artifact, trained: set[tuple[str, str | None]]) -> Row:
    """Which of a run's tasks are among those that the policy was trained on."""
    columns = run.table("episodes.parquet", ["task_id", "image_digest"]).to_pydict()
    played = set(zip(columns["task_id"], columns["image_digest"], strict=True))
    return {
        "tasks": len(played),
        "trained_on": sorted(task for task, files in played if not trained.isdisjoint({(task, files), (task, None)})),
        "trained_on_split": run.meta["split"] == Split.TRAIN,
    }


def compare_runs(runs: Sequence[Artifact]) -> list[Row]:
    """Differences in pass rate of each later run from the first, paired by task; None for the first.

    Raises ConfigError for runs of other tasks.
    """
    first = runs[0]
    for run in runs[1:]:
        if _played(run) != _played(first):
            (suite, split), (other, of) = _played(first), _played(run)
            raise ConfigError(
                f"evaluation {run.ref.short} is of {of} of suite {other[:12]}, {first.ref.short} of {split} of suite"
                f" {suite[:12]}: compare runs of the same tasks"
            )
    return [{"difference": None if run is first else difference(first, run)} for run in runs]


def other_settings(first: Artifact, other: Artifact) -> list[str]:
    """Settings that differ between two runs, as "name: value, value"."""
    ours, theirs = _flat(first.manifest.config), _flat(other.manifest.config)
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return [f"{name}: {ours.get(name)}, {theirs.get(name)}" for name in names]


def _played(run: Artifact) -> tuple[str, str]:
    return run.manifest.parents["task_suite"].digest, run.manifest.config["split"]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
