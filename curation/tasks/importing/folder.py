"""A folder of repositories with tests: every subfolder with a `task.yaml` is a task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from contracts.artifacts import Frozen
from contracts.errors import describe
from contracts.final_states import DatabaseState, DiffState, FinalState
from contracts.yaml_text import load_yaml
from curation.errors import TaskError
from curation.states.database import TEST_FILE, database_deliverables, database_test_file, database_tests
from curation.tasks.importing.reading import (
    DELIVERABLES,
    Reading,
    Source,
    check_tests,
    environment_of,
    faults_of,
    task_of,
)
from curation.tasks.importing.splits import ImportedSplit
from curation.tasks.importing.trees import Tree, folder_tree, patched_tree, tree_patch
from curation.tasks.validate import BrokenTask
from envd.client import EnvdError
from envd.tools import DEFAULT_TOOLSET, toolset_named

TASK_FILE = "task.yaml"


def _known_toolset(name: str) -> str:
    """The name of a toolset. Raises ValueError with the known ones."""
    try:
        toolset_named(name)
    except EnvdError as error:
        raise ValueError(str(error)) from None
    return "" if name == DEFAULT_TOOLSET else name


Toolset = Annotated[str, AfterValidator(_known_toolset)]


class TaskFile(Frozen):
    """Content of `task.yaml`. All paths are relative to its folder, which is the repository."""

    instruction: str = Field(min_length=1)
    """Instructions for the agent."""
    final_state: FinalState = DiffState()
    """What is graded; default: the changes of the repository, by `tests`."""
    tests: tuple[str, ...] = ()
    """Node ids of the tests that must pass after the fix; at least one fails before."""
    hidden: tuple[str, ...] = ()
    """Files and directories that the agent does not get. Grading uses this folder's version of the files of `tests`,
    hidden or not.
    """
    reference: str = ""
    """A patch file, or a directory with the fixed files under their paths. The agent gets neither. Tasks whose final
    state is an answer or requests have none.
    """
    deliverables: tuple[str, ...] = Field(default=(), validation_alias=DELIVERABLES)
    """Patterns, as in `.gitignore`, of the files that count as the agent's work; empty: all changed files."""
    toolset: Toolset | None = None
    """Name of the agent's toolset. Default: `answer` if the final state is an answer, else `default`."""
    environment: dict[str, Any] = Field(default_factory=dict)
    """Packages, test settings and limits (docs/tasks.md)."""
    family: str | None = None
    """Groups tasks in reports; default: the folder's name."""
    split: ImportedSplit | None = None
    """Split of the task; default: assigned by share."""

    @property
    def tools(self) -> str:
        """Toolset of the task."""
        return ("answer" if self.final_state.kind == "answer" else "") if self.toolset is None else self.toolset


def read_folder(folder: Path, toolset: str = "") -> Reading:
    """The tasks of a folder, by name. toolset: of tasks that name none, also of those whose final state is an answer.

    Raises TaskError if no subfolder has a task.yaml.
    """
    reading = Reading()
    places = sorted(path.parent for path in folder.glob(f"*/{TASK_FILE}"))
    if not places:
        raise TaskError(
            f"{folder} has no subfolder with a {TASK_FILE}: add one to each repository that should become a task"
        )
    for place in places:
        try:
            about = _about(place / TASK_FILE)
            if toolset and about.toolset is None:
                about = about.model_copy(update={"toolset": _known_toolset(toolset)})
            reading.tasks.append(task_of(_source(place, about, folder.resolve().name)))
        except TaskError as error:
            reading.broken.append(BrokenTask(task_id=place.name, reason=str(error)))
            continue
        if about.split is not None:
            reading.wishes[place.name] = about.split
    return reading


def _about(path: Path) -> TaskFile:
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"its {TASK_FILE} can't be read: {describe(error)}") from None
    except ValueError as error:
        raise TaskError(f"its {TASK_FILE} is not YAML: {error}") from None
    try:
        return TaskFile.model_validate(values)
    except ValidationError as error:
        raise TaskError(f"its {TASK_FILE} is wrong at {faults_of(error)}") from None


def _source(place: Path, about: TaskFile, family: str) -> Source:
    everything = folder_tree(place)
    state = about.final_state
    unused = [name for name in _UNUSED[state.kind] if getattr(about, name)]
    if unused:
        raise TaskError(f"its final state is of kind {state.kind}, which has no {unused[0]}: remove it")
    reference = _reference(everything, about)
    tree = {path: data for path, data in everything.items() if path not in reference and path != TASK_FILE}
    hidden = _hidden(tree, about)
    before = {path: data for path, data in tree.items() if path not in hidden}
    if not reference:
        patch, fixed = b"", before
    elif (place / about.reference).is_dir():
        fixed = before | {
            path.removeprefix(about.reference.rstrip("/") + "/"): data for path, data in reference.items()
        }
        patch = tree_patch(before, fixed)
    else:
        patch = reference[about.reference]
        fixed = patched_tree(before, patch, f"reference {about.reference}")
    source = Source(
        task_id=place.name,
        family=about.family or family,
        instruction=about.instruction,
        before=tree,
        after_tests=tree,
        fixed=fixed | {path: tree[path] for path in hidden},
        hidden=frozenset(hidden),
        placed=frozenset(),
        tests=(),
        reference=patch,
        meta={"fail_to_pass": []},
        deliverables=about.deliverables,
        environment=environment_of(about.environment),
        toolset=about.tools,
        final_state=state,
    )
    if isinstance(state, DatabaseState):
        return _graded_by_rows(source, state)
    if isinstance(state, DiffState):
        return replace(source, tests=check_tests(about.tests, f"tests in {TASK_FILE}"))
    return source


_NOTHING = ("tests", "reference", "deliverables")
_UNUSED = {"diff": (), "answer": _NOTHING, "requests": _NOTHING, "database": ("tests", "deliverables")}
"""Keys that tasks of a kind can't have."""


def _reference(everything: Tree, about: TaskFile) -> Tree:
    """Files of the reference; none for an answer and for requests."""
    if about.final_state.kind in ("answer", "requests"):
        return {}
    if not about.reference:
        raise TaskError(f"its {TASK_FILE} names no reference: name a patch file, or a directory with the fixed files")
    found = _below(everything, about.reference)
    if not found:
        raise TaskError(
            f"its reference {about.reference} is not there: name a patch file, or a directory with the fixed files"
        )
    return found


def _graded_by_rows(source: Source, state: DatabaseState) -> Source:
    """The source with the hidden tests and deliverables of its database."""
    if TEST_FILE in source.before:
        raise TaskError(f"its file {TEST_FILE} has the name of the hidden test: rename it")
    return replace(
        source,
        after_tests={**source.before, TEST_FILE: database_test_file(state)},
        tests=database_tests(state),
        deliverables=database_deliverables(state),
    )


def _hidden(tree: Tree, about: TaskFile) -> set[str]:
    """Paths of the hidden files. Raises TaskError for a name that is not there."""
    hidden: set[str] = set()
    for name in about.hidden:
        found = _below(tree, name)
        if not found:
            raise TaskError(f"its hidden {name} is not there: correct the name, or add the file")
        hidden |= found.keys()
    return hidden


def _below(tree: Tree, name: str) -> Tree:
    """The file of this name, or all files of the directory."""
    prefix = name.rstrip("/") + "/"
    return {path: data for path, data in tree.items() if path == name or path.startswith(prefix)}
