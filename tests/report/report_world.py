"""Two iterations in a small store: the command line's history, evaluated and decided, and one whose policy writes
hostile text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.chat import ChatTokenizer, ToolCallText
from contracts.digests import digest_of
from contracts.episodes import Episode, TokenRole, TokenSequence, ToolCallRecord, episodes_table, sequences_table
from contracts.episodes import telemetry_table as telemetry
from contracts.store import Store
from contracts.tasks import Split, Task, tasks_table
from curation.dataset import DatasetConfig, build_dataset
from curation.rewards import EVIDENCE
from curation.verdicts import TestVerdict, Verdict, verdict_key
from ops.evaluation import compare, measure
from resources.refs import write_ref
from tests.cli.cli_history import DIFF, EXPERIMENT, History, byte_tokenizer, play, rewards_rows, write_history

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- \u202e\x1b[31m ${alert(3)} é 🙂"
METRICS = (
    b'{"step": 8, "rows": 4}\n{"step": 9, "loss": 0.25, "entropy": 1.5, "old_kl": 0.0, "grad_norm": 2.0,'
    b' "clip_fraction": 0.1}\n'
)


@dataclass(frozen=True)
class World:
    """The store and what stands in it."""

    history: History
    hostile: list[Episode]
    task: Task

    @property
    def store(self) -> Store:
        return self.history.store


def write_world(store: Store) -> World:
    """Iteration 0000 went live; 0001, the hostile one, has rollouts, rewards and a dataset, and is still training."""
    history = write_history(store)
    made = history.artifacts
    base, candidate, suite = made["base"].ref, made["next"].ref, made["suite"].ref
    commit(store, "prompts", {"task_suite": suite}, {"prompts.json": {"groups": []}})
    runs = {
        f"{who}_{split.value}": evaluation_run(store, history, split, policy, solved)
        for who, policy, solved in (("parent", base, 1), ("candidate", candidate, 3))
        for split in (Split.GATE, Split.HELD_OUT)
    }
    body = {
        split.value: (
            compare(runs[f"candidate_{split.value}"], runs[f"parent_{split.value}"], 0.9)
            | {"measures": {who: measure(runs, who, split.value, 1.0) for who in ("candidate", "parent")}}
        )
        for split in (Split.GATE, Split.HELD_OUT)
    }
    refs = {role: run.ref for role, run in runs.items()} | {"candidate": candidate, "parent": base}
    evaluation = commit(store, "evaluation", refs, {"evaluation.json": body})
    decided = {
        "decision": "live",
        "reasons": ["good enough"],
        "candidate": candidate.model_dump(),
        "parent": base.model_dump(),
        "pointer_number": 1,
    }
    decision = commit(
        store, "sampler", {"candidate": candidate, "evaluation": evaluation.ref}, {"decision.json": decided}
    )
    write_ref(store, EXPERIMENT, "evaluation", "0000", evaluation.ref)
    write_ref(store, EXPERIMENT, "sampler", "0000", decision.ref)
    return write_hostile(store, history)


def write_hostile(store: Store, history: History) -> World:
    """Iteration 0001."""
    policy = history.artifacts["next"].ref
    task = Task(
        f"task-{HOSTILE}", HOSTILE, Split.TRAIN, f"fix {HOSTILE}", {"app.py": b""}, {}, ("tests/t.py::test",), DIFF, {}
    )
    suite = commit(store, "task_suite", {}, {}, lambda out: out.add_table("tasks.parquet", tasks_table([task])))
    inputs = commit(store, "iteration_inputs", {"policy": policy, "task_suite": suite.ref}, {"inputs.json": {}})
    episodes = [hostile_episode(task, policy, sample) for sample in range(3)]
    parents = {"policy": policy, "task_suite": suite.ref, "iteration_inputs": inputs.ref}
    rollouts = commit(store, "rollouts", parents, {}, lambda out: add_episodes(out, episodes))

    def graded(out: ArtifactWriter) -> None:
        out.add_table("rewards.parquet", rewards_rows(episodes))
        out.add_table("evidence.parquet", hostile_evidence(episodes[0]), telemetry=True)

    rewards = commit(store, "rewards", {"rollouts": rollouts.ref}, {}, graded)
    dataset = commit(
        store,
        "dataset",
        {"rollouts": rollouts.ref, "rewards": rewards.ref},
        {},
        lambda out: build_dataset(rollouts, rewards, DatasetConfig(), out),
    )
    trained = commit(
        store, "checkpoint", {"dataset": dataset.ref}, {}, lambda out: out.add_bytes("metrics.jsonl", METRICS)
    )
    made = {
        "iteration_inputs": inputs,
        "rollouts": rollouts,
        "rewards": rewards,
        "dataset": dataset,
        "checkpoint": trained,
    }
    for asset, artifact in made.items():
        write_ref(store, EXPERIMENT, asset, "0001", artifact.ref)
    failed = TestVerdict(name="tests/t.py::test", status="failed", message=HOSTILE)
    verdict = Verdict(solved=False, exit="completed", tests=[failed])
    store.create(verdict_key(task, episodes[1].final_diff), verdict.model_dump_json().encode())
    return World(history, episodes, task)


def hostile_evidence(episode: Episode) -> pa.Table:
    """A judge that repeats what it was told, and one that was led to say nothing of use."""
    known = {
        "episode_id": episode.episode_id,
        "component": "review",
        "raw": 0.75,
        "value": 0.5,
        "reason": HOSTILE,
        "answers": [HOSTILE],
    }
    nothing = known | {"component": "style", "raw": None, "value": None, "reason": "the answer is not JSON"}
    return pa.Table.from_pylist([known, nothing], schema=EVIDENCE)


def hostile_episode(task: Task, policy: ArtifactRef, sample: int) -> Episode:
    """An episode in which every text that a policy can influence tries to become markup, with some forced tokens.

    Sample 0 counts as solved by its diff.
    """
    tokenizer = byte_tokenizer()
    chat = ChatTokenizer(tokenizer)
    ids, roles = [], []
    for tokens, role in (
        (chat.prompt([("user", task.instruction)]), TokenRole.PROMPT),
        (chat.policy_turn([ToolCallText("edit", {"path": HOSTILE})], HOSTILE), TokenRole.POLICY),
        (chat.environment_turn([HOSTILE]), TokenRole.ENVIRONMENT),
    ):
        ids += tokens
        forced = role == TokenRole.POLICY
        roles += [int(TokenRole.FORCED if forced and place % 5 == 4 else role) for place in range(len(tokens))]
    logprobs = [-0.01 * index if role == TokenRole.POLICY else None for index, role in enumerate(roles)]
    episode = play(task, tokenizer, policy, group=0, sample=sample)
    return replace(
        episode,
        tool_calls=[ToolCallRecord(0, HOSTILE, f'{{"path":"{HOSTILE}"}}', False, HOSTILE)],
        final_diff=b"" if sample else DIFF + b"+" + HOSTILE.encode() + b"\xff\n",
        sequences=[TokenSequence(ids, roles, logprobs, [])],
    )


def evaluation_run(store: Store, history: History, split: Split, policy: ArtifactRef, solved: int) -> Artifact:
    """Four episodes on one split, of which the first `solved` are solved, each with a final state of its own."""
    played = [
        replace(history.failed, episode_id=f"{split.value}-{policy.short}-{index}", final_diff=b"%d" % index)
        for index in range(4)
    ]
    rows = rewards_rows(played).set_column(4, "solved", [[index < solved for index in range(4)]])
    parents = {"policy": policy, "task_suite": history.artifacts["suite"].ref}
    costs = telemetry(played)

    def fill(out: ArtifactWriter) -> None:
        out.add_table("episodes.parquet", episodes_table(played))
        out.add_table("rewards.parquet", rows)
        out.add_table("telemetry.parquet", costs, telemetry=True)

    return commit(store, "evaluation_run", parents, {}, fill, {"split": split.value})


def commit(
    store: Store,
    kind: str,
    parents: dict[str, ArtifactRef],
    files: dict[str, Any],
    fill: Callable[[ArtifactWriter], Any] = lambda out: None,
    config: dict[str, Any] | None = None,
) -> Artifact:
    """An artifact of these files."""
    key = digest_of([kind, {role: ref.digest for role, ref in parents.items()}, config, sorted(files)])
    with ArtifactWriter(store, kind, key, parents=parents, config=config or {}, code_version="1") as out:
        for name, value in files.items():
            out.add_json(name, value)
        fill(out)
        return out.commit({})


def add_episodes(out: ArtifactWriter, episodes: list[Episode]) -> None:
    """The three tables of rollouts."""
    out.add_table("episodes.parquet", episodes_table(episodes))
    out.add_table("sequences.parquet", sequences_table(episodes))
    out.add_table("telemetry.parquet", telemetry(episodes), telemetry=True)
