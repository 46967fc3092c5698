"""Containers of one node share its boot and have pids of their own: nobody takes a living process of another one for
dead. Two namespaces made by unshare(1) stand for two pods.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contracts.owned import fate_of_owner, owned_name
from contracts.processes import boot_id, start_of
from inference.rollouts.claims import _is_dead as claimant_is_dead
from inference.rollouts.claims import this_process
from triplane_dagster.dead_runs import is_dead, process_name

ROOT = Path(__file__).parents[2]
POD = [
    "unshare",
    "--fork",
    "--kill-child",
    "--pid",
    "--mount-proc",
    *(["--user", "--map-root-user"] if os.getuid() else []),
]
IMPORTS = """
import json, os, sys, time
from pathlib import Path
from contracts.owned import fate_of_owner, owned_name, sweep_abandoned
from inference.rollouts.claims import _is_dead as claimant_is_dead, this_process
from triplane_dagster.dead_runs import is_dead, process_name
"""
OWNER = (
    IMPORTS
    + """
folder = Path(sys.argv[1])
staging = folder / f"stage-{owned_name()}"
staging.mkdir()
words = [str(os.getpid()), staging.name, process_name(os.getpid()), json.dumps(this_process())]
(folder / "owner.tmp").write_text("\\n".join(words))
os.rename(folder / "owner.tmp", folder / "owner")
time.sleep(600)
"""
)
SWEEPER = (
    IMPORTS
    + """
folder = Path(sys.argv[1])
_, staging, run, claimant = (folder / "owner").read_text().split("\\n")
sweep_abandoned(folder, "stage-")
verdicts = is_dead(run), claimant_is_dead(json.loads(claimant))
print(fate_of_owner(staging, "stage-"), *verdicts, (folder / staging).is_dir())
"""
)


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", script, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernels"}


@contextmanager
def owner_in_a_pod(folder: Path) -> Iterator[list[str]]:
    """A living process in a pid namespace of its own; yields its words."""
    child = subprocess.Popen([*POD, *python(OWNER, str(folder))], env=environment(), cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "owner").exists():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield (folder / "owner").read_text().split("\n")
    finally:
        child.kill()
        child.wait()


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if subprocess.run([*POD, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no pid namespaces")


def test_a_living_process_of_another_pod_is_never_taken_for_dead(tmp_path: Path) -> None:
    with owner_in_a_pod(tmp_path) as (pid, *_):
        assert pid == "1", "its pid means another process elsewhere"
        for where in (POD, []):  # in a sibling, and in the namespace that both came from
            said = subprocess.run(
                [*where, *python(SWEEPER, str(tmp_path))],
                env=environment(),
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            )
            assert said.stdout.split() == ["unknown", "False", "False", "True"]


def test_a_dead_process_of_this_pod_is_known_to_be_dead() -> None:
    child = subprocess.Popen(
        python(
            "import json, os, sys; from contracts.owned import owned_name;"
            "from inference.rollouts.claims import this_process; from triplane_dagster.dead_runs import process_name;"
            "print(json.dumps([owned_name(), process_name(os.getpid()), this_process()]), flush=True); sys.stdin.read()"
        ),
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    name, run, claimant = json.loads(child.stdout.readline())
    assert (fate_of_owner(name), is_dead(run), claimant_is_dead(claimant)) == ("alive", False, False)
    child.communicate("")
    assert (fate_of_owner(name), is_dead(run), claimant_is_dead(claimant)) == ("gone", True, True)


def test_names_of_earlier_versions_are_still_understood() -> None:
    machine, pid, start, _ = owned_name().split(".")
    assert len(machine) == 12
    assert fate_of_owner(f"{machine[:6]}.{pid}.{start}.abcdef") == "alive"
    assert fate_of_owner(f"{machine[:6]}.{pid}.1.abcdef") == "gone"
    assert fate_of_owner(f"{machine[:8]}.{pid}.1.abcdef") == "unknown"
    mine = process_name(os.getpid())
    assert mine is not None
    host = mine.split("/")[0]
    assert not is_dead(f"{host}/{boot_id()}/{os.getpid()}/{start_of(os.getpid())}")
    assert is_dead(f"{host}/{boot_id()}/{os.getpid()}/1")


def test_what_ran_elsewhere_is_not_judged() -> None:
    mine = process_name(os.getpid())
    assert mine is not None
    host, machine, pid, _ = mine.split("/")
    assert not is_dead(f"other-{host}/{machine}/{pid}/1")
    assert not is_dead(f"{host}/{machine}1/{pid}/1"), "another pid namespace of this boot"
    assert is_dead(f"{host}/an-earlier-boot/{pid}/1"), "this machine was restarted"
    assert not is_dead("") and not is_dead("a/b")
    assert not claimant_is_dead({**this_process(), "machine": "elsewhere", "started": "1"})
