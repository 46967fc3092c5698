"""`triplane store check` and `gc`, as an operator types them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from contracts.artifacts import ArtifactWriter
from contracts.store import LocalStore
from triplane_dagster.cli.app import app

Command = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    found = LocalStore(tmp_path / "store")
    with ArtifactWriter(found, "thing", "a" * 64, parents={}, config={}, code_version="1") as out:
        out.add_bytes("data.bin", b"honest")
        out.commit()
    return found


@pytest.fixture
def triplane(store: LocalStore) -> Command:
    return lambda *arguments: CliRunner().invoke(app, arguments, env={"TRIPLANE_STORE": store.url, "COLUMNS": "250"})


def test_check_reports_an_intact_store(triplane: Command, store: LocalStore) -> None:
    done = triplane("store", "check")
    assert done.exit_code == 0 and done.stdout == "1 artifacts, 1 files: all as committed\n"
    assert json.loads(triplane("store", "check", "--json").stdout) == {
        "store": store.url,
        "artifacts": 1,
        "files": 1,
        "size": 6,
        "faults": [],
    }


def test_check_lists_damage_and_exits_with_one_line(triplane: Command, store: LocalStore) -> None:
    (key,) = (key for key in store.list("artifacts/") if key.endswith("data.bin"))
    store.local_path(key).chmod(0o644)
    store.local_path(key).write_bytes(b"forged")
    done = triplane("store", "check")
    assert done.exit_code == 1
    assert key in done.stdout and "has other bytes than were committed" in done.stdout
    assert (
        done.stderr.startswith(f"error: 1 damaged or missing files in {store.url}: ")
        and len(done.stderr.splitlines()) == 1
    )


def test_gc_dry_run_lists_garbage_before_it_is_removed(triplane: Command, store: LocalStore) -> None:
    assert triplane("store", "gc").stdout == f"nothing to remove in {store.url}\n"
    (store.scratch / "stage-000000.1.1.x").mkdir()
    (path,) = store.scratch.iterdir()
    os.utime(path, (0, 0))
    planned = triplane("store", "gc", "--dry-run")
    assert "staging" in planned.stdout and planned.stdout.endswith("0.0 MB would be removed\n") and path.exists()
    (row,) = json.loads(triplane("store", "gc", "--json").stdout)
    assert (row["what"], row["place"]) == ("staging", str(path)) and not path.exists()


def test_gc_keeps_young_attempts_and_removes_old_ones(triplane: Command, store: LocalStore) -> None:
    kept = store.list("")
    store.create(f"artifacts/thing/{'a' * 64}/loser/data.bin", bytes(2_000_000))
    path, then = store.local_path(f"artifacts/thing/{'a' * 64}/loser/data.bin"), time.time() - 3 * 3600
    os.utime(path, (then, then))
    assert "nothing to remove" in triplane("store", "gc").stdout
    done = triplane("store", "gc", "--older-than", "2")
    assert done.exit_code == 0 and done.stdout.endswith("2.0 MB removed\n")
    assert store.list("") == kept
