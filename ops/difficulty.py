"""Selection of training tasks by their difficulty (`tasks.difficulty` of an experiment).

difficulty of the suite -> pinned in iteration_inputs -> training tasks in the range -> prompts
"""

from __future__ import annotations

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.store import Store
from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.tasks.build import find_built
from curation.tasks.difficulty.config import DifficultyConfig
from curation.tasks.difficulty.table import find_difficulty, task_rates
from ops.fork import source_inputs
from ops.loading import load_tasks, split_tasks
from ops.state import IterationInputs, IterationState
from resources.experiment import Experiment


def require_difficulty(store: Store, experiment: Experiment) -> None:
    """Refuse an experiment whose range no difficulty or no task meets, before anything is made. A fork is refused when
    an iteration samples.

    Raises TaskError with the fix.
    """
    wanted = experiment.tasks.difficulty
    if wanted is not None and experiment.fork is None:
        _select(store, _suite_of(store, experiment), wanted)


def pinned_difficulty(store: Store, experiment: Experiment, inputs: IterationInputs) -> ArtifactRef | None:
    """The estimates that an iteration selects its tasks by; None if it draws from all of them. One that repeats another
    has those of its source.

    Raises TaskError if there are none, or if no task is in the range.
    """
    wanted = experiment.tasks.difficulty
    if wanted is None or inputs.replayed is not None:
        return inputs.difficulty
    measured, _ = _select(store, inputs.task_suite, wanted)
    return measured.ref


def training_tasks(state: IterationState) -> list[Task]:
    """Tasks that an iteration draws from, in the suite's order. Raises TaskError if none is in the range."""
    inputs, wanted = state.inputs, state.difficulty
    tasks = split_tasks(load_tasks(state.store, inputs.task_suite), Split.TRAIN)
    if wanted is None or inputs.difficulty is None:
        return tasks
    return _in_range(tasks, open_artifact(state.store, inputs.difficulty), wanted)


def difficulty_note(state: IterationState) -> str | None:
    """How many training tasks are in the experiment's range; None without one. Raises TaskError as the run would."""
    wanted = state.difficulty
    if wanted is None or (state.pinned is not None and state.pinned.replayed is not None):
        return None
    pinned = state.pinned.difficulty if state.pinned else None
    suite = state.pinned.task_suite if state.pinned else _suite_of(state.store, state.experiment)
    if pinned is None:
        measured, tasks = _select(state.store, suite, wanted)
    else:
        measured, tasks = open_artifact(state.store, pinned), training_tasks(state)
    everything = split_tasks(load_tasks(state.store, suite), Split.TRAIN)
    return (
        f"prompts: {len(tasks)} of {len(everything)} training tasks have a pass rate in {wanted}, as difficulty"
        f" {measured.ref.short} estimates it from {measured.meta['samples']} samples of {measured.meta['player']}"
    )


def _select(store: Store, suite: ArtifactRef, wanted: DifficultyConfig) -> tuple[Artifact, list[Task]]:
    measured = find_difficulty(store, suite, wanted.artifact)
    return measured, _in_range(split_tasks(load_tasks(store, suite), Split.TRAIN), measured, wanted)


def _in_range(tasks: list[Task], measured: Artifact, wanted: DifficultyConfig) -> list[Task]:
    rates = task_rates(measured)
    found = [task for task in tasks if wanted.admits(rates.get(task.task_id))]
    if not found:
        tried = sum(rates.get(task.task_id) is not None for task in tasks)
        raise TaskError(
            f"tasks.difficulty {wanted}: none of {tried} training tasks in difficulty {measured.ref.short} has such a"
            " pass rate: widen the range, or measure another policy"
        )
    return found


def _suite_of(store: Store, experiment: Experiment) -> ArtifactRef:
    """The suite that an experiment will use. Raises TaskError if it is not built."""
    if experiment.fork is not None:
        return source_inputs(store, experiment.fork).task_suite
    suite = find_built(experiment.tasks, store)
    if suite is None:
        raise TaskError(
            f"tasks.difficulty of {experiment.name}: its suite is not in {store.url}: run `triplane tasks build -e"
            f" {experiment.name}`, then `triplane tasks difficulty -e {experiment.name}`"
        )
    return suite.ref
