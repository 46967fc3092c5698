"""A small store with one whole iteration in it, made by the real writers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.chat import SPECIAL_TOKENS, ChatTokenizer, ToolCallText
from contracts.digests import digest_of
from contracts.episodes import (
    Episode,
    Outcome,
    Slot,
    TokenRole,
    TokenSequence,
    ToolCallRecord,
    episode_id,
    episodes_table,
    sequences_table,
    telemetry_table,
)
from contracts.store import Store
from contracts.tasks import Split, Task, tasks_table
from curation.dataset import MEMBERS, TRAIN
from curation.rewards import REWARDS
from resources.refs import write_ref
from resources.registry import Registry

EXPERIMENT = "tiny"
DIFF = (
    b"diff --git a/app.py b/app.py\n--- a/app.py\n+++ b/app.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+ "
    b"   return a + b\n"
)


@dataclass(frozen=True)
class History:
    """The artifacts of the store by name, and its episodes."""

    store: Store
    artifacts: dict[str, Artifact]
    solved: Episode
    """In group 0, kept by the dataset."""
    failed: Episode
    """In group 1, left out: its group shows no variance."""

    def digest(self, name: str) -> str:
        return self.artifacts[name].ref.digest


Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs `triplane` with the arguments given."""


def write_history(store: Store) -> History:
    """One iteration: base policy, rollouts of two groups, rewards, dataset, checkpoint, evaluation, decision."""
    made: dict[str, Artifact] = {}

    def commit(
        name: str, kind: str, parents: dict[str, str], fill: Callable[[ArtifactWriter], None], **meta: Any
    ) -> None:
        refs = {role: made[parent].ref for role, parent in parents.items()}
        # a trainer state has the key of its checkpoint
        key = digest_of([name.removesuffix("_state"), {role: ref.digest for role, ref in refs.items()}])
        config = {"step": name, "experiment": EXPERIMENT, "iteration": "0000"}
        with ArtifactWriter(store, kind, key, parents=refs, config=config, code_version="1") as out:
            fill(out)
            made[name] = out.commit(meta)

    tokenizer = byte_tokenizer()
    task = Task(
        "add-0001",
        "sum",
        Split.TRAIN,
        "fix app.py: add returns the sum",
        {"app.py": b"def add(a, b):\n    return a - b\n"},
        {"tests/test_hidden.py": b"from app import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"},
        ("tests/test_hidden.py::test_add",),
        DIFF,
        {},
    )
    commit("suite", "task_suite", {}, lambda out: out.add_table("tasks.parquet", tasks_table([task])), tasks=1)
    commit("base", "checkpoint", {}, lambda out: _checkpoint(out, tokenizer, 0), step=0, forward_recipe="w8")
    commit("base_state", "trainer_state", {}, lambda out: out.add_json("state.json", {"step": 0}))
    start = {"policy": "base", "task_suite": "suite"}
    commit("inputs", "iteration_inputs", start, lambda out: out.add_json("inputs.json", {"iteration": "0000"}))
    episodes = [
        play(task, tokenizer, made["base"].ref, group=group, sample=sample) for group in range(2) for sample in range(2)
    ]
    commit("rollouts", "rollouts", start | {"inputs": "inputs"}, lambda out: _episodes(out, episodes), episodes=4)
    rewards = rewards_rows(episodes)
    graded = {"rollouts": "rollouts", "task_suite": "suite"}
    commit("rewards", "rewards", graded, lambda out: out.add_table("rewards.parquet", rewards), reward_mean=0.325)
    commit("dataset", "dataset", {"rollouts": "rollouts", "rewards": "rewards"}, lambda out: _dataset(out, episodes))
    trained = {"dataset": "dataset", "checkpoint": "base"}
    commit("next", "checkpoint", trained, lambda out: _checkpoint(out, tokenizer, 1), step=8, forward_recipe="w8")
    commit("next_state", "trainer_state", trained, lambda out: out.add_json("state.json", {"step": 8}))
    for asset, name in (("task_suite", "suite"), ("base_policy", "base")):
        write_ref(store, EXPERIMENT, asset, None, made[name].ref)
    for asset in ("rollouts", "rewards", "dataset"):
        write_ref(store, EXPERIMENT, asset, "0000", made[asset].ref)
    write_ref(store, EXPERIMENT, "iteration_inputs", "0000", made["inputs"].ref)
    write_ref(store, EXPERIMENT, "checkpoint", "0000", made["next"].ref)
    Registry(store, EXPERIMENT).promote(
        made["next"].ref, made["next_state"].ref, parent=made["base"].ref.digest, iteration="0000"
    )
    return History(store, made, episodes[0], episodes[2])


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of single bytes and the chat markup: real, and made in no time."""
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = ByteLevelDecoder()  # type: ignore[assignment]
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def play(task: Task, tokenizer: Tokenizer, policy: ArtifactRef, *, group: int, sample: int) -> Episode:
    """An episode of one edit; group 0 sample 0 edits rightly, the others write nothing that helps."""
    chat, right = ChatTokenizer(tokenizer), (group, sample) == (0, 0)
    slot = Slot(EXPERIMENT, "0000", str(group), f"{task.task_id}-{group}", sample, 0)
    call = ToolCallText("edit", {"path": "app.py", "line": 2, "new": "    return a + b" if right else "    return b"})
    ids, roles = [], []
    for tokens, role in (
        (chat.prompt([("user", task.instruction)]), TokenRole.PROMPT),
        (chat.policy_turn([call]), TokenRole.POLICY),
        (chat.environment_turn(["ok"]), TokenRole.ENVIRONMENT),
        (chat.policy_turn([], "done"), TokenRole.POLICY),
    ):
        ids += tokens
        roles += [int(role)] * len(tokens)
    logprobs = [-0.5 if role == TokenRole.POLICY else None for role in roles]
    record = ToolCallRecord(0, "edit", '{"path":"app.py"}', True, "ok")
    return Episode(
        episode_id=episode_id(slot, "k"),
        group_id=digest_of([task.task_id, group])[:32],
        task_id=task.task_id,
        task_digest=task.digest,
        files_digest=task.files_digest,
        sample=sample,
        attempt=0,
        seed=slot.token_seed,
        policy_version=policy.digest,
        temperature=1.0,
        max_tokens=256,
        outcome=Outcome.COMPLETED,
        turns=2,
        tool_calls=[record],
        format_errors=0,
        final_diff=DIFF if right else b"",
        sequences=[TokenSequence(ids, roles, logprobs, [])],
        telemetry={"seconds": 1.5, "host": "here"},
    )


def rewards_rows(episodes: list[Episode]) -> pa.Table:
    """REWARDS in which only an episode with a diff is solved."""
    return pa.Table.from_pylist(
        [
            {
                "episode_id": episode.episode_id,
                "group_id": episode.group_id,
                "task_id": episode.task_id,
                "reward": 1.1 if episode.final_diff else 0.1,
                "solved": bool(episode.final_diff),
                "components": [
                    {"name": "solved", "value": 1.0 if episode.final_diff else 0.0},
                    {"name": "valid", "value": 0.1},
                ],
                "verdict": "completed",
                "tests_passed": int(bool(episode.final_diff)),
                "tests_total": 1,
            }
            for episode in episodes
        ],
        schema=REWARDS,
    )


def _dataset(out: ArtifactWriter, episodes: list[Episode]) -> None:
    """Keeps group 0, leaves group 1 out."""
    members = [
        {
            "episode_id": episode.episode_id,
            "group_id": episode.group_id,
            "reward": 1.1 if episode.final_diff else 0.1,
            "kept": index < 2,
            "reason": None if index < 2 else "zero_variance",
            "group_reward_mean": 0.6,
            "length": len(episode.sequences[0].token_ids),
        }
        for index, episode in enumerate(episodes)
    ]
    out.add_table("members.parquet", pa.Table.from_pylist(members, schema=MEMBERS))
    out.add_table("train.parquet", pa.Table.from_pylist([], schema=TRAIN))


def _episodes(out: ArtifactWriter, episodes: list[Episode]) -> None:
    out.add_table("episodes.parquet", episodes_table(episodes))
    out.add_table("sequences.parquet", sequences_table(episodes))
    out.add_table("telemetry.parquet", telemetry_table(episodes), telemetry=True)


def _checkpoint(out: ArtifactWriter, tokenizer: Tokenizer, step: int) -> None:
    """What the command line reads of a checkpoint: its tokenizer, and something that differs by step."""
    out.add_bytes("tokenizer.json", tokenizer.to_str().encode())
    out.add_json("config.json", {"step": step})
