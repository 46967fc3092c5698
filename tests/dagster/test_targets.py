"""What a sequence of iterations set out to do survives a kill at any instant, and is not done twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from contracts.artifacts import ArtifactRef
from contracts.store import Store, open_store
from resources.experiment import Experiment
from resources.refs import write_ref
from triplane_dagster.targets import Target, begin_target, decided_target, end_target, request_target


def decide(store: Store, experiment: Experiment, iteration: str) -> None:
    """Let an iteration have come to a decision."""
    write_ref(store, experiment.name, "sampler", iteration, ArtifactRef(kind="sampler", key="0" * 64, digest="0" * 64))


def test_command_killed_after_its_last_decision_adds_no_iteration(tiny: Experiment, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    target = begin_target(store, tiny, 2)
    assert target == Target(first=0, count=2) and decided_target(store, tiny) is None
    for iteration in target.iterations():
        assert begin_target(store, tiny, 2) == target
        decide(store, tiny, iteration)
    assert begin_target(store, tiny, 2) == decided_target(store, tiny) == target
    end_target(store, tiny, target)
    assert decided_target(store, tiny) is None
    assert begin_target(store, tiny, 2) == Target(first=2, count=2)


def test_another_number_of_iterations_is_another_target(tiny: Experiment, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    begin_target(store, tiny, 2)
    decide(store, tiny, "0000")
    assert begin_target(store, tiny, 3) == Target(first=1, count=3)


def test_an_end_in_the_future_refuses_no_request(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = open_store(str(tmp_path)), time.time()
    target = begin_target(store, tiny, 1)
    decide(store, tiny, "0000")
    with monkeypatch.context() as ahead:
        ahead.setattr("triplane_dagster.targets.time.time", lambda: now + 30 * 86400)  # corrected since
        end_target(store, tiny, target)
    assert request_target(store, tiny, 1, request="again", asked_unix=now).first == 1
