"""The process that samples ahead reports what it sampled, whatever becomes of the display."""

from __future__ import annotations

import io
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from rich.console import Console

from resources.experiment import load_experiment
from resources.progress import Progress
from triplane_dagster import ahead

TINY = Path(__file__).parent / "tiny.yaml"


def sample(experiment: Any, ref: Any, theirs: Connection) -> None:
    """Body of a sampling process that has each iteration at once and reports progress before."""
    while True:
        partition = theirs.recv()
        for done in range(2):
            theirs.send(Progress("rollouts", partition, "episodes", done, 2))
        theirs.send({partition: None})


@pytest.mark.slow
def test_closed_display_does_not_stop_the_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_sample", sample)
    monkeypatch.setattr(ahead, "has_ref", lambda *_: False)
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    reader, writer = os.pipe()
    os.close(reader)
    with (
        dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
        (tmp_path / "stdout").open("w") as stdout,
        os.fdopen(writer, "wb", 0) as raw,
    ):
        monkeypatch.setattr(sys, "stdout", stdout)  # rich closes it, too
        display = Console(file=io.TextIOWrapper(raw, write_through=True))
        experiment = load_experiment(TINY, ["off_policy.overlap=true"])
        with ahead.sampling_ahead(experiment, ["0000", "0001"], instance, display.print) as sampling:
            assert sampling is not None
            for partition in ("0000", "0001"):
                sampling.wait_for(partition)
