"""Supervised training on named sources: exact counts, losses of each source, and a kill that changes no bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from test_trainer_demonstrations import other_demonstrations
from trainer_world import World

from contracts.artifacts import list_artifacts, open_artifact
from contracts.checkpoints import WEIGHTS
from trainer.config import MixtureSource, SftJob
from trainer.errors import TrainingConfigError
from trainer.metrics import Record
from trainer.order import Order, Source, apportion
from trainer.run import run_job

NAMES = ("copies", "few", "some")


def named(world: World, name: str, **config: Any) -> SftJob:
    """Three sources of 192, 5 and 20 rows with weights 1, 0.3 and 0.5."""
    more = [other_demonstrations(world, rows) for rows in (5, 20)]
    mixture = tuple(
        MixtureSource(demonstrations=each.ref, weight=weight) for each, weight in zip(more, (0.3, 0.5), strict=True)
    )
    return world.sft_job(name, **config).model_copy(update={"mixture": mixture, "sources": NAMES})


def records(world: World, job: SftJob) -> tuple[dict[str, Any], list[Record]]:
    result = run_job(job)
    assert result is not None
    made = open_artifact(world.store, result.checkpoint)
    return made.meta, [json.loads(line) for line in made.path("metrics.jsonl").read_text().splitlines()]


WEIGHTS_OF = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


@given(st.integers(0, 5000), WEIGHTS_OF)
def test_counts_follow_the_largest_remainders(total: int, weights: list[float]) -> None:
    found = apportion(total, weights)
    quotas = [Fraction(total) * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    assert sum(found) == total
    given_one = [number for number in range(len(found)) if found[number] == floor(quotas[number]) + 1]
    assert all(found[number] == floor(quotas[number]) for number in range(len(found)) if number not in given_one)
    least = min((quotas[number] % 1 for number in given_one), default=Fraction(1))
    assert all(quotas[number] % 1 <= least for number in range(len(found)) if number not in given_one)


def test_equal_weights_give_the_first_sources_one_row_more() -> None:
    assert apportion(8, [1, 1, 1]) == [3, 3, 2]
    assert apportion(10, [0.7, 0.2, 0.1]) == [7, 2, 1]


@given(WEIGHTS_OF, st.integers(1, 9), st.integers(1, 30), st.integers(0, 3))
def test_each_source_ends_at_its_count_and_is_read_in_whole_epochs(
    weights: list[float], size: int, steps: int, seed: int
) -> None:
    rows = [1 + number % 4 for number in range(len(weights))]
    starts = np.cumsum([0, *rows])
    counts = apportion(size * steps, weights)
    sources = [Source(int(starts[number]), rows[number], count) for number, count in enumerate(counts)]
    order = Order(sources, np.ones(sum(rows), np.int64), size, None, seed)
    if len(weights) == 1:
        return
    drawn = [row for _ in range(steps) for row in order.next()]
    assert order.drawn == counts
    for source, count in zip(sources, counts, strict=True):
        times = [drawn.count(source.first + row) for row in range(source.count)]
        assert sum(times) == count and max(times) - min(times) <= 1
    resumed = Order(sources, np.ones(sum(rows), np.int64), size, None, seed)
    resumed.drawn = [
        sum(source.first <= row < source.first + source.count for row in drawn[:size]) for source in sources
    ]
    assert [row for _ in range(steps - 1) for row in resumed.next()] == drawn[size:]


def test_a_run_trains_each_source_to_the_row_and_says_how_many_epochs_that_is(world: World) -> None:
    meta, _ = records(world, named(world, "counts", max_steps=7, batch_size=9))
    counts = apportion(63, [1.0, 0.3, 0.5])
    rows = (192, 5, 20)
    wanted = zip(NAMES, rows, counts, strict=True)
    assert meta["sources"] == {
        name: {"rows": count, "drawn": drawn, "epochs": drawn / count} for name, count, drawn in wanted
    }


def test_losses_of_the_sources_are_the_parts_of_the_loss(world: World) -> None:
    job = named(world, "losses", max_steps=3, evaluate_every=3, microbatch_tokens=64)
    _, found = records(world, job)
    sources = [job.demonstrations, *(each.demonstrations for each in job.mixture)]
    tables = [open_artifact(world.store, ref).table("train.parquet") for ref in sources]
    lengths = np.array([len(row) for table in tables for row in table["token_ids"].to_pylist()])
    scored = np.array([row.count(1) for table in tables for row in table["token_role"].to_pylist()])
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    counts = apportion(3 * 16, [1.0, 0.3, 0.5])
    places = [
        Source(int(start), table.num_rows, count) for start, table, count in zip(starts, tables, counts, strict=False)
    ]
    order = Order(places, lengths, job.config.batch_size, None, job.seed)
    for step in (row for row in found if "loss" in row):
        rows = np.array(order.next())
        owners = np.searchsorted(starts, rows, side="right") - 1
        whole = sum(step[f"loss/{name}"] * scored[rows[owners == number]].sum() for number, name in enumerate(NAMES))
        assert whole / scored[rows].sum() == pytest.approx(step["loss"], rel=1e-5)
    (looked,) = (row for row in found if "validation_loss" in row)
    assert looked["validation_loss/copies"] == looked["validation_loss"]
    # the other sources have the same rows for validation, all of them clean but the last ones
    assert looked["validation_loss/few"] == pytest.approx(looked["validation_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_is_killed_by_the_system_continues_with_the_same_rows(world: World) -> None:
    settings = {"max_steps": 12, "snapshot_every": 2, "evaluate_every": 6}
    undisturbed = run_job(named(world, "undisturbed", **settings))
    job = named(world, "killed", **settings)
    script = (
        "import os, signal, sys\nfrom trainer.config import parse_job\nfrom trainer.run import run_job\n"
        "import torch; torch.set_num_threads(1)\n"
        "run_job(parse_job(sys.argv[1]), [lambda row: row['step'] == 7 and os.kill(os.getpid(), signal.SIGKILL)])"
    )
    done = subprocess.run([sys.executable, "-c", script, job.model_dump_json()], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    held = [json.loads(each.path("state.json").read_text()) for each in list_artifacts(world.store, "trainer_snapshot")]
    drawn = max(sum(each["extra"]["drawn"]) for each in held)
    seen: list[Record] = []
    resumed = run_job(job, [seen.append])
    assert undisturbed is not None and resumed is not None
    assert 16 * (seen[0]["step"] - 1) == drawn > 0
    assert (resumed.checkpoint.digest, resumed.trainer_state.digest) == (
        undisturbed.checkpoint.digest,
        undisturbed.trainer_state.digest,
    )
    assert resumed.metrics["sources"] == undisturbed.metrics["sources"]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}])
def test_a_mixture_trains_an_existing_model_with_and_without_adapters(
    world: World, lora: dict[str, Any] | None
) -> None:
    base = run_job(world.sft_job("base", max_steps=2))
    assert base is not None
    start = {"checkpoint": base.checkpoint, "trainer_state": base.trainer_state, "lora": lora}
    job = named(world, f"start-{bool(lora)}", max_steps=4)
    found = run_job(SftJob.model_validate(job.model_dump() | start))
    assert found is not None
    made, before = (open_artifact(world.store, each.checkpoint) for each in (found, base))
    assert (made.path(WEIGHTS).read_bytes() == before.path(WEIGHTS).read_bytes()) == bool(lora)
    assert ("adapter/adapter_config.json" in made.names()) == bool(lora)
    parents = made.manifest.parents
    assert parents["checkpoint"] == base.checkpoint
    refs = [parents[role] for role in ("demonstrations", "mixture few", "mixture some")]
    assert refs == [job.demonstrations, *(each.demonstrations for each in job.mixture)]
    assert made.manifest.config["mixture"] == {"copies": 1.0, "few": 0.3, "some": 0.5}
    assert torch.get_num_threads() == 1


def test_a_source_that_would_get_no_row_is_refused(world: World) -> None:
    job = named(world, "little", max_steps=1, batch_size=2)
    with pytest.raises(TrainingConfigError, match="source few gets none of the 2 rows of all steps: raise its weight"):
        run_job(job)


def test_names_of_sources_must_fit_them(world: World) -> None:
    job = named(world, "names").model_dump()
    for names in (("a", "b"), ("a", "b", "b")):
        with pytest.raises(ValidationError, match="give each of the 3 a name of its own"):
            SftJob.model_validate(job | {"sources": names})
    assert "sources" not in world.sft_job().model_dump(), "jobs without names keep their keys"
