"""What `triplane gc` removes is needed by no iteration, no policy and no question."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster_world import World
from pinning import commit, decide, make_base, pin, sample
from typer.testing import CliRunner

from contracts.artifacts import ArtifactRef, ArtifactWriter, find_artifact, list_artifacts, open_artifact
from contracts.digests import digest_of
from contracts.store import Store, open_store
from contracts.upkeep import find_garbage
from ops.inputs import trainer_state_of
from ops.ledger.index import rebuild
from ops.ledger.recall import Recall, recall
from ops.retention import SNAPSHOT_S, iteration_bytes, removable, remove
from ops.rollback import plan_rollback
from resources.errors import RegistryError
from resources.experiment import Experiment, OffPolicyConfig
from resources.refs import require_ref, write_ref
from resources.registry import Registry
from triplane_dagster.cli.app import app
from triplane_dagster.iterations import decision_of, next_partition
from triplane_dagster.run import open_runner

ANY_AGE = -60.0


@pytest.fixture
def mine(
    ran: World, untouched: Path, blank_dagster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A copy of the store after two iterations, and an instance that knows nothing of them."""
    shutil.copytree(untouched, tmp_path / "store")
    shutil.copytree(blank_dagster, tmp_path / "dagster")
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        yield World(ran.experiment, open_store(), instance, ran.made)


def refs(store: Store) -> set[ArtifactRef]:
    return {each.ref for each in list_artifacts(store) if each.ref.kind != "ledger"}


def answer(store: Store) -> Recall:
    rollouts = open_artifact(store, require_ref(store, "tiny", "rollouts", "0000"))
    return recall(store, "task", rollouts.table("episodes.parquet", ["task_id"])["task_id"][0].as_py())


@pytest.mark.slow
def test_an_iteration_and_every_question_go_on_after_gc(mine: World) -> None:
    store, live = mine.store, Registry(mine.store, "tiny").live()
    before, asked = refs(store), answer(store)
    found = removable(store, 1, ANY_AGE)
    assert refs(store) == before and "group" in {each.ref.kind for each in found} <= {"group", "trainer_state"}
    for each in found:
        remove(store, each)
    assert refs(store) == before - {each.ref for each in found} and not removable(store, 1, ANY_AGE)
    assert live is not None and find_artifact(store, "trainer_state", live.policy.key)
    assert trainer_state_of(store, require_ref(store, "tiny", "base_policy"))
    assert plan_rollback(store, "tiny", "base").target.iteration == "base"
    assert answer(store) == asked
    rebuild(store)
    assert answer(store) == asked
    rollouts, dataset = (require_ref(store, "tiny", asset, "0001") for asset in ("rollouts", "dataset"))
    with open_runner(mine.experiment, mine.instance) as runner:
        following = next_partition(store, mine.experiment)
        runner.iteration(following)
        assert decision_of(store, mine.experiment, following) is not None
        runner.assets("0001", ["rollouts", "rewards", "dataset"])
    assert require_ref(store, "tiny", "rollouts", "0001") == rollouts, "nothing is sampled again"
    assert require_ref(store, "tiny", "dataset", "0001") == dataset


def test_what_is_young_or_among_the_last_iterations_stays(mine: World) -> None:
    assert removable(mine.store, 1, 3600.0) == []
    kept = {each.ref for each in removable(mine.store, 99, ANY_AGE)}
    assert kept == {each.ref for each in list_artifacts(mine.store, "group")}, "all groups are merged"


def test_the_states_of_undecided_iterations_stay(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap, the candidate of one iteration is evaluated while the next one is sampled."""
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    store, ahead = open_store(), tiny.model_copy(update={"off_policy": OffPolicyConfig(overlap=True)})
    make_base(store, ahead)
    commit(store, "trainer_state", "c" * 64)
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        pin(ahead, instance, "0000")
        sample(store, ahead, "0000")
        write_ref(store, ahead.name, "checkpoint", "0000", commit(store, "checkpoint", "c" * 64).ref)
        pin(ahead, instance, "0001")
        assert removable(store, 1, ANY_AGE) == []
        for iteration in ("0000", "0001"):
            decide(store, ahead, iteration, "refused")
        assert [each.ref.key for each in removable(store, 1, ANY_AGE)] == ["c" * 64]


def test_the_previous_policy_and_a_training_that_a_kill_left_unnamed_stay(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    store = open_store()
    make_base(store, tiny)
    live = require_ref(store, tiny.name, "base_policy")
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        for number, verdict in enumerate(("live", "live", "live", "refused", None)):
            iteration, key = f"{number:04}", str(number) * 64
            pin(tiny, instance, iteration)
            sample(store, tiny, iteration)
            dataset = require_ref(store, tiny.name, "dataset", iteration)
            state = commit(store, "trainer_state", key, dataset=dataset).ref
            candidate = commit(store, "checkpoint", key, dataset=dataset).ref
            if verdict is None:
                break  # killed after the training was committed
            write_ref(store, tiny.name, "checkpoint", iteration, candidate)
            if verdict == "live":
                parent = live.digest
                assert Registry(store, tiny.name).promote(candidate, state, parent=parent, iteration=iteration)
                live = candidate
            decide(store, tiny, iteration, verdict, candidate.digest)
    assert {each.ref.key[0] for each in removable(store, 1, ANY_AGE)} == {"0", "3"}
    assert plan_rollback(store, tiny.name, None).target.iteration == "0001"
    for each in removable(store, 1, ANY_AGE):
        remove(store, each)
    with pytest.raises(RegistryError, match=r"state is gone .* choose another one of `triplane rollback -e tiny"):
        plan_rollback(store, tiny.name, "1")


def test_snapshots_of_trainings_that_nobody_continues_go_after_a_week(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    store = open_store()
    make_base(store, tiny)

    def interrupt(**inputs: str) -> str:
        config = {"job": digest_of(inputs), "inputs": inputs}
        with ArtifactWriter(
            store, "trainer_snapshot", digest_of(config), parents={}, config=config, code_version="1"
        ) as out:
            out.add_json("state.json", {})
            return out.commit().ref.key

    def removed() -> set[str]:
        return {each.ref.key for each in removable(store, 1, ANY_AGE)}

    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        pin(tiny, instance, "0000")
    sample(store, tiny, "0000")
    dataset = require_ref(store, tiny.name, "dataset", "0000")
    warm_start, earlier, current = (
        interrupt(tokenizer="1"),
        interrupt(dataset="2" * 64),
        interrupt(dataset=dataset.digest),
    )
    assert removed() == set(), "somebody may continue a training that no iteration knows of"
    in_a_week = time.time() + SNAPSHOT_S
    monkeypatch.setattr("ops.retention.time.time", lambda: in_a_week)
    assert removed() == {earlier}, "0000 trains"
    assert removable(store, 1, SNAPSHOT_S + 3600.0) == []
    write_ref(store, tiny.name, "checkpoint", "0000", commit(store, "checkpoint", "c" * 64, dataset=dataset).ref)
    decide(store, tiny, "0000")
    assert removed() == {earlier, current} and warm_start not in removed()
    write_ref(store, tiny.name, "dataset", "0000", commit(store, "dataset", "d" * 64).ref)
    again = interrupt(dataset=require_ref(store, tiny.name, "dataset", "0000").digest)
    assert again not in removed(), "it is trained again"


def test_files_that_a_killed_gc_leaves_are_found_by_the_next_one(mine: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledError(BaseException):
        """Stands for kill -9 between two calls."""

    def kill(prefix: str) -> None:
        raise KilledError

    found = removable(mine.store, 1, ANY_AGE)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(mine.store, "discard", kill)  # the manifest is gone, the files are not
        remove(mine.store, found[0])
    assert removable(mine.store, 1, ANY_AGE) == found[1:]
    assert any(found[0].ref.key in each.place for each in find_garbage(mine.store, ANY_AGE))


def test_the_command_changes_nothing_without_yes(mine: World) -> None:
    before = refs(mine.store)
    done = CliRunner().invoke(app, ["gc", "--keep-last", "1", "--json"])
    assert done.exit_code == 0 and not json.loads(done.stdout)["removed"] and refs(mine.store) == before
    said = CliRunner().invoke(app, ["gc", "--keep-last", "1"]).stdout
    assert "nothing to remove" in said and "what was made within 24 hours (--older-than) was kept" in said
    assert CliRunner().invoke(app, ["gc", "--keep-last", "0"]).exit_code != 0


def test_status_foretells_a_full_disk(mine: World, monkeypatch: pytest.MonkeyPatch) -> None:
    size = iteration_bytes(mine.store, "tiny")
    assert size is not None and size > 1e6
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4.5 * size))
    done = CliRunner().invoke(app, ["status", "-e", "tiny"], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "has room for 4 more iterations of tiny" in done.stderr
    assert json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)[0]["disk"]["iterations_left"] == 4
