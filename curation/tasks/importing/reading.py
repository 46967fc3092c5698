"""Read a task from a source and check it without sandboxes; used by all formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field, StrictFloat, StrictInt, ValidationError

from contracts.artifacts import Frozen
from contracts.digests import digest_of
from contracts.final_states import DiffState, FinalState
from contracts.patterns import PathPatterns
from contracts.tasks import Environment, Split, Task
from curation.errors import TaskError
from curation.tasks.importing.trees import Tree
from curation.tasks.validate import BrokenTask

MAX_BYTES = 48 * 1024 * 1024
"""Maximum size of a task's files, which must fit into one message to envd."""
DELIVERABLES_KEYS = ("deliverables", "artifacts")
"""Keys under which a source may name the files that count as the agent's work."""
DELIVERABLES = AliasChoices(*DELIVERABLES_KEYS)


def _listed(value: object) -> object:
    """Parse a text as JSON; return another value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


TestNames = Annotated[list[str], BeforeValidator(_listed)]
"""Node ids, as a list or as one written as text."""
_ID = re.compile(r"[A-Za-z0-9_.=@+-]+")


class _Environment(Frozen):
    """Values of `contracts.tasks.Environment` in a source."""

    runtime: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    plugins: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    ini: dict[str, str] = Field(default_factory=dict)
    timeout_s: Annotated[StrictInt | StrictFloat, Field(gt=0, le=86_400, allow_inf_nan=False)] | None = None
    memory_mb: Annotated[StrictInt, Field(gt=0, le=1 << 22)] | None = None


@dataclass
class Reading:
    """Content of a source."""

    tasks: list[Task] = field(default_factory=list)
    """Tasks in the order of the source, before their splits are assigned."""
    wishes: dict[str, Split] = field(default_factory=dict)
    """Splits that the source requests, by task id."""
    broken: list[BrokenTask] = field(default_factory=list)
    """Entries that can't be a task, with the reason."""


@dataclass(frozen=True)
class Source:
    """Parts of one task, as read."""

    task_id: str
    family: str
    instruction: str
    before: Tree
    """The agent's repository, hidden files included."""
    after_tests: Tree
    """The repository with the grading tests, without the fix."""
    fixed: Tree
    """The repository with the fix."""
    hidden: frozenset[str]
    """Paths that the agent does not get."""
    placed: frozenset[str]
    """Paths that grading replaces, in addition to the files of the tests."""
    tests: tuple[str, ...]
    reference: bytes
    meta: Mapping[str, Any]
    deliverables: tuple[str, ...] = ()
    """Patterns of the files that count as the agent's work; empty: all."""
    environment: Environment = field(default_factory=Environment)
    toolset: str = ""
    """Name of the agent's tools; empty: the default ones."""
    final_state: FinalState = field(default_factory=DiffState)


def task_of(source: Source) -> Task:
    """Build the task after checking its names and files. Raises TaskError with the reason and the fix."""
    if not _ID.fullmatch(source.task_id) or not source.task_id.strip("."):
        raise TaskError(f"its id {source.task_id!r} may hold letters, digits and _.=@+- only: rename it")
    if not source.instruction.strip():
        raise TaskError("its instruction is empty: say what the agent is to do")
    if not source.reference.strip() and source.final_state.kind in ("diff", "database"):
        raise TaskError("its reference fix is empty: give the patch that solves it")
    hidden_files = _hidden_files(source)
    files = {path: data for path, data in source.before.items() if path not in source.hidden}
    size = sum(map(len, files.values())) + sum(map(len, hidden_files.values()))
    if size > MAX_BYTES:
        raise TaskError(
            f"its files take {size >> 20} MiB, at most {MAX_BYTES >> 20} fit: leave data out of the repository"
        )
    changed = sorted(
        path for path in source.fixed.keys() | files.keys() if source.fixed.get(path) != source.before.get(path)
    )
    _check_deliverables(source.deliverables, changed)
    task = Task(
        task_id=source.task_id,
        family=source.family,
        split=Split.TRAIN,
        instruction=source.instruction,
        files=files,
        hidden_files=hidden_files,
        tests=source.tests,
        reference_diff=source.reference,
        meta={**source.meta, "path": _subject(files, changed)},
        deliverables=source.deliverables,
        environment=source.environment,
        toolset=source.toolset,
        final_state=source.final_state,
    )
    with whole_characters():
        digest_of([task.digest, task.family, task.meta])
    return task


@contextmanager
def whole_characters() -> Iterator[None]:
    """Convert the error of a text that has no digest, such as half of an emoji, to TaskError."""
    try:
        yield
    except UnicodeEncodeError as error:
        found = error.object[error.start : error.end].encode("ascii", "backslashreplace").decode()
        raise TaskError(f"a text or file name of it has {found}, which is no character: remove it") from None


def check_tests(tests: Sequence[str], where: str) -> tuple[str, ...]:
    """`tests` without repetitions. Raises TaskError if there are none, or for a name that is not a node id."""
    if not tests:
        raise TaskError(f"it names no tests: list pytest node ids under {where}")
    for test in tests:
        path, colons, name = test.partition("::")
        if not colons or not path.endswith(".py") or not name or PurePosixPath(path).is_absolute():
            raise TaskError(f"its test {test!r} is no pytest node id: write tests/test_x.py::test_name")
    return tuple(dict.fromkeys(tests))


def environment_of(values: dict[str, Any]) -> Environment:
    """Environment of a task as its source states it. Raises TaskError for an unknown key or a wrong value."""
    try:
        return Environment.from_values(_Environment.model_validate(values).model_dump(exclude_unset=True))
    except ValidationError as error:
        known = ", ".join(_Environment.model_fields)
        raise TaskError(f"its environment is wrong at {faults_of(error)} (known keys are {known})") from None


def faults_of(error: ValidationError) -> str:
    """Each invalid field with its error message, on one line."""
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}" for each in error.errors())


def _check_deliverables(deliverables: Sequence[str], changed: Sequence[str]) -> None:
    """Raise TaskError for an invalid pattern, and for a reference with files outside the deliverables."""
    try:
        patterns = PathPatterns(deliverables)
    except ValueError as error:
        raise TaskError(f"its {error}") from None
    other = next((path for path in changed if deliverables and not patterns.names(path)), None)
    if other is not None:
        raise TaskError(f"its deliverables do not name {other}, which its reference changes: add it to them")


def _hidden_files(source: Source) -> dict[str, bytes]:
    """Files that grading replaces: hidden files, the files of the tests (which the agent could weaken), and those named
    by the source.
    """
    named = dict.fromkeys(test.split("::", 1)[0] for test in source.tests)
    absent = next((path for path in named if path not in source.after_tests), None)
    if absent is not None:
        raise TaskError(f"its tests name {absent}, which is not there: correct the name, or add the file")
    wanted = source.hidden | source.placed | named.keys()
    return {path: source.after_tests[path] for path in sorted(wanted) if path in source.after_tests}


def _subject(files: Tree, changed: Sequence[str]) -> str:
    """File that cheats replace: the first Python file of the fix, else of the repository."""
    for path in [*changed, *sorted(files)]:
        if path.endswith(".py") and path in files and is_text(files[path]):
            return path
    return changed[0] if changed and changed[0] not in files else "cheat.py"


def is_text(data: bytes) -> bool:
    """Whether the bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
