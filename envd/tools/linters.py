"""Linters by file suffix: what is run in the sandbox, and how its words become findings. To add a language, add a row.

A linter that the sandbox does not have is said so; nothing is installed. Findings name the file, the line and the
column from 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that a linter has to say."""

    path: str
    line: int
    column: int
    words: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.words}"


@dataclass(frozen=True)
class Linter:
    """One program for files of some suffixes."""

    program: str
    arguments: tuple[str, ...]
    """Before the files."""
    suffixes: tuple[str, ...]
    parse: Callable[[bytes, bytes], list[Finding]]
    """Standard output and error to findings. Raises ValueError where they are none."""
    codes: tuple[int, ...] = (0, 1)
    """Exit codes of a run that looked at everything."""
    one_file: bool = False
    """Takes one file at a time."""


def ruff_findings(stdout: bytes, stderr: bytes) -> list[Finding]:
    """From `ruff check --output-format json`."""
    found = []
    for each in json.loads(stdout):
        place = each["location"]
        code = each["code"] or "syntax"
        found.append(
            Finding(str(each["filename"]), int(place["row"]), int(place["column"]), f"{code} {each['message']}")
        )
    return found


_BASH = re.compile(r"^(.*?): line (\d+): (.*)$")
_COLUMNS = re.compile(r"^(.*?):(\d+):(?:(\d+):)? (?:error: |warning: )?(.*)$")
_NODE = re.compile(r"^(.*):(\d+)$")


def bash_findings(stdout: bytes, stderr: bytes) -> list[Finding]:
    """From `bash -n`."""
    matches = map(_BASH.match, stderr.decode(errors="replace").splitlines())
    return [Finding(each[1], int(each[2]), 1, each[3]) for each in matches if each]


def column_findings(stdout: bytes, stderr: bytes) -> list[Finding]:
    """From programs that say `file:line:column: words` (gofmt, cc)."""
    matches = map(_COLUMNS.match, (stdout + b"\n" + stderr).decode(errors="replace").splitlines())
    return [Finding(each[1], int(each[2]), int(each[3] or 1), each[4]) for each in matches if each]


def node_findings(stdout: bytes, stderr: bytes) -> list[Finding]:
    """From `node --check`: the place is in the first line, what is wrong in the line that names an error."""
    lines = stderr.decode(errors="replace").splitlines()
    place = _NODE.match(lines[0]) if lines else None
    words = next((line for line in lines if re.match(r"\w*Error: ", line)), "")
    return [Finding(place[1], int(place[2]), 1, words)] if place and words else []


LINTERS: tuple[Linter, ...] = (
    Linter(
        "ruff",
        ("check", "--output-format=json", "--no-cache", "--no-fix", "--force-exclude", "--quiet", "--"),
        (".py", ".pyi"),
        ruff_findings,
    ),
    Linter("bash", ("-n",), (".sh", ".bash"), bash_findings, codes=(0, 1, 2, 127), one_file=True),
    Linter("node", ("--check",), (".js", ".mjs", ".cjs"), node_findings, one_file=True),
    Linter("gofmt", ("-e", "-l"), (".go",), column_findings, codes=(0, 2)),
    Linter("cc", ("-fsyntax-only", "-Wall", "-fno-diagnostics-show-caret"), (".c", ".h"), column_findings),
)


def linter_of(path: str) -> Linter | None:
    """Whose file this is."""
    return next((each for each in LINTERS if path.endswith(each.suffixes)), None)


def as_text(findings: Sequence[Finding], notes: Sequence[str]) -> str:
    """What the tool answers: findings by place, then what could not be looked at."""
    lines = [str(finding) for finding in sorted(set(findings))] + list(notes)
    return "\n".join(lines) or "no problems"
