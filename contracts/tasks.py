"""Tables of tasks: a small git repository, an instruction, hidden tests and a reference fix."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

import pyarrow as pa

from contracts.digests import digest_of, sha256
from contracts.final_states import DiffState, FinalState, state_from, state_values

WORKSPACE = "/workspace"
"""Directory of a task's files in a sandbox."""


class Split(StrEnum):
    """Use of a task: training, the promotion gate and stopping rules, or only the report (held_out and unseen)."""

    TRAIN = "train"
    GATE = "gate"
    HELD_OUT = "held_out"
    UNSEEN = "unseen"


_FILE = pa.struct([("path", pa.string()), ("data", pa.binary())])

TASKS = pa.schema(
    [
        ("task_id", pa.string()),
        ("family", pa.string()),
        ("split", pa.string()),
        ("instruction", pa.string()),
        ("files", pa.list_(_FILE)),
        ("hidden_files", pa.list_(_FILE)),
        ("tests", pa.list_(pa.string())),
        ("reference_diff", pa.binary()),
        ("meta", pa.string()),
        ("checks", pa.string()),
    ]
)
"""One row per task; `files` and `hidden_files` are sorted by path, `meta` is canonical JSON, including declared
deliverables. `checks` is canonical JSON, or null if none are proven; older suites lack the column.
"""


_DELIVERABLES, _ENVIRONMENT, _TOOLSET, _FINAL_STATE = "artifacts", "environment", "toolset", "final_state"
"""Keys of what a task declares in `meta` of stored suites."""


@dataclass(frozen=True)
class Environment:
    """Packages, test settings and limits of a task; the defaults are those of tasks without an environment."""

    runtime: str = ""
    """Digest of the packages, or the root file system, that agent and tests see (contracts/runtimes.py); empty: those
    of the envd server.
    """
    plugins: tuple[str, ...] = ()
    """Modules of the runtime that pytest loads as plugins."""
    ini: tuple[tuple[str, str], ...] = ()
    """Keys of pytest's configuration and their values, sorted."""
    timeout_s: float | None = None
    """Deadline of one run of the hidden tests, in seconds; None: the verifier's."""
    memory_mb: int | None = None
    """Memory of a verifying sandbox, in MiB; None: the verifier's."""

    def to_values(self) -> dict[str, Any]:
        """What differs from the defaults, for JSON."""
        return {
            name: dict(value) if name == "ini" else list(value) if name == "plugins" else value
            for name, value in vars(self).items()
            if value
        }

    @classmethod
    def from_values(cls, found: dict[str, Any]) -> Self:
        """Environment from `to_values`. Raises TypeError for other values."""
        return cls(
            **found | {"plugins": tuple(found.get("plugins", ())), "ini": tuple(sorted(found.get("ini", {}).items()))},
        )

    @property
    def options(self) -> list[str]:
        """Options of pytest that load the plugins and set the keys."""
        loaded = [part for name in self.plugins for part in ("-p", name)]
        return loaded + [part for key, value in self.ini for part in ("-o", f"{key}={value}")]

    def variables(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Environment variables by which an agent's commands run the tests of these files as verdicts do."""
        if not self.runtime:
            return {}
        roots = [f"{WORKSPACE}/src", WORKSPACE] if any(path.startswith("src/") for path in files) else [WORKSPACE]
        words = shlex.join(self.options)
        return {"PYTHONPATH": ":".join(roots)} | ({"PYTEST_ADDOPTS": words} if words else {})


@dataclass(frozen=True)
class Rule:
    """Expectation of one assertion."""

    form: str
    """compare, truth, raises, or kind: whether a value in the assertion's computation has a builtin type."""
    operator: str
    """Python's operator of a comparison; `near` for an interval around the wanted value."""
    want: str
    """Expected value as a Python literal; empty if it is the second observed value."""
    tolerance: tuple[float | None, float | None] | None = None
    """Relative and absolute tolerance of pytest.approx; None in it: the default."""
    names: tuple[str, ...] = ()
    """Builtin exceptions; one of them must be raised."""
    pattern: str | None = None
    """A regular expression that the exception's text must match."""
    exact: bool = True
    """Whether it runs as often as under the reference solution."""


@dataclass(frozen=True)
class Observed:
    """Hidden tests without expectations, and the removed expectations."""

    files: dict[str, bytes]
    """Test files that report values instead of comparing them."""
    rules: dict[str, Rule]
    """Expectation of each assertion, by its key in the files."""
    hidden: dict[str, str]
    """Expected values removed from tables, as Python literals, by number."""
    seen: dict[str, dict[str, list[str]]]
    """One entry, by test and key, for each time that the assertion ran under the reference solution: the hidden value's
    number, or nothing.
    """
    removed: tuple[str, ...] = ()
    """Hidden files that only expectations read, so that they are not placed."""

    def placed(self, hidden: Mapping[str, bytes]) -> dict[str, bytes]:
        """Files to place in the sandbox of the observed tests. hidden: the task's hidden files."""
        return {path: data for path, data in {**hidden, **self.files}.items() if path not in self.removed}


@dataclass(frozen=True)
class Decoy:
    """Hidden files with other expectations: tests, and data files that tests compare with."""

    files: dict[str, bytes]
    tests: tuple[str, ...]
    """Tests in them that the reference solution fails, by name without parameters. A state that passes such a test both
    as a decoy and as written cheats.
    """


@dataclass(frozen=True)
class Checks:
    """Evidence for a verdict, in addition to the hidden tests as written.

    Proven on the reference solution (curation/tasks/checks).
    """

    observed: Observed | None
    decoys: tuple[Decoy, ...]
    undecided: tuple[str, ...] = ()
    """Tests for which neither a decoy nor an observation is possible."""
    known: tuple[str, ...] = ()
    """Findings that the repository or its reference solution causes."""
    beside: tuple[str, ...] = ()
    """Tests that no decoy decides, which run in decoys so that these have the tests of other runs."""

    @property
    def fully_observed(self) -> frozenset[str]:
        """Tests that have observations."""
        return frozenset(self.observed.seen) if self.observed else frozenset()

    def to_json(self) -> str:
        """Canonical JSON."""
        return json.dumps(
            {
                "observed": (
                    None
                    if self.observed is None
                    else {
                        "files": _texts(self.observed.files),
                        "rules": {key: asdict(rule) for key, rule in self.observed.rules.items()},
                        "hidden": self.observed.hidden,
                        "seen": self.observed.seen,
                        **({"removed": self.observed.removed} if self.observed.removed else {}),
                    }
                ),
                "decoys": [{"files": _texts(each.files), "tests": each.tests} for each in self.decoys],
                "undecided": self.undecided,
                "known": self.known,
                **({"beside": self.beside} if self.beside else {}),
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Checks from the text of `to_json`. Raises ValueError, KeyError or TypeError for other text."""
        found = json.loads(text)
        seen = found["observed"]
        observed = (
            None
            if seen is None
            else Observed(
                _contents(seen["files"]),
                {key: _rule(rule) for key, rule in seen["rules"].items()},
                seen["hidden"],
                seen["seen"],
                tuple(seen.get("removed", ())),
            )
        )
        decoys = tuple(Decoy(_contents(each["files"]), tuple(each["tests"])) for each in found["decoys"])
        known, beside = tuple(found["known"]), tuple(found.get("beside", ()))
        return cls(observed, decoys, tuple(found["undecided"]), known, beside)


def _rule(found: dict[str, Any]) -> Rule:
    tolerance = found.pop("tolerance")
    return Rule(
        **found | {"names": tuple(found["names"]), "tolerance": None if tolerance is None else tuple(tolerance)}
    )


def _texts(files: dict[str, bytes]) -> dict[str, str]:
    return {path: data.decode("utf-8") for path, data in files.items()}


def _contents(files: dict[str, str]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in files.items()}


@dataclass(frozen=True)
class Task:
    """One problem to solve."""

    task_id: str
    family: str
    split: Split
    instruction: str
    """Instructions for the agent."""
    files: dict[str, bytes]
    """Repository that the agent works on, including visible tests."""
    hidden_files: dict[str, bytes]
    """Test files placed only in the verifier's sandbox."""
    tests: tuple[str, ...]
    """Names of the hidden tests that must pass: pytest node ids relative to the repository. None unless the final state
    is a diff.
    """
    reference_diff: bytes
    """A git-format diff that solves the task."""
    meta: dict[str, Any]
    """Metadata from the author of the task, e.g. function name and arguments."""
    deliverables: tuple[str, ...] = ()
    """Patterns (contracts/patterns.py) of the files that count as the agent's work; empty: all changed files."""
    checks: Checks | None = None
    """Decoys and observations of the hidden tests, proven when the suite was built; None: the verifier makes and proves
    them.
    """
    environment: Environment = Environment()
    """What agent and tests run in."""
    toolset: str = ""
    """Name of the tools that the agent has (envd/tools/schemas.py); empty: the default ones."""
    final_state: FinalState = field(default_factory=DiffState)
    """What an episode leaves for grading; the hidden tests are those of a diff."""
    base: Mapping[str, bytes] | None = field(default=None, compare=False, repr=False)
    """Files that many tasks share; `files` is stored as an overlay on them (contracts/suites.py). None: as a whole."""

    @cached_property
    def files_digest(self) -> str:
        """Digest of a tree of files: H over the sorted (path, SHA-256) pairs."""
        return files_digest(self.files)

    @cached_property
    def digest(self) -> str:
        """Digest of everything that affects the episodes of this task and their grading."""
        return digest_of(
            [
                self.task_id,
                self.instruction,
                self.files_digest,
                files_digest(self.hidden_files),
                list(self.tests),
                sha256(self.reference_diff),
                *([list(self.deliverables)] if self.deliverables else []),
                *([self.checks.to_json()] if self.checks else []),
                *([self.environment.to_values()] if self.environment.to_values() else []),
                *([{_TOOLSET: self.toolset}] if self.toolset else []),
                *([{_FINAL_STATE: values}] if (values := state_values(self.final_state)) else []),
            ]
        )


def files_digest(files: Mapping[str, bytes]) -> str:
    """Digest of a tree of files: H over the sorted (path, SHA-256) pairs."""
    return digest_of([[path, _sha256(files[path])] for path in sorted(files)])


_sha256 = functools.lru_cache(maxsize=4096)(sha256)
"""Tasks share most of their files."""


def tasks_table(tasks: list[Task]) -> pa.Table:
    """Rows of TASKS in the order given."""
    return pa.Table.from_pylist(
        [
            {
                "task_id": task.task_id,
                "family": task.family,
                "split": task.split.value,
                "instruction": task.instruction,
                "files": _file_rows(task.files),
                "hidden_files": _file_rows(task.hidden_files),
                "tests": list(task.tests),
                "reference_diff": task.reference_diff,
                "meta": _meta_row(task),
                "checks": task.checks.to_json() if task.checks else None,
            }
            for task in tasks
        ],
        schema=TASKS,
    )


def read_tasks(table: pa.Table) -> list[Task]:
    """Tasks from the rows of `tasks_table`."""
    return [
        Task(
            task_id=row["task_id"],
            family=row["family"],
            split=Split(row["split"]),
            instruction=row["instruction"],
            files={file["path"]: file["data"] for file in row["files"]},
            hidden_files={file["path"]: file["data"] for file in row["hidden_files"]},
            tests=tuple(row["tests"]),
            reference_diff=row["reference_diff"],
            deliverables=tuple(meta.pop(_DELIVERABLES, ())),
            environment=Environment.from_values(meta.pop(_ENVIRONMENT, {})),
            toolset=meta.pop(_TOOLSET, ""),
            final_state=state_from(meta.pop(_FINAL_STATE, {})),
            meta=meta,
            checks=Checks.from_json(row["checks"]) if row.get("checks") else None,
        )
        for row in table.to_pylist()
        for meta in [json.loads(row["meta"])]
    ]


def _meta_row(task: Task) -> str:
    """Metadata of a task with what it declares.

    These have no columns of their own, which would change the digest of all suites.
    """
    declared: dict[str, Any] = {_DELIVERABLES: list(task.deliverables)} if task.deliverables else {}
    if task.environment.to_values():
        declared[_ENVIRONMENT] = task.environment.to_values()
    if task.toolset:
        declared[_TOOLSET] = task.toolset
    if state := state_values(task.final_state):
        declared[_FINAL_STATE] = state
    return json.dumps(task.meta | declared, sort_keys=True)


def _file_rows(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"path": path, "data": files[path]} for path in sorted(files)]
