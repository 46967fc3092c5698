"""The chaos benchmark's judgement: what it counts as lost, left or different, and that its kills reach their
victims.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos_findings import (
    Content,
    account,
    broken_artifacts,
    committed_tasks,
    read_content,
    unnamed_keys,
)
from benchmarks.chaos_kills import kill_all, orders, pick_victims
from benchmarks.faulty_s3 import Weather
from benchmarks.surroundings import surroundings
from contracts.artifacts import ArtifactWriter
from contracts.failpoints import POINTS
from contracts.parts import Parts
from contracts.pointers import Pointer
from contracts.store import LocalStore
from envd.local import LocalEnvd
from envd.sandbox.proctree import descendants
from inference.rollouts.ledger import Sampled

ROOT = Path(__file__).parents[2]


def line(unix: float, tokens: int, group: str = "g", key: str = "k", begun: float = 0.0) -> Sampled:
    return Sampled(unix, 1, key, group, f"e of {group}", 0, 1, tokens, begun)


def test_tokens_are_lost_only_where_a_kill_stands_between_sampling_and_commit() -> None:
    lines = [line(1, 10), line(3, 10), line(1, 5, "committed before"), line(9, 7, "after the last kill")]
    commits = {("k", "g"): 4.0, ("k", "committed before"): 1.5, ("k", "after the last kill"): 10.0}
    found = account(lines, commits, [2.0])
    assert (found.sampled, found.lost_at_most, found.sampled_after_commit) == (32, 10, 0)


def test_a_token_after_the_commit_is_a_finished_group_sampled_again() -> None:
    assert account([line(5, 1)], {("k", "g"): 4.0}, [4.5]).sampled_after_commit == 1
    assert account([line(5, 1, group="task of an evaluation")], {("k", ""): 4.0}, []).sampled_after_commit == 1


def test_committed_task_of_a_killed_evaluation_is_neither_lost_nor_sampled_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    Parts(store, "evaluation_run", "k").add("g", [])
    commits = {**dict.fromkeys(committed_tasks(store), 2.0), ("k", ""): 9.0}
    found = account([line(1, 10), line(1, 5, group="in flight"), line(3, 5, group="in flight")], commits, [2.0])
    assert (found.lost_at_most, found.sampled_after_commit) == (5, 0)
    assert account([line(1, 10), line(3, 10)], commits, [2.0]).sampled_after_commit == 1


def test_what_an_attempt_samples_after_the_kill_that_ends_it_is_lost_and_no_more() -> None:
    """A turn that was sampled while its server was killed ends after the kill."""
    commits, kill = {("k", "g"): 9.0}, 2.0
    replaced, repeated = line(2.1, 10, begun=1.0), line(3, 10, begun=2.5)
    assert account([replaced, repeated], commits, [kill]).lost_at_most == 10
    assert account([replaced], commits, [kill]).lost_at_most == 0  # it survived
    assert account([line(2.4, 10, begun=2.3), repeated], commits, [kill]).lost_at_most == 0


def test_work_that_never_was_committed_counts_as_lost_once() -> None:
    assert account([line(1, 6)], {}, [2.0, 3.0]).lost_at_most == 6


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50))), st.lists(st.floats(0, 100)), st.floats(0, 100))
def test_no_more_is_lost_than_was_sampled(lines: list[tuple[float, int]], kills: list[float], commit: float) -> None:
    found = account([line(*each) for each in lines], {("k", "g"): commit}, kills)
    assert 0 <= found.lost_at_most <= found.sampled


@pytest.mark.parametrize("store", ["local", "s3"])
def test_every_point_of_a_store_is_hit_about_equally_often(store: str) -> None:
    dealt = Counter(order.point for order in orders(50, store, random.Random(1)))
    assert dealt.total() == 50 and set(dealt) <= set(POINTS)
    often = [count for point, count in dealt.items() if point != "snapshot-committed"]
    assert max(often) - min(often) <= 1 and dealt["snapshot-committed"] == 1
    assert ("store-write" in dealt) == (store == "local") and ("multipart-under-way" in dealt) == (store == "s3")
    assert [*map(str, orders(50, store, random.Random(1)))] == [*map(str, orders(50, store, random.Random(1)))]


def test_an_artifact_that_is_missing_new_or_other_differs(tmp_path: Path) -> None:
    def store(name: str, **artifacts: bytes) -> LocalStore:
        made = LocalStore(tmp_path / name)
        for kind, data in artifacts.items():
            with ArtifactWriter(made, kind, "0" * 64, parents={}, config={}, code_version="1") as out:
                out.add_bytes("data", data)
                out.commit()
        return made

    calm = read_content(store("calm", same=b"1", other=b"1", missing=b"1"))
    found = read_content(store("found", same=b"1", other=b"2", new=b"1"))
    assert [name.split("/")[0] for name in found.differing(calm)] == ["missing", "new", "other"]
    assert calm.differing(Content(calm.artifacts, [])) == []


def test_what_nobody_names_and_what_is_half_is_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with ArtifactWriter(store, "thing", "0" * 64, parents={}, config={}, code_version="1") as out:
        out.add_bytes("data", b"1")
        artifact = out.commit()
    assert unnamed_keys(store) == [] and broken_artifacts(store) == []
    store.create(f"artifacts/thing/{'1' * 64}/attempt/data", b"lost")
    Pointer(store, "claims/k/groups/g").advance({"owner": "dead"}, 0)
    assert [key.split("/")[0] for key in unnamed_keys(store)] == ["artifacts", "pointers"]
    artifact.path("data").unlink()
    assert broken_artifacts(store) == [artifact.ref.uri]


def test_victims_are_found_below_the_command_and_die() -> None:
    code = (
        "import time\nfrom envd.local import LocalEnvd\nwith LocalEnvd('plain') as server: print(1, flush=True);"
        " time.sleep(60)"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    assert command.stdout is not None and command.stdout.readline()
    chance = random.Random(0)
    (envd,), (zygote,) = (pick_victims(victim, command.pid, chance) for victim in ("envd", "zygote"))
    below = descendants(command.pid)
    assert below[envd] == command.pid and below[zygote] == envd
    assert pick_victims("trainer", command.pid, chance) == [] and pick_victims("sandbox", command.pid, chance) == []
    assert list(pick_victims("group", command.pid, chance)) == [command.pid], "the server has a session of its own"
    everything = pick_victims("tree", command.pid, chance)
    assert {command.pid, envd, zygote} <= set(everything)
    assert kill_all(everything) and command.wait(10) == -signal.SIGKILL
    command.stdout.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/cmdline").exists() and _lives(pid) for pid in everything):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not kill_all([command.pid])
    with LocalEnvd("plain"):
        """The next server sweeps what these left."""


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_weather_comes_by_seed_and_rate() -> None:
    first, again, none = (Weather(rate, 7) for rate in (0.5, 0.5, 0.0))
    taken = [first.take("PUT") for _ in range(100)]
    assert [fault and fault.kind for fault in taken] == [
        fault and fault.kind for fault in (again.take("PUT") for _ in taken)
    ]
    assert 30 < first.counts.total() < 70 and set(first.counts) == {"fail", "slow", "lose_answer"}
    assert all(none.take("GET") is None for _ in range(100))


def test_surroundings_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOS_A", "before")
    with surroundings({"CHAOS_A": "in", "CHAOS_B": "in"}):
        assert (os.environ["CHAOS_A"], os.environ["CHAOS_B"]) == ("in", "in")
    assert os.environ["CHAOS_A"] == "before" and "CHAOS_B" not in os.environ


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arguments", [["--store", "local"], ["--store", "s3", "--faults", "true"]])
def test_a_few_kills_change_nothing_and_leave_nothing(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks", "chaos", "--kills", "6", "--iterations", "1", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    found = json.loads(done.stdout)
    assert done.returncode == 0, [goal for goal in found["goals"] if not goal["met"]]
    assert found["metrics"]["kills_at_points"] + found["metrics"]["kills_at_random"] == 6
    assert found["rows"][0]["artifacts compared"] > 20
