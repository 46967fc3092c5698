"""Harbor task folders (schema 1.4 of task.toml, https://harborframework.com/docs/tasks), one a task:

task.toml                  timeouts, resources, no network; `metadata.triplane` holds what Harbor has no field for
instruction.md
environment/Dockerfile     Python, pytest or the packages of the task's runtime, git
environment/workspace/     the agent's files
solution/                  solve.sh applies fix.patch
tests/                     test.sh places files/ and runs names.txt; config.json names the failing tests as SWE-bench
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.tasks import WORKSPACE, Task
from curation.tasks.exporting.prepare import Prepared
from curation.tasks.importing.trees import Tree, write_tree

SCHEMA = "1.4"
VERIFIER_S, AGENT_S, BUILD_S = 300.0, 1800.0, 900.0
"""Timeouts of tests, agent and image, in seconds. A task's own deadline of its tests counts where it is longer."""
MEMORY_MB, STORAGE_MB = 2048, 10_240

_TEST_SH = f"""#!/bin/bash
# Places the hidden tests and runs the named ones, without byte code of earlier runs. The reward is 1 if all pass.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cp -R /tests/files/. {WORKSPACE}/
find {WORKSPACE} -name __pycache__ -prune -exec rm -rf {{}} +
cd {WORKSPACE}
mapfile -t names < /tests/names.txt
python -m pytest -q -c /dev/null --rootdir {WORKSPACE} --import-mode=importlib -o addopts= -p no:cacheprovider \\
  --junitxml=/logs/verifier/report.xml @OPTIONS@"${{names[@]}}"
python /tests/reward.py /logs/verifier/report.xml /tests/names.txt > /logs/verifier/reward.txt
"""
_REWARD_PY = '''"""Print 1 if all tests of a report passed, at least as many as were named; else 0."""

import sys
import xml.etree.ElementTree as tree

try:
    cases = list(tree.parse(sys.argv[1]).iter("testcase"))
except (OSError, tree.ParseError):
    cases = []
with open(sys.argv[2], encoding="utf-8") as file:
    named = file.read().split("\\n")[:-1]
passed = [case for case in cases if not {part.tag for part in case} & {"failure", "error", "skipped"}]
print(int(len(cases) >= len(named) > 0 and len(passed) == len(cases)))
'''
_SOLVE_SH = f"""#!/bin/bash
set -euo pipefail
cd {WORKSPACE}
git apply --whitespace=nowarn /solution/fix.patch
"""


def write_folders(
    folder: Path, prepared: Sequence[Prepared], suite: str, packages_of: Callable[[str], Mapping[str, str]]
) -> None:
    """Write one folder a task, named as the task. suite: its digest. packages_of: versions by name of a runtime."""
    for each in prepared:
        packages = packages_of(each.task.environment.runtime)
        place = folder / each.task.task_id
        write_tree(place, {path: data.encode() for path, data in _texts(each, suite, packages).items()})
        write_tree(place / "environment" / "workspace", each.task.files)
        write_tree(place / "tests" / "files", _placed(each.task))
        for program in ("solution/solve.sh", "tests/test.sh"):
            (place / program).chmod(0o755)


def _placed(task: Task) -> Tree:
    """Hidden files, and every conftest.py, which grading restores."""
    shared = {path: data for path, data in task.files.items() if path.rsplit("/", 1)[-1] == "conftest.py"}
    return {**shared, **task.hidden_files}


def _texts(each: Prepared, suite: str, packages: Mapping[str, str]) -> dict[str, str]:
    task = each.task
    options = "".join(f"{shlex.quote(option)} " for option in task.environment.options)
    config = {
        "instance_id": task.task_id,
        "repo": each.repo,
        "FAIL_TO_PASS": each.fail_to_pass,
        "PASS_TO_PASS": each.pass_to_pass,
        "hidden": sorted(task.hidden_files),
    }
    return {
        "task.toml": _toml(each, suite),
        "instruction.md": task.instruction,
        "environment/Dockerfile": _dockerfile(task, packages),
        "solution/solve.sh": _SOLVE_SH,
        "solution/fix.patch": each.patch,
        "tests/test.sh": _TEST_SH.replace("@OPTIONS@", options),
        "tests/reward.py": _REWARD_PY,
        "tests/names.txt": "".join(f"{test}\n" for test in task.tests),
        "tests/config.json": json.dumps(config, indent=1, ensure_ascii=False) + "\n",
    }


def _dockerfile(task: Task, packages: Mapping[str, str]) -> str:
    wanted = " ".join(f"{name}=={version}" for name, version in sorted(packages.items()))
    variables = {**_roots(task), **task.environment.variables(task.files)}
    lines = [
        f"FROM python:{sys.version_info.major}.{sys.version_info.minor}-slim",
        "RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*",
        f"RUN pip install --no-cache-dir {wanted}",
        *(f"ENV {name}={json.dumps(value)}" for name, value in sorted(variables.items())),
        f"WORKDIR {WORKSPACE}",
        f"COPY workspace/ {WORKSPACE}/",
        "RUN git init --quiet && git add --all --force"
        " && git -c user.name=triplane -c user.email=triplane@localhost commit --quiet --message start",
    ]
    return "\n".join(lines) + "\n"


def _roots(task: Task) -> dict[str, str]:
    source = [f"{WORKSPACE}/src"] if any(path.startswith("src/") for path in task.files) else []
    return {"PYTHONPATH": ":".join([*source, WORKSPACE])}


def _toml(each: Prepared, suite: str) -> str:
    task = each.task
    name = re.sub("[^A-Za-z0-9._-]+", "-", task.task_id).strip(".-_") or "task"
    own: dict[str, Any] = {"suite": suite, "split": each.split.value, "family": task.family}
    own |= {key: task.meta[key] for key in ("strategy", "operator") if key in task.meta}
    own |= {"deliverables": list(task.deliverables)} if task.deliverables else {}
    environment = task.environment.to_values()
    sections: dict[str, dict[str, Any]] = {
        "task": {
            "name": f"triplane/{name}",
            "description": f"Repair {each.repo}.",
            "keywords": ["python", "debugging"],
        },
        "metadata": {"category": "debugging"},
        "metadata.triplane": own,
        **(
            {"metadata.triplane.environment": {key: value for key, value in environment.items() if key != "ini"}}
            if environment
            else {}
        ),
        **({"metadata.triplane.environment.ini": environment["ini"]} if "ini" in environment else {}),
        "verifier": {"timeout_sec": max(VERIFIER_S, task.environment.timeout_s or 0.0)},
        "agent": {"timeout_sec": AGENT_S},
        "environment": {
            "build_timeout_sec": BUILD_S,
            "cpus": 1,
            "memory_mb": max(MEMORY_MB, task.environment.memory_mb or 0),
            "storage_mb": STORAGE_MB,
            "network_mode": "no-network",
            "workdir": WORKSPACE,
        },
    }
    text = f'schema_version = "{SCHEMA}"\n'
    for section, values in sections.items():
        text += f"\n[{section}]\n" + "".join(f"{_key(key)} = {_value(value)}\n" for key, value in values.items())
    return text


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    """A TOML value. JSON's strings, numbers and lists are TOML, except for the character DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
