from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pinning import decide

from contracts.artifacts import ArtifactRef
from contracts.digests import canonical_json
from contracts.store import open_store
from resources.errors import NotMaterialized, RegistryError
from resources.experiment import Experiment
from resources.refs import read_ref, require_ref, write_ref
from resources.registry import BasePolicy, LivePolicy, Registry, Restorable
from triplane_dagster.iterations import decision_of, standing_decision
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


def test_repeated_command_continues_its_target(tmp_path: Path, tiny: Experiment) -> None:
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


def base_policy() -> BasePolicy:
    return BasePolicy(policy("base"), lambda: policy("s", "trainer_state"))


def registry_of(folder: Path, *names: str) -> Registry:
    """Policies promoted one after the other, from the base policy on."""
    registry = Registry(open_store(str(folder)), "one")
    for index, (parent, name) in enumerate(pairwise(("base", *names))):
        state = policy(f"s{name}", "trainer_state")
        assert registry.promote(policy(name), state, parent=policy(parent).digest, iteration=f"{index:04d}")
    return registry


def go_back(registry: Registry, to: str | None) -> LivePolicy:
    target = registry.restorable(to, base_policy())
    return registry.rollback(target, "a drill", expected=len(registry.history()))


def test_a_rollback_adds_an_entry_and_restores_policy_and_trainer_state(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, "a", "b", "c")
    before = registry.history()
    back = go_back(registry, "1")
    assert registry.history() == [*before, back] and registry.live() == back
    assert (back.number, back.policy, back.trainer_state) == (4, before[0].policy, before[0].trainer_state)
    assert (back.iteration, back.parent) == ("0000", policy("c").digest)
    assert back.rollback is not None and (back.rollback.to, back.rollback.reason) == (1, "a drill")
    assert registry.standing() == [1]
    assert set(registry.rolled_back()) == {policy("b").digest, policy("c").digest}


def test_a_decision_about_the_weights_of_a_policy_that_was_rolled_back_does_not_say_live(
    tiny: Experiment, tmp_path: Path
) -> None:
    one, registry, store = (
        tiny.model_copy(update={"name": "one"}),
        registry_of(tmp_path, "a"),
        open_store(str(tmp_path)),
    )
    decide(store, one, "0000", "live", policy("a").digest)
    assert standing_decision(store, one, "0000") == decision_of(store, one, "0000")
    go_back(registry, "base")
    found = standing_decision(store, one, "0000")
    assert found is not None and found.decision == "stale"
    assert found.reasons == ["it was live before, as change 1: `triplane rollback --to 1` brings it back"]


def test_without_a_target_each_rollback_goes_one_promotion_further_back(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, "a", "b")
    assert [go_back(registry, None).policy for _ in range(2)] == [policy("a"), policy("base")]
    with pytest.raises(RegistryError, match="the base policy of one is live"):
        go_back(registry, None)
    assert go_back(registry, policy("b").digest[:9]).policy == policy("b"), "and forward again by name"
    assert registry.rolled_back() == {}


def test_promotions_after_a_rollback_build_on_the_restored_policy(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, "a", "b")
    go_back(registry, "1")
    state = policy("s", "trainer_state")
    assert registry.promote(policy("x"), state, parent=policy("b").digest, iteration="0002") is None
    assert registry.promote(policy("b"), state, parent=policy("a").digest, iteration="0001") is None, "once only"
    child = registry.promote(policy("c"), state, parent=policy("a").digest, iteration="0002")
    assert child is not None and registry.standing() == [1, 4]
    assert set(registry.rolled_back()) == {policy("b").digest}
    assert go_back(registry, None).policy == policy("a")


@pytest.mark.parametrize(
    ("to", "fault"),
    [
        ("7", "matches no single policy"),
        ("feedbeef", "matches no single policy"),
        ("", "matches no single policy"),
        ("3", "is already live"),
        (policy("c").digest[:8], "is already live"),
    ],
)
def test_unknown_rollback_target_lists_the_alternatives(to: str, fault: str, tmp_path: Path) -> None:
    registry = registry_of(tmp_path, "a", "b", "c")
    with pytest.raises(RegistryError, match=fault):
        go_back(registry, to)
    assert len(registry.history()) == 3


def test_concurrent_rollbacks_succeed_once_and_report_the_live_policy(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, "a", "b", "c")
    targets = [registry.restorable(to, base_policy()) for to in ("base", "1", "2")] * 6

    def attempt(target: Restorable) -> str:
        try:
            return f"won {registry.rollback(target, 'a drill', expected=3).policy.short}"
        except RegistryError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(attempt, targets))
    live = registry.live()
    assert live is not None and len(registry.history()) == 4
    assert [line for line in said if line.startswith("won")] == [f"won {live.policy.short}"]
    assert sum(f"(now {live.policy.short}" in line and "nothing was rolled back" in line for line in said) == 17


def test_old_registry_entries_are_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    old = {
        "policy": policy("a").model_dump(),
        "trainer_state": policy("s", "trainer_state").model_dump(),
        "parent": policy("base").digest,
        "iteration": "0000",
    }
    store.create("pointers/live/one/00000001.json", canonical_json(old))
    registry = Registry(store, "one")
    live = registry.live()
    assert live is not None and live.policy == policy("a") and live.rollback is None
    registry.promote(policy("b"), policy("s", "trainer_state"), parent=policy("a").digest, iteration="0001")
    assert set(json.loads(store.get("pointers/live/one/00000002.json"))) == set(old)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=9))
def test_registry_history_is_append_only(choices: list[int]) -> None:
    """Promotions (even numbers) and rollbacks to anything that was live (odd ones), in any order."""
    with tempfile.TemporaryDirectory() as folder:
        registry, lines = Registry(open_store(folder), "one"), {policy("base").digest: list[str]()}
        for index, choice in enumerate(choices):
            before, live = registry.history(), registry.live()
            acting = live.policy if live else policy("base")
            if choice % 2 == 0:
                made = policy(f"p{index}")
                assert registry.promote(made, acting, parent=acting.digest, iteration=f"{index:04d}")
                lines[made.digest] = [*lines[acting.digest], made.digest]
            elif live is not None and (to := min(choice // 2, len(before))) != live.number:
                try:
                    go_back(registry, str(to) if to else "base")
                except RegistryError:
                    assert before[to - 1].policy == acting if to else acting == policy("base")
            history = registry.history()
            assert history[: len(before)] == before
            standing = [history[number - 1].policy.digest for number in registry.standing()]
            assert standing == lines[history[-1].policy.digest if history else policy("base").digest]
            assert not set(standing) & set(registry.rolled_back())
