"""Small sources of tasks: a repository with a bug, as a folder and as a clone with SWE-bench style rows."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

BUGGY = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return a * 2\n"
FIXED = BUGGY.replace("a - b", "a + b")
PATCH = (
    "--- a/src/pack/calc.py\n+++ b/src/pack/calc.py\n@@ -1,5 +1,5 @@\n def add(a, b):\n-    return a - b\n+    return a"
    " + b\n \n \n def double(a):\n"
)
VISIBLE = "from pack.calc import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
HIDDEN = (
    "from pack.calc import add\n\n\ndef test_add(two):\n    assert add(two, two) == 4\n\n\ndef test_zero():\n    assert"
    " add(0, 0) == 0\n"
)
CONFTEST = "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n"
TEST_PATCH = "--- /dev/null\n+++ b/tests/unit/test_add.py\n@@ -0,0 +1,9 @@\n" + "".join(
    f"+{line}\n" for line in HIDDEN.splitlines()
)
REPOSITORY = {
    "src/pack/__init__.py": "",
    "src/pack/calc.py": BUGGY,
    "tests/conftest.py": CONFTEST,
    "tests/test_double.py": VISIBLE,
}
ADD, ZERO, DOUBLE = (
    "tests/unit/test_add.py::test_add",
    "tests/unit/test_add.py::test_zero",
    "tests/test_double.py::test_double",
)


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def folder_task(root: Path, about: str | None = None, **changes: str) -> Path:
    """A task's folder with a patch as its reference."""
    yaml = about or (
        f"instruction: repair add\ntests: [{ADD!r}, {DOUBLE!r}]\nhidden: [tests/unit]\nreference: fix.patch\n"
    )
    files = {**REPOSITORY, "tests/unit/test_add.py": HIDDEN, "fix.patch": PATCH, "task.yaml": yaml}
    return write(root, files | changes)


def clone(root: Path) -> str:
    """A git repository with the bug; its commit. The tests are in no release, as `export-ignore` says."""
    write(root, {**REPOSITORY, ".gitattributes": "tests export-ignore\n"})
    who = {f"GIT_{role}_{key}": "t@t" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "bug"]):
        subprocess.run(["git", *command], cwd=root, check=True, env={**os.environ, **who})
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
    return found.stdout.strip()


def planted(clone: Path, mark: Path) -> None:
    """Let the clone's configuration name programs wherever git takes one; each would make the file `mark`."""
    command = f"sh -c 'touch {mark}; cat'"
    config = {
        "core": {"fsmonitor": command, "sshCommand": command, "pager": command, "repositoryFormatVersion": "1"},
        'filter "x"': {"smudge": command, "clean": command, "required": "true"},
        'diff "x"': {"textconv": command, "command": command},
        "diff": {"external": command},
        "gpg": {"program": command},
        "log": {"showSignature": "true"},
        "extensions": {"partialClone": "origin"},
        'remote "origin"': {"url": f"ext::touch {mark}", "uploadpack": command, "promisor": "true"},
        'protocol "ext"': {"allow": "always"},
    }
    folder = clone / ".git"
    with (folder / "config").open("a") as file:
        for section, values in config.items():
            file.writelines([f"[{section}]\n", *(f'\t{key} = "{value}"\n' for key, value in values.items())])
    for name in ("hooks", "info"):
        (folder / name).mkdir(exist_ok=True)
    for name in ("post-checkout", "post-index-change", "reference-transaction"):
        (folder / "hooks" / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (folder / "hooks" / name).chmod(0o755)
    (folder / "info/attributes").write_text("* filter=x diff=x\n")


def row(commit: str, **changes: Any) -> dict[str, Any]:
    """One instance; FAIL_TO_PASS as text, as SWE-bench's own files have it."""
    return {
        "instance_id": "acme__pack-1",
        "repo": "acme/pack",
        "base_commit": commit,
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "problem_statement": "add subtracts",
        "FAIL_TO_PASS": json.dumps([ADD]),
        "PASS_TO_PASS": [ZERO, DOUBLE],
        "version": "1.0",
        **changes,
    }


def rows_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path
