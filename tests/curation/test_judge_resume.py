"""Grading killed at a random instant: what was answered is not asked again. And our own server as a judge."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from judge_server import judge_server, scored
from reward_rows import Bench, byte_pairs, episode, grade, rollouts

from contracts.store import LocalStore
from curation.rewards import RewardConfig
from tests.inference.conftest import write_checkpoint

EPISODES, IN_FLIGHT = 60, 4
GRADER = """
import sys
from reward_rows import Bench, grade
from contracts.artifacts import find_artifact
from contracts.store import LocalStore
from curation.rewards import RewardConfig
store = LocalStore(__import__("pathlib").Path(sys.argv[1]))
grade(store, find_artifact(store, "rollouts", "0" * 64), RewardConfig.model_validate_json(sys.argv[2]), Bench())
"""


def judging(url: str, **changes: object) -> RewardConfig:
    component = {
        "kind": "judge",
        "name": "review",
        "weight": 1.0,
        "model": "m",
        "template": "{diff}",
        "structured": "none",
        "endpoint": {"url": url, "concurrency": IN_FLIGHT},
        **changes,
    }
    return RewardConfig.model_validate({"max_ungraded": 1.0, "components": [component]})


def test_a_killed_grading_asks_for_no_kept_answer_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    played = rollouts(store, [episode(str(index), b"right %d" % index) for index in range(EPISODES)])
    with judge_server(lambda path, body: scored(5)) as server:
        server.delay_s = 0.2
        config = judging(f"{server.url}/v1")
        where = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        command = [sys.executable, "-c", where + GRADER, store.url, config.model_dump_json()]
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
        while len(server.asked) < EPISODES // 4 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was killed at work"
        kept = len(store.list("judgements/"))
        assert 0 < kept < EPISODES
        server.delay_s = 0.0
        graded = grade(store, played, config)
    times = Counter(body["messages"][1]["content"] for body in server.asked)
    assert len(times) == EPISODES and max(times.values()) <= 2
    assert sum(count - 1 for count in times.values()) <= IN_FLIGHT, "only what was in flight was asked twice"
    assert graded.rewards["reward"].null_count == 0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """A random policy behind our own server."""
    folder = write_checkpoint(tmp_path / "policy", 0, vocab_size=300, max_position_embeddings=4096)
    (folder / "tokenizer.json").write_text(byte_pairs().to_str())
    command = [sys.executable, "-m", "inference", "serve", "--policy", str(folder), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r" at (http://\S+/v1)", process.stdout.readline())
    assert found
    yield found[1]
    process.send_signal(signal.SIGINT)
    process.wait(30)


@pytest.mark.slow
def test_own_server_works_as_judge_endpoint(tmp_path: Path, served: str) -> None:
    store = LocalStore(tmp_path / "store")
    played = rollouts(store, [episode("a"), episode("b", b"wrong")])
    graded = grade(store, played, judging(served, max_tokens=8))
    assert graded.rewards["reward"].to_pylist() == [None, None] and graded.rewards["solved"].to_pylist() == [
        True,
        False,
    ]
    assert all("the answer is not" in reason for reason in graded.evidence["reason"].to_pylist())
    kept = store.list("judgements/")
    assert len(kept) == 2 and b'"served":' in store.get(kept[0])
    refused = grade(store, played, judging(served, structured="json_schema"), Bench())
    assert all("answered 4" in reason for reason in refused.evidence["reason"].to_pylist())
