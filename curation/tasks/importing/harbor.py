"""Harbor task folders of the kind that runs here: Python, a fix that is a patch, and tests that pytest runs.

What an imported task keeps: instruction.md, the files that the Dockerfile copies, solution/*.patch, tests/files/ and
the names in tests/config.json. tests/test.sh is not run: the proof of the import decides whether the tests tell.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contracts.errors import describe
from curation.errors import TaskError
from curation.tasks.importing.dockerfile import read_dockerfile
from curation.tasks.importing.reading import (
    DELIVERABLES,
    Reading,
    Source,
    TestNames,
    check_tests,
    environment_of,
    faults_of,
    task_of,
)
from curation.tasks.importing.splits import ImportedSplit
from curation.tasks.importing.trees import Tree, folder_tree, patched_tree
from curation.tasks.validate import BrokenTask

HARBOR_FILE = "task.toml"
_PLAIN = re.compile(r"#.*|set [-+\w ]+|cd [\w/.-]+|exit 0")
_PATCHES = re.compile(r"(?:git apply|patch)\b[^|;&]*?([\w.-]+\.(?:patch|diff))[\"']?")
_ABSENT = {
    "steps": "several steps",
    "environment.docker_image": "a ready-made image",
    "environment.gpus": "GPUs",
    "environment.tpu": "a TPU",
    "environment.mcp_servers": "MCP servers",
    "environment.healthcheck": "a service with a health check",
    "verifier.environment": "an image of its own for the tests",
    "verifier.collect": "commands before the tests",
}
"""Keys of task.toml that can't be met here, in words."""


class _Own(BaseModel):
    """`metadata.triplane` of a task that Triplane exported."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    family: str | None = None
    split: ImportedSplit | None = None
    deliverables: tuple[str, ...] = Field(default=(), validation_alias=DELIVERABLES)
    environment: dict[str, Any] = {}


class _Names(BaseModel):
    """tests/config.json, in SWE-bench's words."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    FAIL_TO_PASS: Annotated[TestNames, Field(min_length=1)]
    PASS_TO_PASS: TestNames = []
    test_patch: str = ""
    hidden: list[str] | None = None
    """Files of tests/files that belong to the task; default: all."""


def is_harbor(folder: Path) -> bool:
    """Whether a folder is a Harbor task, or has some as its subfolders."""
    return (folder / HARBOR_FILE).is_file() or any(folder.glob(f"*/{HARBOR_FILE}"))


def read_harbor(folder: Path) -> Reading:
    """The tasks of a folder, by name; a single one if the folder itself is a task."""
    reading = Reading()
    single = (folder / HARBOR_FILE).is_file()
    for place in [folder.resolve()] if single else sorted(path.parent for path in folder.glob(f"*/{HARBOR_FILE}")):
        try:
            own = _own(place)
            reading.tasks.append(task_of(_source(place, own)))
        except TaskError as error:
            reading.broken.append(BrokenTask(task_id=place.name, reason=str(error)))
            continue
        if own.split is not None:
            reading.wishes[place.name] = own.split
    return reading


def _own(place: Path) -> _Own:
    """What the task's task.toml says of it. Raises TaskError for what can't be met here."""
    values = _toml(place)
    for name, what in _ABSENT.items():
        section, _, key = name.rpartition(".")
        if (_section(values, section) if section else values).get(key):
            raise TaskError(f"its {HARBOR_FILE} asks for {what} ({name}), which sandboxes here don't have: use Harbor")
    if str(_section(values, "environment").get("os", "linux")).lower() != "linux":
        raise TaskError(f"its {HARBOR_FILE} asks for another system than Linux (environment.os): use Harbor")
    if any((place / "environment").glob("*compose*.y*ml")):
        raise TaskError("its environment has several containers (docker-compose): use Harbor")
    try:
        return _Own.model_validate(_section(values, "metadata").get("triplane", {}))
    except ValidationError as error:
        raise TaskError(f"its {HARBOR_FILE} is wrong at metadata.triplane: {faults_of(error)}") from None


def _toml(place: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((place / HARBOR_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"its {HARBOR_FILE} can't be read: {describe(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(f"its {HARBOR_FILE} is not TOML: {' '.join(str(error).split())}") from None


def _source(place: Path, own: _Own) -> Source:
    everything = folder_tree(place)
    environment = folder_tree(place / "environment")
    dockerfile = _text(environment, "Dockerfile", "environment/Dockerfile")
    image = read_dockerfile(dockerfile, _workdir(place), built=bool(own.environment.get("runtime")))
    before = image.tree(environment)
    installed = [each for each in image.packages if re.split(r"[=<>~!\[ ]", each)[0] != "pytest"]
    if installed:
        raise TaskError(
            f"its Dockerfile installs {installed[0]}: packages need a runtime, whose digest is"
            " metadata.triplane.environment.runtime (docs/tasks.md)"
        )
    names = _names(_text(everything, "tests/config.json", "tests/config.json with FAIL_TO_PASS"))
    if b"pytest" not in everything.get("tests/test.sh", b""):
        raise TaskError("its tests/test.sh does not run pytest: only tests of pytest are graded here")
    files = _below(everything, "tests/files/")
    hidden = files if names.hidden is None else {path: files[path] for path in names.hidden if path in files}
    after = {**patched_tree(before, names.test_patch.encode(), "test_patch"), **hidden}
    patch = _reference(everything)
    return Source(
        task_id=place.name,
        family=own.family or place.parent.name,
        instruction=_text(everything, "instruction.md", "instruction.md"),
        before=before,
        after_tests=after,
        fixed=patched_tree(before, patch, "fix"),
        hidden=frozenset(),
        placed=frozenset(path for path, data in after.items() if before.get(path) != data) | hidden.keys(),
        tests=check_tests([*names.FAIL_TO_PASS, *names.PASS_TO_PASS], "FAIL_TO_PASS"),
        reference=patch,
        meta={"fail_to_pass": names.FAIL_TO_PASS, "pass_to_pass": names.PASS_TO_PASS},
        deliverables=own.deliverables,
        environment=environment_of(own.environment),
    )


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name, {})
    if not isinstance(found, dict):
        raise TaskError(f"its {HARBOR_FILE} is wrong at {name}: write it as a table, [{name}]")
    return found


def _workdir(place: Path) -> str | None:
    found = _section(_toml(place), "environment").get("workdir")
    return str(found) if found else None


def _names(text: str) -> _Names:
    try:
        return _Names.model_validate_json(text)
    except ValidationError as error:
        raise TaskError(f"its tests/config.json is wrong at {faults_of(error)}: name the failing tests there") from None


def _reference(everything: Tree) -> bytes:
    """The patch that solution/solve.sh applies. Raises TaskError if it does anything else."""
    script = _text(everything, "solution/solve.sh", "solution/solve.sh")
    applied: list[str] = []
    for line in filter(None, map(str.strip, script.split("\n"))):
        patches = _PATCHES.match(line)
        if patches:
            applied.append(patches[1])
        elif not _PLAIN.fullmatch(line):
            raise TaskError(
                f"its solution/solve.sh runs `{line:.80}`: only a script that applies one patch beside it can be a"
                " reference here"
            )
    if len(applied) != 1 or f"solution/{applied[0]}" not in everything:
        raise TaskError("its solution/solve.sh applies no single patch beside it: write the fix as solution/fix.patch")
    return everything[f"solution/{applied[0]}"]


def _below(tree: Tree, prefix: str) -> Tree:
    return {path.removeprefix(prefix): data for path, data in tree.items() if path.startswith(prefix)}


def _text(tree: Tree, path: str, what: str) -> str:
    if path not in tree:
        raise TaskError(f"it has no {what}: add it")
    try:
        return tree[path].decode()
    except UnicodeDecodeError:
        raise TaskError(f"its {what} is not UTF-8: write it as UTF-8") from None
