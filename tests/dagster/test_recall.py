"""The ledger answers as a walk over all manifests does, however its updates fell, merged and were killed."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dagster_world import World

import ops.ledger.index
import ops.ledger.segments
from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, discard_artifact, list_artifacts
from contracts.digests import digest_of
from contracts.episodes import EPISODES, TELEMETRY
from contracts.errors import ArtifactCorrupt, ArtifactMissing
from contracts.store import Store, open_store
from curation.dataset import MEMBERS
from curation.rewards import REWARDS
from ops.ledger.index import discard, rebuild, update, update_fault
from ops.ledger.recall import recall
from ops.ledger.segments import KIND, TABLES, Ledger, Segment, segments_of, widest
from resources.errors import AlreadyLive, RegistryError
from resources.experiment import parse_experiment
from resources.refs import experiments_in, noted, unnote, write_ref
from resources.registry import BasePolicy, Registry

pytestmark = pytest.mark.slow

TOOLS = ("edit", "exec", "exec_long", "read_file")
RULES = (0, 1, 10)
"""Versions of the grading code; one is the beginning of another."""
TRAININGS = [
    parse_experiment({"name": "one", "trainer": {"algorithm": {"kind": kind}}}).trainer.rl.model_dump(mode="json")
    for kind in ("grpo", "reinforce_pp")
]
"""Settings of a checkpoint's training; only the second normalizes advantages over the iteration."""


def commit(
    store: Store, kind: str, parents: dict[str, Artifact], config: dict[str, Any], **tables: pa.Table
) -> Artifact:
    refs = {role: each.ref for role, each in parents.items()}
    key = digest_of([kind, config, {role: ref.digest for role, ref in refs.items()}])
    with ArtifactWriter(store, kind, key, parents=refs, config=config, code_version=str(config.get("rule", 1))) as out:
        for name, table in tables.items():
            out.add_table(f"{name}.parquet", table, telemetry=name == "telemetry")
        out.add_json("facts.json", config)
        return out.commit()


def table_of(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema=schema)


@dataclass
class History:
    """A random store of several experiments: forks, gradings and rollouts made again, evaluations, rollbacks,
    iterations that were not finished, and trainer states that were removed.
    """

    store: Store
    draw: random.Random
    checkpoints: dict[str, list[Artifact]] = field(default_factory=dict)
    datasets: list[Artifact] = field(default_factory=list)
    sampled: list[Artifact] = field(default_factory=list)

    def iteration(self, experiment: str, number: int) -> None:
        draw, iteration = self.draw, f"{number:04d}"
        own = self.checkpoints.setdefault(experiment, [self._checkpoint(experiment, {}, "base_policy", None)])
        start = draw.choice(own[-2:])
        repeated = draw.choice(self.sampled) if self.sampled and experiment.endswith("fork") else None
        inputs = self._asset(
            experiment,
            "iteration_inputs",
            iteration,
            {"policy": start, **({"rollouts": repeated} if repeated else {})},
            {"experiment": experiment, "iteration": iteration},
        )
        rollouts = repeated or self._rollouts(experiment, iteration, inputs, start)
        for _ in range(draw.choice((0, 1, 1, 1, 1, 2, 3))):  # graded again, and a dataset of each
            rewards = self._rewards(experiment, iteration, rollouts)
            if draw.random() < 0.1:
                break
            dataset = self._dataset(experiment, iteration, rollouts, rewards)
            if draw.random() < 0.1:
                break
            made = self._checkpoint(experiment, {"dataset": dataset, "checkpoint": start}, "checkpoint", iteration)
            own.append(made)
        if draw.random() < 0.4:
            self._evaluation(experiment, iteration, draw.choice(own))
        self._registry(experiment, iteration, own)

    def _rollouts(self, experiment: str, iteration: str, inputs: Artifact, start: Artifact) -> Artifact:
        episodes = self._episodes(experiment, iteration, start)
        tables = {"episodes": table_of(EPISODES, episodes), **self._telemetry(episodes)}
        parents = {"iteration_inputs": inputs, "policy": start}
        made = self._asset(experiment, "rollouts", iteration, parents, {}, **tables)
        if self.draw.random() < 0.2:  # the same episodes under another key
            made = self._asset(experiment, "rollouts", iteration, parents, {"again": True}, **tables)
        self.sampled.append(made)
        return made

    def _episodes(self, experiment: str, iteration: str, policy: Artifact) -> list[dict[str, Any]]:
        draw = self.draw
        names = [digest_of([experiment, iteration, each])[:32] for each in range(draw.randrange(1, 7))]
        if draw.random() < 0.4:  # ids with the same beginning
            names = [f"{names[0][: draw.choice((3, 20, 31))]:0<31}{each:x}" for each in range(len(names))]
        return [
            {
                "episode_id": name,
                "group_id": f"g{each // 3}",
                "task_id": f"t{draw.randrange(5)}",
                "image_digest": digest_of(["image", draw.randrange(3)]),
                "outcome": "completed",
                "policy_version": policy.ref.digest,
                "tool_calls": [{"turn": 0, "name": draw.choice(TOOLS)} for _ in range(draw.randrange(3))],
                "policy_tokens": draw.randrange(50),
            }
            for each, name in enumerate(names)
        ]

    def _telemetry(self, episodes: list[dict[str, Any]]) -> dict[str, pa.Table]:
        found = [{"episode_id": row["episode_id"], "engine_tokens": 3, "tool_seconds": 0.5} for row in episodes]
        return {"telemetry": table_of(TELEMETRY, found)} if self.draw.random() < 0.8 else {}

    def _rewards(self, experiment: str, iteration: str, rollouts: Artifact) -> Artifact:
        graded = self._graded(rollouts.table("episodes.parquet").to_pylist())
        config = {"rule": self.draw.choice(RULES), "settings": self.draw.randrange(2)}
        return self._asset(experiment, "rewards", iteration, {"rollouts": rollouts}, config, rewards=graded)

    def _graded(self, episodes: list[dict[str, Any]]) -> pa.Table:
        rows = [{"episode_id": row["episode_id"], "reward": self.draw.random(), "solved": False} for row in episodes]
        return table_of(REWARDS, rows)

    def _dataset(self, experiment: str, iteration: str, rollouts: Artifact, rewards: Artifact) -> Artifact:
        members = [
            {"episode_id": row["episode_id"], "kept": reason is None, "reason": reason}
            for row in rollouts.table("episodes.parquet").to_pylist()
            for reason in (self.draw.choice((None, None, None, "zero_variance", "over_cap", "too_long")),)
        ]
        parents, table = {"rollouts": rollouts, "rewards": rewards}, table_of(MEMBERS, members)
        made = self._asset(experiment, "dataset", iteration, parents, {}, members=table)
        self.datasets.append(made)
        return made

    def _evaluation(self, experiment: str, iteration: str, policy: Artifact) -> None:
        episodes = self._episodes(experiment, f"evaluation of {iteration}", policy)
        tables = {"episodes": table_of(EPISODES, episodes), "rewards": self._graded(episodes)}
        run = commit(self.store, "evaluation_run", {"policy": policy}, {}, **tables, **self._telemetry(episodes))
        self._asset(experiment, "evaluation", iteration, {"candidate": policy, "candidate_gate": run}, {})

    def _registry(self, experiment: str, iteration: str, own: list[Artifact]) -> None:
        registry = Registry(self.store, experiment)
        live = registry.live()
        if self.draw.random() < 0.5:
            parent = live.policy.digest if live else own[0].ref.digest
            registry.promote(own[-1].ref, own[-1].ref, parent=parent, iteration=iteration)
        elif live is not None and self.draw.random() < 0.5:
            base = BasePolicy(own[0].ref, lambda: own[0].ref)
            with suppress(RegistryError, AlreadyLive):
                registry.rollback(registry.restorable(None, base), "random", expected=live.number)

    def remove_state(self) -> None:
        """Remove a trainer state as `triplane gc` does."""
        state = self.draw.choice(list(list_artifacts(self.store, "trainer_state")))
        discard_artifact(self.store, state.ref)
        discard(self.store)

    def _asset(
        self,
        experiment: str,
        kind: str,
        iteration: str | None,
        parents: dict[str, Artifact],
        config: dict[str, Any],
        **tables: pa.Table,
    ) -> Artifact:
        made = commit(self.store, kind, parents, config, **tables)
        write_ref(self.store, experiment, kind, iteration, made.ref)
        if self.draw.random() < 0.2:
            update(self.store)
        return made

    def _checkpoint(self, experiment: str, parents: dict[str, Artifact], asset: str, iteration: str | None) -> Artifact:
        config = {"seed": self.draw.random(), "rl": self.draw.choice(TRAININGS)}
        made = commit(self.store, "checkpoint", parents, config)
        with ArtifactWriter(
            self.store, "trainer_state", made.ref.key, parents=made.manifest.parents, config=config, code_version="1"
        ) as out:
            out.add_json("facts.json", config)
            out.commit()
        write_ref(self.store, experiment, asset, iteration, made.ref)
        return made


def rule_of(rewards: Artifact) -> str:
    return f"{rewards.manifest.code_version}-{digest_of(rewards.manifest.config)[:12]}"


class Walk:
    """Everything that a store holds, read once, without the ledger."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.all = {artifact.ref.uri: artifact for artifact in list_artifacts(store) if artifact.ref.kind != KIND}
        self._rows: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def of(self, kind: str) -> dict[str, Artifact]:
        return {uri: artifact for uri, artifact in self.all.items() if artifact.ref.kind == kind}

    def rows(self, uri: str, name: str) -> list[dict[str, Any]]:
        if (uri, name) not in self._rows:
            self._rows[uri, name] = self.all[uri].table(f"{name}.parquet").to_pylist()
        return self._rows[uri, name]

    def distances(self, datasets: Collection[str]) -> dict[str, int]:
        """Checkpoints trained on these datasets (0), and those trained further from them, with their distance."""
        parents = {
            uri: {ref.uri for ref in each.manifest.parents.values()} for uri, each in self.of("checkpoint").items()
        }
        found: dict[str, int] = {}
        level, distance = {uri for uri, own in parents.items() if own & set(datasets)}, 0
        while level:
            found |= dict.fromkeys(level, distance)
            level = {uri for uri, own in parents.items() if own & level and uri not in found}
            distance += 1
        return found

    def live(self, checkpoints: Collection[str]) -> list[str]:
        """Experiments whose live policy is among these."""
        newest = {name: Registry(self.store, name).live() for name in experiments_in(self.store)}
        return [name for name, entry in newest.items() if entry and entry.policy.uri in checkpoints]


def brute_force(
    walk: Walk, match: Callable[[dict[str, Any], set[str]], bool], rule: str | None = None
) -> dict[str, Any]:
    """The answer by reading every manifest and table. rule: only datasets of rewards that this rule made."""
    rules: dict[str, set[str]] = {}
    for uri, artifact in walk.of("rewards").items():
        for row in walk.rows(uri, "rewards"):
            rules.setdefault(row["episode_id"], set()).add(rule_of(artifact))
    seen = {
        uri: found
        for uri in walk.of("rollouts") | walk.of("evaluation_run")
        if (
            found := {
                row["episode_id"]
                for row in walk.rows(uri, "episodes")
                if match(row, rules.get(row["episode_id"], set()))
            }
        )
    }
    episodes = {each for found in seen.values() for each in found}
    used = {}
    for uri, artifact in walk.of("dataset").items():
        if rule and not rule_of(walk.all[artifact.manifest.parents["rewards"].uri]).startswith(rule):
            continue
        rows = [row for row in walk.rows(uri, "members") if row["episode_id"] in episodes]
        if rows:
            used[uri] = sum(row["kept"] for row in rows)
    distances = walk.distances([uri for uri, kept in used.items() if kept])
    return {
        "episodes": len(episodes),
        "seen": sorted((walk.all[uri].ref.digest, len(found)) for uri, found in seen.items()),
        "used": sorted((walk.all[uri].ref.digest, kept) for uri, kept in used.items()),
        "trained": sorted((walk.all[uri].ref.digest, distance) for uri, distance in distances.items()),
        "live": walk.live(distances),
    }


def answered(store: Store, what: Any, value: str) -> dict[str, Any]:
    try:
        found = recall(store, what, value)
    except ArtifactMissing:
        return {"episodes": 0, "seen": [], "used": [], "trained": [], "live": []}
    return {
        "episodes": found.episodes,
        "seen": sorted((row["digest"], row["episodes"]) for row in found.seen),
        "used": sorted((row["digest"], row["kept"]) for row in found.used),
        "trained": sorted((row["digest"], row["distance"]) for row in found.trained),
        "live": [row["experiment"] for row in found.live],
    }


def indexed(store: Store) -> dict[str, list[str]]:
    """Every row of the ledger, sorted."""
    with Ledger(store).opened() as (db, _):
        return {name: sorted(map(repr, db.sql(f"FROM {name}").fetchall())) for name in TABLES}


def made_by(seed: int, folder: Path) -> History:
    history = History(open_store(str(folder)), random.Random(seed))
    experiments = ("one", "two", "one-fork")
    for number in range(history.draw.randrange(1, 5)):
        for experiment in experiments[: history.draw.choice((1, 2, 3))]:
            history.iteration(experiment, number)
    if history.draw.random() < 0.3:
        history.remove_state()
    return history


def check_answers(seed: int, folder: Path) -> None:
    history = made_by(seed, folder)
    store, draw, walk = history.store, history.draw, Walk(history.store)
    ids = sorted({row["episode_id"] for uri in walk.of("rollouts") for row in walk.rows(uri, "episodes")})
    some, image = draw.choice(ids), digest_of(["image", 1])
    questions: list[tuple[str, str, Callable[[dict[str, Any], set[str]], bool]]] = [
        *(("task", f"t{number}", lambda row, _, number=number: row["task_id"] == f"t{number}") for number in range(6)),
        *(
            ("tool", tool, lambda row, _, tool=tool: tool in [call["name"] for call in row["tool_calls"]])
            for tool in TOOLS
        ),
        *(
            ("rule", rule, lambda row, rules, rule=rule: any(each.startswith(rule) for each in rules))
            for rule in ("0-", "1", "1-", "10-")
        ),
        *(
            ("image", image[:length], lambda row, _, length=length: row["image_digest"].startswith(image[:length]))
            for length in (1, 20, 64)
        ),
        *(
            ("episode", some[:length], lambda row, _, length=length: row["episode_id"].startswith(some[:length]))
            for length in (1, 3, 20, 31, 32)
        ),
    ]
    for what, value, match in draw.sample(questions, 7):
        rule = value if what == "rule" else None
        assert answered(store, what, value) == brute_force(walk, match, rule), (what, value)
    before = indexed(store)
    rebuild(store)
    assert indexed(store) == before
    assert not noted(store)


@pytest.mark.parametrize("seed", range(2))
def test_recall_equals_a_walk_over_all_manifests(seed: int, tmp_path: Path) -> None:
    check_answers(seed, tmp_path)


def test_a_copy_beside_a_folder_whose_name_is_a_pattern_is_not_read(tmp_path: Path) -> None:
    store = made_by(0, tmp_path / "runs*").store
    rebuild(store)
    before = indexed(store)
    shutil.copytree(tmp_path / "runs*", tmp_path / "runs-old")
    assert indexed(store) == before
    rebuild(store)
    assert indexed(store) == before


@pytest.mark.timeout(1800)
def test_recall_equals_a_walk_over_all_manifests_of_60_stores(tmp_path: Path) -> None:
    for seed in range(2, 62):
        check_answers(seed, tmp_path / str(seed))


def test_an_episode_that_the_latest_grading_left_ungraded_has_no_reward(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    episodes = [{"episode_id": f"{number:032x}", "task_id": "t0"} for number in range(2)]
    rollouts = commit(store, "rollouts", {}, {}, episodes=table_of(EPISODES, episodes))
    for rule, graded in enumerate(([(1.0, True), (0.5, True)], [(None, None), (0.25, False)])):
        own = [
            {**episode, "reward": reward, "solved": solved}
            for episode, (reward, solved) in zip(episodes, graded, strict=True)
        ]
        commit(store, "rewards", {"rollouts": rollouts}, {"rule": rule}, rewards=table_of(REWARDS, own))
    (seen,) = recall(store, "task", "t0").seen
    assert (seen["episodes"], seen["solved"], seen["reward"]) == (2, 0, 0.25)


def rows(number: int) -> dict[str, pa.Table]:
    found = {name: schema.empty_table() for name, schema in TABLES.items()}
    found["edges"] = pa.table({"child": [f"c{number}"], "parent": ["p"], "role": ["r"]}, schema=TABLES["edges"])
    return found


def appended(store: Store, count: int) -> None:
    ledger = Ledger(store)
    for number in range(count):
        assert ledger.append(widest(segments_of(store)), rows(number))


@pytest.fixture
def no_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covered segments are removed at once."""
    monkeypatch.setattr(ops.ledger.segments, "READERS_S", -60.0)


@pytest.mark.usefixtures("no_readers")
def test_segments_merge_in_powers_of_sixteen_and_keep_rows_in_order(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    appended(store, 275)
    spans = [(each.first, each.last) for each in segments_of(store)]
    assert spans == [(0, 255), (256, 271), (272, 272), (273, 273), (274, 274)]
    with Ledger(store).opened() as (db, _):
        assert [row[0] for row in db.sql("SELECT child FROM edges").fetchall()] == [f"c{each}" for each in range(275)]


@pytest.mark.usefixtures("no_readers")
def test_a_merge_that_was_killed_is_made_up_for_by_the_next_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_merge", lambda self, generation, number: True)
        appended(store, 40)
    with monkeypatch.context() as patch:  # merged, but the narrow ones were not removed
        patch.setattr(Ledger, "_sweep", lambda self: None)
        Ledger(store)._merge(1, 15)
    assert widest(segments_of(store))[0] == Segment(1, 0, 15)
    ledger = Ledger(store)
    for number in range(40, 256):
        assert ledger.append(widest(segments_of(store)), rows(number))
    assert [(each.first, each.last) for each in segments_of(store)] == [(0, 255)]
    with ledger.opened() as (db, _):
        assert db.sql("SELECT count(*), count(DISTINCT child) FROM edges").fetchall() == [(256, 256)]


@pytest.mark.usefixtures("no_readers")
def test_a_missing_update_is_an_error_that_names_the_fix(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    appended(store, 3)
    store.discard(f"artifacts/{KIND}/{Segment(1, 1, 1).key}/")
    with pytest.raises(ArtifactCorrupt, match="lacks its update 1: run `triplane store reindex`"):
        recall(store, "task", "t0")
    assert rebuild(store) == 0
    assert [each.generation for each in segments_of(store)] == [2]


class KilledError(BaseException):
    """Stands for kill -9 between two calls."""


def kill(*_: object) -> None:
    raise KilledError


@pytest.mark.parametrize("place", ["unnote", "append", "rows_of"])
def test_an_update_killed_at_any_point_loses_and_repeats_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made_by(1, tmp_path).store
    update(store)
    History(store, random.Random(2)).iteration("three", 0)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(*((Ledger, place) if place == "append" else (ops.ledger.index, place)), kill)
        commit_and_note(store)
        update(store)
    update(store)
    after = indexed(store)
    rebuild(store)
    assert indexed(store) == after
    assert not noted(store)


def commit_and_note(store: Store) -> None:
    made = commit(store, "prompts", {}, {"late": True})
    write_ref(store, "one", "prompts", "0009", made.ref)


def test_a_killed_rebuild_leaves_the_earlier_ledger_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = made_by(3, tmp_path).store
    update(store)
    before = indexed(store)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(ops.ledger.index, "rows_of", kill)
        rebuild(store)
    assert indexed(store) == before
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Ledger, "_sweep", kill)  # two generations stand beside each other
        rebuild(store)
    assert indexed(store) == before


def test_a_damaged_manifest_is_named_by_recall_and_does_not_fail_the_report(tmp_path: Path) -> None:
    store = made_by(4, tmp_path).store
    update(store)
    made = commit(store, "prompts", {}, {"damaged": True})
    write_ref(store, "one", "prompts", "0009", made.ref)
    manifest = tmp_path / made.ref.uri / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text("{")
    assert f"{made.ref.uri}/manifest.json is damaged" in update_fault(store)
    with pytest.raises(ArtifactCorrupt, match=r"manifest\.json is damaged"):
        recall(store, "task", "t0")


def test_concurrent_updates_index_each_artifact_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    commit_and_note(store)
    update(store)
    made = [commit(store, "prompts", {}, {"number": number}) for number in range(24)]

    def work(number: int) -> None:
        write_ref(store, "one", "prompts", f"{number:04d}", made[number].ref)
        update(store)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(24)))
    update(store)
    with Ledger(store).opened() as (db, _):
        assert db.sql("SELECT count(*), count(DISTINCT uri) FROM artifacts").fetchall() == [(25, 25)]


def test_an_artifact_that_is_made_again_with_other_content_is_indexed_anew(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))

    def sampled(episode: str) -> Artifact:
        found = table_of(EPISODES, [{"episode_id": episode, "task_id": "t0", "tool_calls": []}])
        made = commit(store, "rollouts", {}, {}, episodes=found)
        write_ref(store, "one", "rollouts", "0000", made.ref)
        update(store)
        return made

    first = sampled("a" * 32)
    discard_artifact(store, first.ref)  # as ArtifactCorrupt advises
    second = sampled("b" * 32)
    assert first.ref.uri == second.ref.uri
    assert answered(store, "episode", "a")["seen"] == []
    assert answered(store, "episode", "b")["seen"] == [(second.ref.digest, 1)]


class Materializing:
    """Progress of a rebuild during which one artifact materializes and `then` is called."""

    def __init__(self, store: Store, then: Callable[[], object]) -> None:
        self.store, self.then, self.made = store, then, 0

    def __call__(self, _: int) -> None:
        self.made += 1
        if self.made == 1:
            commit_and_note(self.store)
            self.then()


def of_first(store: Store) -> Store:
    made = commit(store, "prompts", {}, {"first": True})
    write_ref(store, "one", "prompts", "0000", made.ref)
    return store


def lacks_nothing(store: Store) -> bool:
    """Whether the next update completes the ledger."""
    update(store)
    with Ledger(store).opened() as (db, _):
        uris = [uri for (uri,) in db.sql("SELECT uri FROM artifacts ORDER BY uri").fetchall()]
    return uris == sorted(Walk(store).all) and not noted(store)


def test_an_artifact_that_an_update_indexes_during_a_rebuild_is_not_lost(tmp_path: Path) -> None:
    store = of_first(open_store(str(tmp_path)))
    update(store)
    during = Materializing(store, lambda: update(store))
    assert rebuild(store, during) == during.made == 1
    assert lacks_nothing(store)


def test_an_update_that_ends_after_a_concurrent_rebuild_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = of_first(open_store(str(tmp_path)))
    update(store)
    appended, rebuilt = threading.Event(), threading.Event()

    def unnote_later(store: Store, ref: ArtifactRef) -> None:
        appended.set()
        assert rebuilt.wait(30)
        unnote(store, ref)

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:

        def update_meanwhile() -> None:
            patch.setattr(ops.ledger.index, "unnote", unnote_later)
            running.append(pool.submit(update, store))
            assert appended.wait(30)
            patch.setattr(ops.ledger.index, "unnote", unnote)

        running: list[Future[int]] = []
        rebuild(store, Materializing(store, update_meanwhile))
        rebuilt.set()
        assert running[0].result(30) == 1
    assert lacks_nothing(store)


def test_of_two_first_updates_the_later_one_loses_nothing(tmp_path: Path) -> None:
    """The first of them lists the store before an artifact materializes, and commits before the other."""
    store = of_first(open_store(str(tmp_path)))
    listed, go = threading.Event(), threading.Event()

    def wait(_: int) -> None:
        listed.set()
        assert go.wait(30)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(update, store, wait)
        assert listed.wait(30)
        commit_and_note(store)

        def end_first(_: int) -> None:
            go.set()
            assert first.result(30) == 1

        assert update(store, end_first) == 2
    assert lacks_nothing(store)


def test_iterations_index_what_they_make(ran: World) -> None:
    """Other tests materialize single assets of this store, which are noted until the next update."""
    made = {entry.policy.uri for entry in Registry(ran.store, ran.experiment.name).history()}
    with Ledger(ran.store).opened() as (db, _):
        indexed = {uri for (uri,) in db.sql("SELECT uri FROM artifacts").fetchall()}
    assert made and made <= indexed
    assert not made & {ref.uri for ref in noted(ran.store)}
