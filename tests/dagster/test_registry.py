from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contracts.artifacts import ArtifactRef
from contracts.store import open_store
from resources.errors import NotMaterialized
from resources.experiment import Experiment
from resources.refs import read_ref, require_ref, write_ref
from resources.registry import Registry
from triplane_dagster.targets import begin_target, end_target


def policy(name: str, kind: str = "checkpoint") -> ArtifactRef:
    return ArtifactRef(kind=kind, key="1" * 64, digest=(name.encode().hex() + "0" * 64)[:64])


def test_a_policy_goes_live_only_over_its_parent(tmp_path: Path) -> None:
    registry = Registry(open_store(str(tmp_path)), "one")
    state = policy("s", "trainer_state")
    assert registry.live() is None
    assert registry.promote(policy("a"), state, parent=policy("base").digest, iteration="0000") is not None
    assert registry.promote(policy("x"), state, parent=policy("base").digest, iteration="0000") is None
    second = registry.promote(policy("b"), state, parent=policy("a").digest, iteration="0001")
    assert second is not None and second.number == 2
    assert registry.live() == second
    assert [entry.policy.digest for entry in registry.history()] == [policy("a").digest, policy("b").digest]
    assert registry.find(policy("a").digest) == registry.history()[0]
    assert Registry(open_store(str(tmp_path)), "two").live() is None


def test_of_many_children_of_one_parent_one_goes_live(tmp_path: Path) -> None:
    registry = Registry(open_store(str(tmp_path)), "one")
    state = policy("s", "trainer_state")
    registry.promote(policy("a"), state, parent=policy("base").digest, iteration="0000")
    with ThreadPoolExecutor(8) as pool:
        promote = lambda name: registry.promote(policy(name), state, parent=policy("a").digest, iteration="0001")  # noqa: E731
        won = [entry for entry in pool.map(promote, [f"c{index}" for index in range(24)]) if entry]
    assert len(won) == 1
    assert registry.live() == won[0]


def test_a_reference_is_recorded_once_and_read_back(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for _ in range(3):
        write_ref(store, "one", "rollouts", "0001", policy("a", "rollouts"))
    assert len(store.list("pointers/assets/one/rollouts/0001/")) == 1
    write_ref(store, "one", "rollouts", "0001", policy("b", "rollouts"))
    assert read_ref(store, "one", "rollouts", "0001") == policy("b", "rollouts")
    assert read_ref(store, "one", "rollouts", "0002") is None
    with pytest.raises(NotMaterialized, match=r"one/rollouts\[0002\]"):
        require_ref(store, "one", "rollouts", "0002")


def test_the_same_command_goes_on_to_the_same_end(tmp_path: Path, tiny: Experiment) -> None:
    store = open_store(str(tmp_path))
    first = begin_target(store, tiny, 3)
    assert first.iterations() == ["0000", "0001", "0002"]
    write_ref(store, tiny.name, "sampler", "0000", policy("d", "sampler"))
    assert begin_target(store, tiny, 3) == first
    assert begin_target(store, tiny, 1).iterations() == ["0001"]
    again = begin_target(store, tiny, 3)
    assert again.iterations() == ["0001", "0002", "0003"]
    end_target(store, tiny, again)
    assert begin_target(store, tiny, 3).iterations() == ["0001", "0002", "0003"]
