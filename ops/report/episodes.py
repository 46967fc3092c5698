"""Episodes for the report's viewer: facts of every episode; tokens, calls and diffs of as many as the page may contain.

Episodes are listed and detailed round by round: the first sample of every group, then the second, and so on. So a
truncated list is a fair sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import SEQUENCES
from contracts.tasks import Task
from ops.report.components import read_evidence
from ops.report.facts import graded_outcome
from ops.report.history import finite
from ops.report.sources import Sources
from ops.report.tokens import Vocabulary
from ops.report.verdicts import read_verdicts
from resources.quarantine import Quarantine

MAX_LISTED = 5_000
"""Maximum number of listed episodes."""
MAX_DETAIL_BYTES = 6_000_000
"""Maximum size of tokens, calls and diffs of all episodes, before compression: limits the page to a few MB."""
TOKEN_BYTES = 9
"""JSON bytes of one token: id, its share of roles and logprobs."""
MAX_RESULT, MAX_DIFF = 4_000, 20_000
"""Maximum characters of one tool result and of one diff."""


def viewer(sources: Sources, tasks: Mapping[str, Task]) -> dict[str, Any]:
    """{"episodes": rows, "tasks": by id, "vocabulary": texts by token id, "total": episodes of the iteration}."""
    rollouts = sources.get("rollouts")
    policy = sources.parent("rollouts", "policy")
    if rollouts is None or policy is None:
        return {"episodes": [], "tasks": {}, "vocabulary": {}, "total": 0}
    table = rollouts.table("episodes.parquet")
    listed = _rounds(table)[:MAX_LISTED]
    detailed = _affordable(rollouts, table, listed)
    vocabulary = Vocabulary(ChatTokenizer.from_directory(policy.path("tokenizer.json").parent))
    rows = table.take(sorted(listed)).to_pylist()
    details = _details(rollouts, [row for row in rows if row["episode_id"] in detailed], vocabulary)
    states = {row["episode_id"]: (row["task_id"], row["final_diff"]) for row in rows if row["episode_id"] in detailed}
    verdicts = read_verdicts(sources.store, states, tasks)
    evidence = read_evidence(sources.get("rewards"), detailed)
    graded, members, telemetry = (
        _by_episode(sources.get(asset), file)
        for asset, file in (
            ("rewards", "rewards.parquet"),
            ("dataset", "members.parquet"),
            ("rollouts", "telemetry.parquet"),
        )
    )
    marks = _marks(sources)
    episodes = []
    for row in rows:
        name = row["episode_id"]
        facts = _facts(row, graded.get(name), members.get(name), telemetry.get(name), tasks.get(row["task_id"]))
        tests = {"tests": verdicts[name]} if name in verdicts else {}
        why = {"evidence": evidence[name]} if name in evidence else {}
        marked = {"quarantine": marks[name]} if name in marks else {}
        episodes.append(facts | details.get(name, {}) | tests | why | marked)
    played = {row["task_id"] for row in rows}
    return {
        "episodes": episodes,
        "tasks": {name: _task(tasks[name]) for name in sorted(played) if name in tasks},
        "vocabulary": {str(token): text for token, text in sorted(vocabulary.texts.items())},
        "total": table.num_rows,
    }


def _marks(sources: Sources) -> dict[str, str]:
    """Marks of the quarantined episodes, as text, by episode."""
    rollouts, rewards = sources.get("rollouts"), sources.get("rewards")
    if rollouts is None or rewards is None:
        return {}
    found = Quarantine(sources.store).episodes(rollouts.ref, rewards.ref)
    return {
        episode: "; ".join(f"mark {mark.number}: {mark.reason}" for mark in marks) for episode, marks in found.items()
    }


def clip(text: str, limit: int) -> str:
    """Beginning of a text, with the length of the omitted rest."""
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit:,} more characters]"


def _rounds(table: pa.Table) -> list[int]:
    """Row numbers, the first of every group before the second of any group."""
    seen: dict[str, int] = {}
    ranked = []
    for index, group in enumerate(table["group_id"].to_pylist()):
        seen[group] = seen.get(group, -1) + 1
        ranked.append((seen[group], index))
    return [index for _, index in sorted(ranked)]


def _affordable(rollouts: Artifact, table: pa.Table, listed: list[int]) -> set[str]:
    lengths = rollouts.table("sequences.parquet", ["episode_id"]).append_column(
        "length", pc.list_value_length(rollouts.table("sequences.parquet", ["token_ids"])["token_ids"])
    )
    tokens: dict[str, int] = {}
    for row in lengths.to_pylist():
        tokens[row["episode_id"]] = tokens.get(row["episode_id"], 0) + row["length"]
    names, diffs = table["episode_id"].to_pylist(), pc.binary_length(table["final_diff"]).to_pylist()
    calls = table["tool_calls"].to_pylist()
    found: set[str] = set()
    left = MAX_DETAIL_BYTES
    for index in listed:
        texts = sum(
            min(MAX_RESULT, len(call["result"])) + min(MAX_RESULT, len(call["arguments"])) for call in calls[index]
        )
        left -= TOKEN_BYTES * tokens.get(names[index], 0) + min(MAX_DIFF, diffs[index]) + texts
        if left < 0:
            break
        found.add(names[index])
    return found


def _details(rollouts: Artifact, rows: list[dict[str, Any]], vocabulary: Vocabulary) -> dict[str, dict[str, Any]]:
    wanted = pa.array([row["episode_id"] for row in rows], pa.string())
    sequences = rollouts.table("sequences.parquet", SEQUENCES.names)
    found: dict[str, dict[str, Any]] = {
        row["episode_id"]: {
            "calls": [_call(call) for call in row["tool_calls"]],
            "diff": clip(row["final_diff"].decode(errors="replace"), MAX_DIFF),
            "sequences": [],
        }
        for row in rows
    }
    for row in sequences.filter(pc.is_in(sequences["episode_id"], wanted)).to_pylist():
        shown = vocabulary.sequence(row["token_ids"], row["token_role"], row["logprobs"])
        found[row["episode_id"]]["sequences"].append(shown)
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "turn": call["turn"],
        "name": call["name"],
        "ok": call["ok"],
        "arguments": clip(call["arguments"], MAX_RESULT),
        "result": clip(call["result"], MAX_RESULT),
    }


def _facts(
    row: Mapping[str, Any],
    graded: Mapping[str, Any] | None,
    member: Mapping[str, Any] | None,
    cost: Mapping[str, Any] | None,
    task: Task | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {name: row[name] for name in ("episode_id", "group_id", "task_id", "sample", "attempt")}
    found |= {name: row[name] for name in ("turns", "policy_tokens", "format_errors", "policy_version")}
    solved = graded["solved"] if graded else None
    found |= {"family": task.family if task else "unknown", "outcome": graded_outcome(row["outcome"], solved)}
    found |= {"ended": row["outcome"], "solved": solved}
    if graded:
        found |= {name: graded[name] for name in ("verdict", "tests_passed", "tests_total")}
        found["findings"] = list(graded.get("findings") or ())
        found["reward"] = finite(graded["reward"])
        found["components"] = {each["name"]: finite(each["value"]) for each in graded["components"] or []}
    if member:
        found |= {"kept": member["kept"], "reason": member["reason"], "length": member["length"]}
        found["group_mean"] = finite(member["group_reward_mean"])
    if cost:
        found["seconds"] = finite(cost["seconds"])
    return found


def _task(task: Task) -> dict[str, Any]:
    return {
        "instruction": clip(task.instruction, MAX_DIFF),
        "reference": clip(task.reference_diff.decode(errors="replace"), MAX_DIFF),
        "tests": list(task.tests),
    }


def _by_episode(artifact: Artifact | None, file: str) -> dict[str, dict[str, Any]]:
    if artifact is None or file not in artifact.names():
        return {}
    return {row["episode_id"]: row for row in artifact.table(file).to_pylist()}
