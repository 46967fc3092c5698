"""envd as its container holds it: the files and packages of its image, an ordinary user, no capability, and the seccomp
profile of deploy/.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

from tests.deploy.compose import DOCKERFILE, ROOT, services
from tests.envd.harness import closed_above

pytestmark = pytest.mark.slow
UID = 10001
START_S = 120.0

CONFINED = """
import json, os, pyseccomp, sys
profile = json.loads(sys.argv[1])
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
for rule in profile["syscalls"]:
    for name in rule["names"]:
        rules.add_rule(pyseccomp.ERRNO(rule["errnoRet"]), name)
rules.load()
os.execv(sys.argv[2], sys.argv[2:])
"""


def packages(lines: list[str]) -> set[str]:
    """The distributions that these requirements bring, with what those require."""
    found: set[str] = set()
    wanted = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    while wanted:
        each = wanted.pop()
        if each.name not in found and (each.marker is None or each.marker.evaluate({"extra": ""})):
            found.add(each.name)
            wanted += [Requirement(line) for line in metadata.requires(each.name) or []]
    return found


def interpreter() -> str:
    """A Python of this version that an ordinary user may run, and that brings none of our packages."""
    for path in (sys._base_executable, f"/usr/bin/python3.{sys.version_info.minor}"):  # type: ignore[attr-defined]
        command = [path, "-c", f"import sys; print(sys.version_info[:2] == {tuple(sys.version_info[:2])})"]
        try:
            done = subprocess.run(command, user=UID if os.geteuid() == 0 else None, capture_output=True, cwd="/")
        except OSError:
            continue
        if done.stdout == b"True\n":
            return path
    pytest.skip("no Python of this version that an ordinary user may run")


@pytest.fixture
def image() -> Iterator[Path]:
    """/app of the image, and its site-packages, in a folder that an ordinary user can read."""
    if closed_above(ROOT / "deploy"):
        pytest.skip("another user can't read the checkout")
    folder = Path(tempfile.mkdtemp(prefix="triplane-image-"))
    (folder / "app").mkdir()
    stage = ""
    for step in DockerfileParser(fileobj=DOCKERFILE.open("rb")).structure:
        if step["instruction"] == "FROM":
            stage = step["value"].rpartition(" AS ")[2]
        elif step["instruction"] == "COPY" and stage == "envd":
            *sources, target = step["value"].split()
            if target.startswith("/"):  # a program, which the machine has or lacks
                continue
            if sources[0].startswith("--from="):
                sources = [source.removeprefix("/app/") for source in sources[1:]]
            for source in sources:
                copy(ROOT / source, folder / "app" / (target if len(sources) == 1 else Path(target, source)))
    for name in packages((ROOT / "deploy" / "envd-requirements.txt").read_text().splitlines()) | {"pyseccomp"}:
        about = metadata.distribution(name)
        for file in about.files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                copy(Path(str(about.locate_file(file))), folder / "packages" / file)
    (folder / "run").mkdir()
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder / "run", UID, UID)
    yield folder
    shutil.rmtree(folder)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "backend",
    ["namespaces", pytest.param("gvisor", marks=pytest.mark.skipif(not shutil.which("runsc"), reason="no runsc"))],
)
def test_sandboxes_run_without_any_privilege(image: Path, backend: str) -> None:
    service, python = services({})["envd"], interpreter()
    address = f"unix:{image}/run/envd.sock"
    places = {"unix:/run/envd/envd.sock": address, "namespaces": backend}
    command = [places.get(word, word) for word in service.command[1:]]
    check = [places.get(word, word) for word in service.healthcheck[1:]]
    assert service.command[0] == service.healthcheck[0] == "python" and address in command and address in check
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(image / "run"),
        "TMPDIR": str(image / "run"),
        "PYTHONPATH": f"{image}/app:{image}/packages",
    }
    dropped = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
    if os.geteuid() == 0:
        dropped += ["--reuid", str(UID), "--regid", str(UID), "--clear-groups"]
    else:
        dropped = ["setpriv", "--no-new-privs"]
    profile = json.loads((ROOT / "deploy" / "envd-seccomp.json").read_text())
    if backend == "gvisor":  # traces the code under its own kernel, see docs/sandboxes-gvisor.md
        profile["syscalls"] = [
            {**rule, "names": [name for name in rule["names"] if name != "ptrace"]} for rule in profile["syscalls"]
        ]
    confined = [*dropped, python, "-c", CONFINED, json.dumps(profile), python, *command]
    with (image / "run" / "log").open("wb") as log:
        server = subprocess.Popen(confined, cwd=image / "app", env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while True:
            health = subprocess.run(
                [python, *check], cwd=image / "app", env=environment, capture_output=True, text=True
            )
            if health.returncode == 0:
                break
            words = (image / "run" / "log").read_text()
            assert server.poll() is None and time.monotonic() < deadline, words + health.stderr
        assert health.stdout.startswith(f"{backend}, isolates: True"), "envd probed a sandbox before it answered"
        status = Path(f"/proc/{server.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status and "Seccomp:\t2" in status and "NoNewPrivs:\t1" in status
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    assert [path.name for path in (image / "run").iterdir()] == ["log"], "it leaves nothing behind"
