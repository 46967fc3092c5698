"""Ranks in processes of their own write one artifact: whoever is killed when, it is whole or absent."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from rank_world import FORMS, KEY, NAME, PART, RANKS, content, share, start

from contracts import tensor_parts
from contracts.artifacts import ArtifactWriter, find_artifact
from contracts.errors import InfraFault, SchemaError, StoreError
from contracts.filecache import CACHE_FOLDER
from contracts.leftovers import sweep_leftovers
from contracts.rank_parts import Exchange, RankParts, in_step, put_parts, stage_parts
from contracts.store import LocalStore, Store, open_store
from contracts.tensor_files import INDEX, Form, TensorFiles
from contracts.tensor_parts import add_tensors
from contracts.upkeep import find_garbage, remove_garbage

pytestmark = pytest.mark.slow


def launch(
    store: Store,
    caches: Path,
    kill: Mapping[int, str],
    after: Callable[[list[BaseProcess]], None] = lambda ranks: None,
    timeout_s: float = 5.0,
) -> bool:
    """Run all ranks, with a failpoint for some. after: called once all have started. Returns whether all succeeded."""
    ranks = start(store.url, caches, RANKS, kill, timeout_s)
    after(ranks)
    for each in ranks:
        each.join(60)
    return [each.exitcode for each in ranks] == [0] * RANKS


@contextmanager
def writer(store: Store, key: str = KEY) -> Iterator[ArtifactWriter]:
    with ArtifactWriter(store, "thing", key, parents={}, config={}, code_version="1") as out:
        yield out


def digest_of_one_writer(store: Store) -> str:
    with writer(store) as out:
        add_tensors(out, NAME, FORMS, content)
        return out.commit().ref.digest


def check_rerun(store: Store, caches: Path, digest: str) -> None:
    """What a reader sees after a kill, and after the next run and `store gc`."""
    found = find_artifact(store, "thing", KEY)
    if found is not None:
        assert found.ref.digest == digest
        assert TensorFiles(found.directory(), NAME).forms == FORMS
    scratches = [store.scratch]
    if not isinstance(store, LocalStore):
        scratches = [each / CACHE_FOLDER / store.scratch.name for each in sorted(caches.glob("rank-*"))]
    for scratch in scratches:
        with pytest.MonkeyPatch.context() as patch:  # the next run on that rank's machine
            patch.setenv("TRIPLANE_CACHE", str(scratch.parents[1]))
            sweep_leftovers(open_store(store.url))
    assert launch(store, caches, {}, timeout_s=60.0)
    found = find_artifact(store, "thing", KEY)
    assert found is not None and found.ref.digest == digest and f"{NAME}{INDEX}" in found.names()
    target = bytearray(FORMS["t07"][1][0])
    TensorFiles(found.directory(), NAME).read_into("t07", memoryview(target))
    assert target == content("t07")
    for garbage in find_garbage(store, older_than_s=-1.0):
        assert garbage.what == "attempt", "a part that was on its way when rank 0's machine was swept"
        assert remove_garbage(store, garbage)
    named = {f"{found.ref.uri}/{found.manifest.attempt}/{name}" for name in found.names()}
    assert set(store.list("artifacts/")) == named | {f"{found.ref.uri}/manifest.json"}, "nothing else is left"
    assert not [each for scratch in scratches for each in scratch.iterdir()]


EVERYWHERE = ("part-written:1", "part-written:2", "rank-staged", "rank-part-stored:1", "rank-part-stored:2")
POINTS = [
    *((0, point) for point in (*EVERYWHERE, "ranks-gathered", "artifact-staged", "before-manifest", "after-manifest")),
    *((rank, point) for rank in (1, 2) for point in EVERYWHERE),
]
LOCAL = [(rank, f"store-write:{number}") for rank, numbers in ((0, (1, 2, 3, 4)), (1, (1, 2))) for number in numbers]


@pytest.mark.parametrize(("rank", "point"), POINTS)
def test_a_rank_killed_at_a_failpoint_leaves_a_whole_artifact_or_none(
    store: Store, tmp_path: Path, rank: int, point: str
) -> None:
    digest = digest_of_one_writer(LocalStore(tmp_path / "calm"))
    assert not launch(store, tmp_path, {rank: point})
    assert (find_artifact(store, "thing", KEY) is not None) == (point == "after-manifest")
    check_rerun(store, tmp_path, digest)


@pytest.mark.parametrize(("rank", "point"), LOCAL)
def test_a_rank_killed_while_it_writes_to_a_local_store_leaves_none(tmp_path: Path, rank: int, point: str) -> None:
    digest = digest_of_one_writer(LocalStore(tmp_path / "calm"))
    store = LocalStore(tmp_path / "store")
    assert not launch(store, tmp_path, {rank: point})
    assert find_artifact(store, "thing", KEY) is None
    check_rerun(store, tmp_path, digest)


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_killed_at_any_time_leaves_a_whole_artifact_or_none(store: Store, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    digest = digest_of_one_writer(LocalStore(tmp_path / "calm"))

    def kill(ranks: list[BaseProcess]) -> None:
        time.sleep(chance.uniform(0, 0.4))
        chance.choice(ranks).kill()

    whole = launch(store, tmp_path, {}, kill)
    assert find_artifact(store, "thing", KEY) is not None or not whole
    check_rerun(store, tmp_path, digest)


def test_ranks_that_lose_one_remove_what_they_stored(store: Store, tmp_path: Path) -> None:
    assert not launch(store, tmp_path, {2: "part-written:1"})
    assert not launch(store, tmp_path, {2: "rank-part-stored:1"})
    left = store.list("artifacts/")
    assert len(left) <= 1, "but for the part of the rank that was killed"


def test_a_sweep_of_another_run_keeps_an_attempt_of_live_ranks(store: Store, tmp_path: Path) -> None:
    """Rank 0 holds the attempt's only note: no fate of another rank's folder makes a sweep remove the files."""
    staged = [stage(tmp_path / f"disk-{rank}", rank) for rank in range(2)]

    def sweep(rank: int) -> None:
        sweep_leftovers(open_store(store.url))

    with writer(store, "2" * 64) as out:
        run_two(store, out, staged, before_exchange=sweep)
        assert out.commit().ref.digest
    assert find_artifact(store, "thing", "2" * 64).names()[0].startswith("model-00001-of")  # type: ignore[union-attr]


class Threads:
    """An `Exchange` of two threads. A thread that ended early fails the other's next exchange, none before it."""

    def __init__(
        self, change: Callable[[int, str], str], before: Callable[[int], None], timeout_s: float = 10.0
    ) -> None:
        self._timeout_s = timeout_s
        self._said: tuple[list[str], list[str]] = ([], [])
        self._met = threading.Condition()
        self._lost = False
        self._change, self._before = change, before

    def of(self, rank: int) -> Exchange:
        def exchange(words: str) -> list[str]:
            self._before(rank)
            changed = self._change(rank, words)
            with self._met:
                self._said[rank].append(changed)
                turn = len(self._said[rank])
                self._met.notify_all()
                self._met.wait_for(lambda: self._lost or len(self._said[1 - rank]) >= turn, self._timeout_s)
                if len(self._said[1 - rank]) < turn:
                    raise InfraFault(f"rank {rank} lost another rank")
                return [each[turn - 1] for each in self._said]

        return exchange

    def lose(self) -> None:
        with self._met:
            self._lost = True
            self._met.notify_all()


def run_two(
    store: Store,
    out: ArtifactWriter,
    staged: list[RankParts],
    change: Callable[[int, str], str] = lambda rank, words: words,
    before_exchange: Callable[[int], None] = lambda rank: None,
) -> list[BaseException | None]:
    """Put the parts of two ranks, rank 1 in a thread. Returns the error of each; raises rank 0's."""
    threads, errors = Threads(change, before_exchange), [None, None]

    def put(rank: int) -> None:
        try:
            put_parts(None if rank else out, store, NAME, staged[rank], FORMS, threads.of(rank))
        except BaseException as error:
            errors[rank] = error
            threads.lose()
            if not rank:
                raise

    other = threading.Thread(target=put, args=(1,))
    other.start()
    try:
        put(0)
    finally:
        other.join(30)
    return errors


def stage(
    folder: Path,
    rank: int,
    forms: Mapping[str, Form] | None = None,
    read: Callable[[str], memoryview] = content,
) -> RankParts:
    folder.mkdir()
    return stage_parts(folder, rank, 2, share(rank, 2) if forms is None else forms, read)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parts, "PART_BYTES", PART)


def flip(folder: Path) -> None:
    path = folder / "rank-1-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, r"rank-1-2\.safetensors does not hold the bytes that its rank declared"),
        (
            lambda folder: (folder / "rank-1-1.safetensors").unlink(),
            r"rank-1-1\.safetensors is declared .* but missing",
        ),
    ],
)
def test_a_rank_does_not_store_a_torn_part(
    store: Store, tmp_path: Path, small_parts: None, damage: Callable[[Path], None], said: str
) -> None:
    staged = [stage(tmp_path / f"disk-{rank}", rank) for rank in range(2)]
    damage(tmp_path / "disk-1")
    with writer(store) as out, pytest.raises(InfraFault, match=rf"rank 1 of 2 failed: .*{said}"):
        run_two(store, out, staged)
    assert store.list("artifacts/") == []


def of_another_launch(body: dict[str, object]) -> None:
    body["ranks"] = 3


def of_another_file(body: dict[str, object]) -> None:
    body["name"] = "state.safetensors"


def without_parts(body: dict[str, object]) -> None:
    del body["parts"]


def with_other_tensors(body: dict[str, list[dict[str, dict[str, object]]]]) -> None:
    body["parts"][0]["tensors"]["t98"] = body["parts"][0]["tensors"].pop("t01")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_another_launch, r"rank 1 of 2 declares model\.safetensors of rank 1 of 3"),
        (of_another_file, r"rank 1 of 2 declares state\.safetensors of rank 1 of 2, not its own model\.safetensors"),
        (without_parts, r"the declaration of rank 1 of 2 is damaged \(KeyError\('parts'\)\)"),
        (with_other_tensors, r"no rank wrote tensor t01"),
    ],
)
def test_foreign_declarations_are_refused_by_rank(
    store: Store, tmp_path: Path, small_parts: None, change: Callable[[object], None], said: str
) -> None:
    staged = [stage(tmp_path / f"disk-{rank}", rank) for rank in range(2)]

    def changed(rank: int, words: str) -> str:
        if rank == 0 or not words.startswith("{"):
            return words
        body = json.loads(words)
        change(body)
        return json.dumps(body)

    with writer(store) as out, pytest.raises(SchemaError, match=said):
        run_two(store, out, staged, changed)
    assert store.list("artifacts/") == []


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        (FORMS, r"tensor t00 is of two ranks, 0 and 1"),
        ({}, r"no rank wrote tensor t01"),
        (
            {**share(1, 2), "t01": ("I8", (7,))},
            r"tensor t01 is \('I8', \(7,\)\), expected \('U8', \(100001,\)\)",
        ),
        ({**share(1, 2), "t18": ("U8", (0,))}, "were not asked for: t18"),
    ],
)
def test_tensors_that_contradict_are_refused_by_name(
    store: Store, tmp_path: Path, small_parts: None, forms: Mapping[str, Form], said: str
) -> None:
    def read(name: str) -> memoryview:
        size = forms[name][1][0]
        return content(name) if FORMS.get(name) == forms[name] else memoryview(bytes(size))

    staged = [stage(tmp_path / "disk-0", 0), stage(tmp_path / "disk-1", 1, forms, read)]
    with writer(store) as out, pytest.raises(SchemaError, match=said):
        run_two(store, out, staged)
    assert store.list("artifacts/") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda store, key: store.delete(key), "lost .*model-00001"),
        (lambda store, key: (store.delete(key), store.create(key, b"x")), r"model-00001.* has 1 bytes in the store"),
        (lambda store, key: store.create(f"{key}.other", b"x"), r"holds model-00001.*other, which no rank declared"),
    ],
)
def test_an_attempt_that_differs_from_the_declarations_is_refused(
    store: Store, tmp_path: Path, small_parts: None, change: Callable[[Store, str], object], said: str
) -> None:
    staged = [stage(tmp_path / f"disk-{rank}", rank) for rank in range(2)]

    def changed(rank: int, words: str) -> str:
        if rank == 0 and words == "done" and not done:
            done.append(None)
            change(store, next(key for key in store.list("artifacts/") if "00001-of" in key))
        return words

    done: list[None] = []
    with writer(store) as out, pytest.raises(StoreError, match=said):
        run_two(store, out, staged, changed)
    assert store.list("artifacts/") == []


def test_a_single_part_becomes_the_single_file(store: Store, tmp_path: Path) -> None:
    staged = [stage(tmp_path / "disk-0", 0, {}), stage(tmp_path / "disk-1", 1, FORMS)]
    with writer(store, "1" * 64) as out:
        run_two(store, out, staged)
        assert out.commit().names() == [NAME]
    found = find_artifact(store, "thing", "1" * 64)
    assert found is not None and found.ref.digest == digest_of_one_writer(store)
    assert TensorFiles(found.directory(), NAME).forms == FORMS


def test_a_rank_may_work_longer_than_the_others_wait_for_a_lost_one() -> None:
    threads = Threads(lambda rank, words: words, lambda rank: None, timeout_s=1.5)
    found: list[int] = []

    def work() -> int:
        time.sleep(4.0)
        return 1

    other = threading.Thread(target=lambda: found.append(in_step(work, threads.of(1), 1)))
    other.start()
    assert in_step(lambda: 0, threads.of(0), 0) == 0
    other.join(10)
    assert found == [1]


def test_the_error_of_one_rank_names_it_to_the_others() -> None:
    threads = Threads(lambda rank, words: words, lambda rank: None)
    own: list[BaseException] = []

    def fail() -> None:
        raise StoreError("disk is full")

    def run() -> None:
        try:
            in_step(fail, threads.of(1), 1)
        except StoreError as error:
            own.append(error)

    other = threading.Thread(target=run)
    other.start()
    with pytest.raises(InfraFault, match=r"rank 1 of 2 failed: disk is full"):
        in_step(lambda: None, threads.of(0), 0)
    other.join(10)
    assert str(own[0]) == "disk is full"


def test_rank_that_is_stopped_by_a_signal_waits_until_its_work_has_stopped() -> None:
    class Stopped(Exception):
        pass

    def stop(number: int, _: object) -> None:
        raise Stopped

    asked, ended, before = threading.Event(), list[float](), signal.signal(signal.SIGTERM, stop)

    def work() -> None:
        asked.wait(30)
        time.sleep(0.5)  # the file that is being stored
        ended.append(time.monotonic())

    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Stopped):
            in_step(work, lambda state: [state], 0, asked.set)
        assert ended
    finally:
        signal.signal(signal.SIGTERM, before)
