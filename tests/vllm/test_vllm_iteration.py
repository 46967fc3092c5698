"""The whole graph on a real vLLM, killed in the middle of its rollouts: what is committed stays, what was sampled is
the policy's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from contracts.artifacts import Artifact, list_artifacts
from contracts.episodes import read_episodes
from inference.engines.guarded import SCRATCH
from tests.acceptance.laboratory import ROOT, Laboratory, processes_of
from tests.acceptance.trainer_scores import trainer_scores
from tests.vllm.conftest import real_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]
ITERATIONS = 2
CONCURRENCY, GROUPS = 4, 64
TOLERANCE = 1e-4


@dataclass
class Run:
    """Two iterations, and what was there when vLLM's engine was killed."""

    laboratory: Laboratory
    before: dict[str, tuple[str, float]]
    """Committed groups by key: the attempt that won, and when."""
    log: str


def experiment(folder: Path) -> Path:
    """The tiny experiment on vLLM, a few episodes at a time so that groups are committed one after the other."""
    values: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "dagster" / "tiny.yaml").read_text())
    values["engine"] = real_config(max_restarts=2).model_dump(mode="json", exclude_defaults=True) | {"kind": "vllm"}
    values["tasks"] |= {"train": GROUPS + 8}
    values["prompts"] = {"groups": GROUPS, "reserve": 2, "workers": 1}
    values["rollouts"] |= {"concurrency": CONCURRENCY, "episode_timeout_s": 900}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def committed(laboratory: Laboratory) -> dict[str, tuple[str, float]]:
    return {
        group.ref.key: (group.manifest.attempt, group.manifest.created_unix)
        for group in list_artifacts(laboratory.store, "group")
    }


def engine_processes(temporary: Path) -> set[int]:
    """vLLM's engine processes that keep their files below `temporary`; it names them itself."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            named = b"VLLM::EngineCor" in (entry / "cmdline").read_bytes()
            if named and str(temporary).encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def held_in_flight(laboratory: Laboratory, temporary: Path) -> dict[str, tuple[str, float]]:
    """Stop vLLM's engine where it stands: groups that wait for a token stay in flight, the others are soon committed
    and are returned.
    """
    engines = engine_processes(temporary)
    assert engines
    for each in engines:
        os.kill(each, signal.SIGSTOP)
    before, found = {}, committed(laboratory)
    while len(found) > len(before):
        time.sleep(1)
        before, found = found, committed(laboratory)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("vllm")
    temporary = Path(tempfile.mkdtemp(prefix="v-", dir="/tmp"))  # short: sockets lie there
    laboratory = Laboratory(folder, experiment(folder), environment={"TMPDIR": str(temporary)})
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            laboratory.command("iterate", *laboratory.settings, "-n", str(ITERATIONS), "--json"),
            cwd=folder,
            env=laboratory.env,
            stdout=log,
            stderr=log,
        )
        try:
            groups = folder / ".triplane" / "store" / "artifacts" / "group"
            while len(list(groups.glob("*/manifest.json"))) < 3:
                assert child.poll() is None, f"ended before three groups were committed: {tail(log)}"
                time.sleep(0.01)
            before = held_in_flight(laboratory, temporary)
            for victim in engine_processes(temporary):
                os.kill(victim, signal.SIGKILL)
            child.wait(1800)
        finally:
            child.terminate()
            child.wait()
        assert child.returncode == 0, tail(log)
        yield Run(laboratory, before, tail(log))
    assert list(temporary.glob(f"{SCRATCH}*")) == []
    shutil.rmtree(temporary)


def tail(log: Any) -> str:
    log.seek(0)
    return str(log.read()[-3000:])


def test_killing_vllm_costs_only_the_episodes_in_flight(run: Run) -> None:
    after = committed(run.laboratory)
    assert 3 <= len(run.before) < GROUPS, "the kill came in the middle"
    assert {key: after[key] for key in run.before} == run.before, "a committed group is never sampled again"
    rollouts = run.laboratory.artifact("rollouts", "0000")
    episodes = rollouts.table("episodes.parquet")
    assert "infra_error" not in episodes["outcome"].to_pylist()
    groups = dict(zip(*(episodes[name].to_pylist() for name in ("episode_id", "group_id")), strict=True))
    told = rollouts.table("telemetry.parquet").select(["episode_id", "retries"]).to_pylist()
    retried = [groups[row["episode_id"]] for row in told if row["retries"]]
    assert 1 <= len(retried) <= CONCURRENCY, "what was in flight was sampled again, and nothing else"
    kept = {
        group.manifest.config["group_id"]
        for group in list_artifacts(run.laboratory.store, "group")
        if group.ref.key in run.before
    }
    assert not kept & set(retried)


def test_every_iteration_sampled_with_the_policy_it_was_given(run: Run) -> None:
    acting = []
    for iteration in ("0000", "0001"):
        rollouts = run.laboratory.artifact("rollouts", iteration)
        policy = policy_of(run.laboratory, rollouts)
        acting.append(policy.ref.digest)
        check_logprobs(rollouts, policy)
    assert acting[1] == run.laboratory.artifact("checkpoint", "0000").ref.digest != acting[0], "weights were replaced"


def test_candidates_were_evaluated_with_their_own_weights(run: Run) -> None:
    candidates = {run.laboratory.artifact("checkpoint", iteration).ref.digest for iteration in ("0000", "0001")}
    played = list(list_artifacts(run.laboratory.store, "evaluation_run"))
    assert candidates <= {each.manifest.parents["policy"].digest for each in played}
    for each in played:
        check_logprobs(each, policy_of(run.laboratory, each))


def test_nothing_of_vllm_is_left(run: Run) -> None:
    assert list(processes_of(run.laboratory.folder)) == []


def policy_of(laboratory: Laboratory, sampled: Artifact) -> Artifact:
    wanted = sampled.manifest.parents["policy"]
    return next(
        each
        for kind in ("checkpoint", "base_policy")
        for each in list_artifacts(laboratory.store, kind)
        if each.ref == wanted
    )


def check_logprobs(sampled: Artifact, policy: Artifact) -> None:
    """Recorded log-probabilities are those that the trainer computes with the policy's checkpoint, and their spans name
    it.
    """
    sequences = [
        sequence
        for episode in read_episodes(sampled.table("episodes.parquet"), sampled.table("sequences.parquet"))
        for sequence in episode.sequences
    ]
    assert {version for each in sequences for version, _, _ in each.policy_spans} == {policy.ref.digest}
    scores = trainer_scores(policy.directory(), [each.token_ids for each in sequences])
    gaps = [
        abs(logprob - float(score))
        for each, found in zip(sequences, scores, strict=True)
        for logprob, score in zip(each.logprobs, found, strict=True)
        if logprob is not None
    ]
    assert len(gaps) > 50
    assert max(gaps) < TOLERANCE
