"""Takes a finished laboratory, undoes its last steps in a copy, spoils what they read, and runs the command that makes
them again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contracts.artifacts import list_artifacts
from tests.acceptance.laboratory import ROOT, Laboratory
from triplane_dagster.cli.app import app

STEPS = (
    "iteration_inputs",
    "prompts",
    "rollout_plan",
    "group",
    "rollouts",
    "rewards",
    "dataset",
    "checkpoint",
    "evaluation_run",
    "evaluation",
    "sampler",
    "report",
)
"""Kinds of artifacts of an iteration, in the order in which they are made."""
BEHIND = {"checkpoint": ("trainer_state",)}


@contextmanager
def inside(laboratory: Laboratory) -> Iterator[None]:
    """This process as one that a shell in the laboratory's folder would start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(laboratory.folder)
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
        patch.setenv("TRIPLANE_DEBUG", "")
        for name in ("TRIPLANE_STORE", "DAGSTER_HOME"):
            patch.delenv(name, raising=False)
        for name, value in laboratory.environment.items():
            patch.setenv(name, value)
        yield


def iterate(laboratory: Laboratory, *more: str) -> subprocess.CompletedProcess[str]:
    """`triplane iterate -n 1` in this process."""
    return run(laboratory, "iterate", *laboratory.settings, "-n", "1", *more)


def run(laboratory: Laboratory, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in this process: quicker than one of its own."""
    with inside(laboratory):
        done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(list(arguments), done.exit_code, done.stdout, done.stderr)


def copy_of(finished: Laboratory, folder: Path, redo: str) -> Laboratory:
    """A copy of its store and records in which the last iteration has to be made again from `redo` (of STEPS) on."""
    shutil.copytree(finished.folder / ".triplane", folder / ".triplane")
    copied = Laboratory(folder, finished.experiment_file, finished.overrides)
    store = folder / ".triplane" / "store"
    trained = [
        each.ref.key for each in list_artifacts(copied.store, "checkpoint") if "dataset" in each.manifest.parents
    ]
    for kind in STEPS[STEPS.index(redo) :]:
        for each in (kind, *BEHIND.get(kind, ())):
            for place in (store / "artifacts" / each).glob("*"):
                if kind != "checkpoint" or place.name in trained:
                    shutil.rmtree(place)
    for pointer in ("assets/tiny/sampler", "assets/tiny/report", "live/tiny"):
        shutil.rmtree(store / "pointers" / pointer, ignore_errors=True)
    return copied


def file_of(laboratory: Laboratory, kind: str, name: str) -> Path:
    """The file `name` of the first artifact of a kind, in the store itself."""
    artifact = next(iter(list_artifacts(laboratory.store, kind)))
    folder = laboratory.folder / ".triplane" / "store" / artifact.ref.uri
    return folder / (name if name == "manifest.json" else f"{artifact.manifest.attempt}/{name}")


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Put other bytes in a file's place."""
    data = change(path.read_bytes())
    path.unlink()
    path.write_bytes(data)


def cut(data: bytes) -> bytes:
    """The first half."""
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """One bit of one byte changed."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def reseal(laboratory: Laboratory, kind: str) -> None:
    """Make the manifest of a kind's first artifact agree with its files, as if it had been committed so."""
    manifest = file_of(laboratory, kind, "manifest.json")
    values = json.loads(manifest.read_bytes())
    for entry in values["files"]:
        data = (manifest.parent / values["attempt"] / entry["path"]).read_bytes()
        entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(manifest, lambda _: json.dumps(values).encode())


def contents(laboratory: Laboratory) -> Mapping[str, str]:
    """Checksum of every file of every artifact."""
    store = laboratory.folder / ".triplane" / "store" / "artifacts"
    found = [Path(place, name) for place, _, files in os.walk(store) for name in files]
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def assert_one_line(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """It failed, and its last line, the only one that is not of progress, is an error with these words."""
    assert done.returncode not in (0, None), done.stdout
    lines = done.stderr.strip().splitlines()
    assert lines and lines[-1].startswith("error: "), done.stderr
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], done.stderr
    assert "Traceback" not in done.stderr and "Traceback" not in done.stdout, done.stderr
    for each in said:
        assert each in lines[-1], lines[-1]
