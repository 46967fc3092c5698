"""An edited setting changes the code version, and so Dagster's staleness, of the steps whose action key it changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus  # what the asset page shows
from dagster._core.loader import LoadingContextForTest
from dagster_world import World
from test_keys import all_keys, ref

from assets import experiment_assets
from contracts.store import Store, open_store
from ops.graph import GRAPH, PER_ITERATION
from ops.readings import readings_of
from resources.errors import ExperimentError
from resources.experiment import Experiment, load_experiment
from triplane_dagster.assembly import definitions_for

pytestmark = pytest.mark.slow

TINY = Path(__file__).parent / "tiny.yaml"


def settings(found: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool | int | float]]:
    """Every number and switch of an experiment, by dotted path."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from settings(value, f"{path}{name}.")
        elif isinstance(value, bool | int | float):
            yield f"{path}{name}", value


def edited(value: bool | int | float, random: Random) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + random.choice((1, 2, 8))
    return value * random.choice((0.5, 0.9, 1.1)) if value else random.choice((0.01, 0.1))


def versions(experiment: Experiment) -> dict[str, str | None]:
    return {asset.key.path[1]: dict(asset.code_versions_by_key)[asset.key] for asset in experiment_assets(experiment)}


def keys(experiment: Experiment, store: Store) -> dict[str, tuple[str | None, ...]]:
    """Each step's own key with equal inputs, and those of the parts that it makes itself."""
    found = all_keys(experiment, store)
    runs = [each.work(store, experiment, ref("policy"), ref("suite")).key for each in readings_of(experiment)]
    parts = {"base_policy": [found["tokenizer"], found["demonstrations"]], "evaluation": runs}
    return {spec.name: (found[spec.name], *parts.get(spec.name, ())) for spec in GRAPH}


@pytest.mark.parametrize("seed", range(3))
def test_an_edited_setting_changes_the_code_versions_of_the_steps_whose_keys_it_changes(
    seed: int, tmp_path: Path
) -> None:
    random, store, moved = Random(seed), open_store(str(tmp_path)), set[str]()
    before = load_experiment(TINY)
    old_keys, old_versions = keys(before, store), versions(before)
    neutral = 0
    for path, value in settings(before.model_dump(mode="json")):
        try:
            after = load_experiment(TINY, [f"{path}={json.dumps(edited(value, random))}"])
        except ExperimentError:  # out of the setting's bounds
            continue
        new_keys, new_versions = keys(after, store), versions(after)
        changed = {step for step in old_keys if old_keys[step] != new_keys[step]}
        assert {step for step in old_versions if old_versions[step] != new_versions[step]} == changed, path
        moved, neutral = moved | changed, neutral + (not changed)
    assert moved == {spec.name for spec in GRAPH} - {"iteration_inputs", "reward_flips", "report"}
    assert neutral > 5


def test_code_versions_read_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    before = versions(load_experiment(TINY))
    monkeypatch.setenv("TRIPLANE_STORE", "s3://no-such-bucket-of-ours/here")
    assert versions(load_experiment(TINY)) == before
    assert not (tmp_path / "store").exists()
    assert all(version and len(version.rpartition("-")[2]) == 12 for version in before.values())


def staleness(experiment: Experiment, instance: dg.DagsterInstance, partition: str) -> dict[str, tuple[str, ...]]:
    """Root causes of each stale asset of an iteration and of the base; none for a fresh one."""
    graph = definitions_for([experiment]).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    found = {}
    for key in graph.get_all_asset_keys():
        place = partition if key.path[1] in PER_ITERATION else None
        status = resolver.get_status(key, place)
        causes = tuple(sorted(cause.key.asset_key.path[1] for cause in resolver.get_stale_root_causes(key, place)))
        assert status is (StaleStatus.STALE if causes else StaleStatus.FRESH), key
        if causes:
            found[key.path[1]] = causes
    return found


@pytest.mark.parametrize(
    ("override", "stale"),
    [
        ("engine.threads=2", ()),
        ("promotion.on_refusal=stop", ()),
        ("dataset.max_tokens=500", ("dataset",)),
        ("trainer.learning_rate=0.5", ("checkpoint",)),
        ("evaluation.held_out_samples=3", ("evaluation",)),
        ("base.demonstrations.count=65", ("base_policy",)),
        ("seed=4", ("base_policy", "prompts", "rollouts", "checkpoint", "evaluation")),
    ],
)
def test_an_edited_file_makes_its_assets_stale_and_leaves_the_others_fresh(
    ran: World, override: str, stale: tuple[str, ...]
) -> None:
    found = staleness(load_experiment(TINY, [override]), ran.instance, ran.made[-1])
    assert found == {step: (step,) for step in stale}
