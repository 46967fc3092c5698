"""An engine behind a bad network: what it loses is sampled again to the same bits, and what another policy sampled is
refused.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_engine import Faults, faulty_engine
from rollouts_script import POLICY, GraderByDiff, make_plan, make_tasks
from test_with_builtin_engine import random_policy

from contracts.artifacts import list_artifacts
from contracts.chat import ChatTokenizer
from contracts.errors import InfraFault
from contracts.store import LocalStore
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.engines.openai import OpenAIEngine
from inference.errors import StaleVersion
from inference.rollouts.merge import merge_groups
from inference.rollouts.worker import run_shard

__all__ = ["random_policy"]
TASKS = make_tasks(6)
PLAN = make_plan(TASKS, 3, group_size=2, max_tokens=200, max_turn_tokens=60, temperature=4.0, refill=False)


@pytest.fixture(scope="module")
def server(random_policy: Path) -> Iterator[str]:
    """host:port of a real server process."""
    command = ["serve", "--policy", str(random_policy), "--listen", "127.0.0.1:0", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "inference", *command, "--version", POLICY.digest], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"at http://(\S+)/v1", line)
    assert found, line
    yield found[1]
    process.terminate()
    process.wait(30)


@pytest.fixture
def faults(server: str) -> Iterator[Faults]:
    with faulty_engine(server) as proxy:
        yield proxy


def sample(store: LocalStore, faults: Faults, envd: LocalEnvd, tokenizer: ChatTokenizer, timeout_s: float = 60) -> str:
    """Content digest of the merged rollouts."""

    async def run() -> None:
        engine = OpenAIEngine(faults.base_url, "policy", version=POLICY.digest, timeout_s=timeout_s, retries=1)
        try:
            async with SandboxClient(envd.address) as client:
                await run_shard(
                    PLAN,
                    0,
                    engine=engine,
                    sandboxes=client,
                    tokenizer=tokenizer,
                    tasks=TASKS,
                    store=store,
                    grader=GraderByDiff(),
                    vocabulary=tokenizer.vocabulary_size,
                )
        finally:
            await engine.close()

    asyncio.run(run())
    return merge_groups(PLAN, store).ref.digest


@pytest.fixture(scope="module")
def undisturbed(
    server: str, envd: LocalEnvd, tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> str:
    with faulty_engine(server) as calm:
        return sample(LocalStore(tmp_path_factory.mktemp("calm")), calm, envd, tokenizer)


@pytest.mark.parametrize("kind", ["drop", "fail", pytest.param("hang", marks=pytest.mark.slow)])
def test_lost_engine_reply_is_retried_with_equal_groups(
    kind: str, faults: Faults, undisturbed: str, tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    faults.coming = [None, kind, None, kind]  # type: ignore[list-item]
    assert sample(LocalStore(tmp_path), faults, envd, tokenizer, timeout_s=6 if kind == "hang" else 60) == undisturbed
    assert faults.met == [kind, kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("null", "deep", "too_long", "short_spans", "foreign_token", "negative_token", "text_token"),
        *("null_logprob", "nan_logprob", "positive_logprob", "text_logprob", "without_stop", "empty"),
    ],
)
def test_reply_that_no_policy_samples_is_retried_and_not_committed(
    kind: str, faults: Faults, undisturbed: str, tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    faults.coming = [None, kind]
    assert sample(LocalStore(tmp_path), faults, envd, tokenizer) == undisturbed
    assert faults.met == [kind]


def test_what_another_policy_sampled_is_refused_and_not_committed(
    faults: Faults, undisturbed: str, tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    store = LocalStore(tmp_path)
    faults.coming = ["wrong_version"]
    with pytest.raises(StaleVersion, match="engine sampled with policy eeeeeeeeeeee, the plan asks for dddddddddddd"):
        sample(store, faults, envd, tokenizer)
    assert sample(store, faults, envd, tokenizer) == undisturbed


def test_unreachable_engine_fails_the_step_and_scores_nothing(
    faults: Faults, undisturbed: str, tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    store = LocalStore(tmp_path)
    faults.coming = ["drop"] * 200
    with pytest.raises(InfraFault, match=r"can't be reached .* gave up after 3 attempts"):
        sample(store, faults, envd, tokenizer)
    for group in list_artifacts(store, "group"):
        assert group.meta["infra_errors"] == 0, "an outage never becomes an episode"
    faults.coming = []
    assert sample(store, faults, envd, tokenizer) == undisturbed
