"""Steps in processes of their own make the same artifacts as steps in one process; `dg` reads the project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from contracts.store import open_store
from ops.graph import ONCE, PER_ITERATION
from resources.experiment import Experiment
from resources.refs import read_ref
from tests.otlp import collecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
REPOSITORY = Path(__file__).parents[2]


def test_steps_in_processes_of_their_own_make_the_same_artifacts_and_one_trace_of_a_run(
    tiny: Experiment, untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(monkeypatch) as found:
        _run_in_processes(tiny, untouched, tmp_path)
        runs = [span for span in found.spans if not span.parent_span_id]
        assert [span.name for span in runs] == [f"run {tiny.name}_base", f"run {tiny.name}_iteration"]
        assert not found.orphans() and len({span.trace_id for span in found.spans}) == 2
        step = f"step {tiny.name}"
        paths = {tuple(found.path(span)) for span in found.spans}
        iteration = f"run {tiny.name}_iteration"
        assert (iteration, f"{step}_rollouts_shard", "group", "episode", "turn", "text_completion") in paths
        assert (iteration, f"{step}__rewards", "reward", "grade") in paths
        assert (iteration, f"{step}__checkpoint", "train", "forward_backward") in paths
        assert (iteration, f"{step}__evaluation", "group", "episode", "turn", "text_completion") in paths


def _run_in_processes(tiny: Experiment, untouched: Path, tmp_path: Path) -> None:
    name = tiny.name
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        instance.add_dynamic_partitions(name, ["0000"])
    place = {
        **os.environ,
        "TRIPLANE_EXECUTOR": "multiprocess",
        "TRIPLANE_EXPERIMENTS": str(Path(__file__).parent),
        "TRIPLANE_STORE": str(tmp_path / "store"),
        "DAGSTER_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    for job, tags in ((f"{name}_base", {}), (f"{name}_iteration", {"dagster/partition": "0000"})):
        dagster = [sys.executable, "-m", "dagster", "job", "execute", "-m", "triplane_dagster.definitions"]
        done = subprocess.run(
            [*dagster, "-j", job, "--tags", json.dumps(tags)],
            cwd=REPOSITORY,
            env=place,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert "Launching subprocess" in done.stderr, "the steps ran in other processes"
    store, in_one_process = open_store(str(tmp_path / "store")), open_store(str(untouched))
    for asset in (*ONCE, *PER_ITERATION):
        key = None if asset in ONCE else "0000"
        assert read_ref(store, name, asset, key) == read_ref(in_one_process, name, asset, key), asset


def test_dg_checks_and_lists_the_definitions_from_the_root() -> None:
    dg_command = str(Path(sys.executable).with_name("dg"))
    for arguments in (["check", "defs"], ["list", "defs", "--json"]):
        done = subprocess.run(
            [dg_command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    listed = done.stdout
    assert '"quickstart/sampler"' in listed and '"quickstart_train"' in listed and '"quickstart_nightly"' in listed
