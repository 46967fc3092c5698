"""Grade episodes again with nothing of this repository: standard library, git and pytest only.

    python regrade_independent.py EPISODES.json        prints one line an episode, "<id> passed" or "<id> failed <why>"

EPISODES.json: [{"id": str, "files": {path: base64}, "diff": base64, "hidden_files": {path: base64}, "tests": [pytest
node id]}]

Each repository is built in a temporary directory, the diff applied by `git apply`, the hidden tests placed over it and
run by a cold pytest in a subprocess; what passed is read from its JUnit XML. It isolates nothing: for diffs that
sandboxes have already run.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

PYTEST = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "-o", "junit_family=xunit2"]


def place(root: Path, files: dict[str, str]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))


def junit_name(node: str) -> tuple[str, str]:
    """("tests.test_x.TestY", "test_z[1]") of "tests/test_x.py::TestY::test_z[1]"."""
    path, *parts = node.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *parts[:-1]]), parts[-1]


def passed_tests(report: Path) -> set[tuple[str, str]]:
    """Tests with no failure, error or skip; none when pytest did not live to write its report."""
    if not report.exists():
        return set()
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {
        (case.get("classname", ""), case.get("name", ""))
        for case in cases
        if not {"failure", "error", "skipped"} & {child.tag for child in case}
    }


def why_not(episode: dict[str, Any]) -> str:
    """Empty when every named hidden test passes on the final state, else the reason."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "repository"
        root.mkdir()
        place(root, episode["files"])
        subprocess.run(["git", "init", "-q"], cwd=root, check=True)
        diff = base64.b64decode(episode["diff"])
        if diff.strip() and subprocess.run(["git", "apply", "-"], cwd=root, input=diff, capture_output=True).returncode:
            return "diff does not apply"
        place(root, episode["hidden_files"])
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *PYTEST,
            f"--rootdir={root}",
            f"--junitxml={report}",
            *episode["tests"],
        ]
        env = {
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            subprocess.run(command, cwd=root, env=env, capture_output=True, timeout=60)
        except subprocess.TimeoutExpired:
            return "timed out"
        missing = [node for node in episode["tests"] if junit_name(node) not in passed_tests(report)]
        return f"not passed: {', '.join(missing)}" if missing else ""


def main() -> None:
    for episode in json.loads(Path(sys.argv[1]).read_text()):
        reason = why_not(episode)
        print(episode["id"], f"failed {reason}" if reason else "passed", flush=True)


if __name__ == "__main__":
    main()
