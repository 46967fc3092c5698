"""Accepted episodes of iterations, as rows of a mixture: rejection sampling over what was sampled and graded before.

episodes + rewards -> reason per episode -> members.parquet (every episode, as in a dataset: the ledger reads it)
sequences of those without a reason      -> train.parquet, validation.parquet
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.chat import TURN_END, TURN_START, ChatTokenizer
from contracts.digests import digest_of
from contracts.episodes import Outcome, TokenRole
from curation.errors import MixtureError
from curation.mixture.config import EpisodesSource
from curation.mixture.reserved import Reserved
from curation.mixture.rows import ROWS, write_rows

ACCEPTED = "accepted_episodes"
"""Kind of the artifact."""
ACCEPTED_VERSION = "2"
REASONS = ("quarantined", "not_graded", "cheated", "not_solved", "not_ended", "untrained", "surplus", "reserved")
"""Reasons to leave an episode out; if several apply, the first in this order is recorded. None is one of a dataset's
`curation.dataset.COUNTED`: an episode that is left out here shapes nothing.

quarantined: an operator marked it. not_graded: no verdict. cheated: it tampered with its verdict. not_solved: hidden
tests failed. not_ended: it ran out of tokens, turns or time, or ended with a malformed call. untrained: the policy
sampled no token. surplus: more than `per_task`. reserved: its task is one of the experiment's gate or reports.
"""
MEMBERS = pa.schema([("episode_id", pa.string()), ("kept", pa.bool_()), ("reason", pa.string())])
"""One row per episode of the iterations, in their order."""
_USER = re.compile(f"{re.escape(TURN_START)}user\n(.*?){re.escape(TURN_END)}", re.DOTALL)


@dataclass(frozen=True)
class Graded:
    """One iteration's episodes with their verdicts."""

    place: str
    """Experiment and iteration, for errors."""
    rollouts: Artifact
    rewards: Artifact
    quarantined: Collection[str] = ()
    """Ids of episodes."""


def build_accepted(
    iterations: Sequence[Graded],
    config: EpisodesSource,
    tokenizer: ChatTokenizer,
    reserved: Reserved,
    out: ArtifactWriter,
) -> dict[str, object]:
    """Stage the rows of the accepted episodes in `out`; the caller commits them. Returns facts for the manifest.

    Raises MixtureError if an episode is of a reserved task and the config refuses these, or if nothing is accepted.
    """
    reasons: dict[str, str | None] = {}
    tasks: dict[str, str] = {}
    for each in iterations:
        reasons |= _judged(each)
        columns = each.rollouts.table("episodes.parquet", ["episode_id", "task_id"])
        tasks |= dict(zip(*(column.to_pylist() for column in columns.columns), strict=True))
    _leave_surplus(reasons, tasks, config.per_task)
    counts = write_rows(
        out, _tables(iterations, reasons, tasks, tokenizer, reserved, refuse=config.reserved == "refuse")
    )
    left_out = {name: sum(reason == name for reason in reasons.values()) for name in REASONS}
    if not counts["train"]:
        places = ", ".join(each.place for each in iterations)
        why = ", ".join(f"{count} {name}" for name, count in left_out.items() if count)
        raise MixtureError(f"no episode of {places} is accepted ({why or 'none was sampled'}): leave the source out")
    columns = [list(reasons), [reason is None for reason in reasons.values()], list(reasons.values())]
    out.add_table(
        "members.parquet", pa.table([pa.array(*pair) for pair in zip(columns, MEMBERS.types, strict=True)], MEMBERS)
    )
    return {**counts, "accepted": sum(columns[1]), "left_out": left_out}


def user_messages(prompt: str) -> list[str]:
    """Texts of the user's messages in the decoded prompt of an episode."""
    return _USER.findall(prompt)


def _judged(graded: Graded) -> dict[str, str | None]:
    """Reason to leave out each episode, by id; None: accepted."""
    rewards = graded.rewards.table("rewards.parquet", ["episode_id", "solved", "verdict"]).to_pylist()
    verdicts = {row["episode_id"]: row for row in rewards}
    lengths = graded.rollouts.table("episodes.parquet", ["episode_id", "outcome", "policy_tokens"]).to_pylist()
    found: dict[str, str | None] = {}
    for row in lengths:
        verdict = verdicts.get(row["episode_id"], {"solved": None, "verdict": ""})
        tests = {
            "quarantined": row["episode_id"] in graded.quarantined,
            "cheated": verdict["verdict"] == "tampered",
            "not_graded": verdict["solved"] is None,
            "not_solved": not verdict["solved"],
            "not_ended": row["outcome"] != Outcome.COMPLETED,
            "untrained": not row["policy_tokens"],
        }
        found[row["episode_id"]] = next((name for name in REASONS if tests.get(name)), None)
    return found


def _leave_surplus(reasons: dict[str, str | None], tasks: Mapping[str, str], most: int | None) -> None:
    """Keep `most` episodes of each task: those whose digests come first, whatever their iteration."""
    taken: dict[str, int] = {}
    for name in sorted((name for name, reason in reasons.items() if reason is None), key=digest_of):
        taken[tasks[name]] = taken.get(tasks[name], 0) + 1
        if most is not None and taken[tasks[name]] > most:
            reasons[name] = "surplus"


def _tables(
    iterations: Sequence[Graded],
    reasons: dict[str, str | None],
    tasks: Mapping[str, str],
    tokenizer: ChatTokenizer,
    reserved: Reserved,
    *,
    refuse: bool,
) -> Iterator[tuple[pa.Table, list[str]]]:
    """Rows of the episodes without a reason, with their tasks. Sets the reason of those of reserved tasks."""
    for graded in iterations:
        columns = ["episode_id", "token_ids", "token_role"]
        for batch in graded.rollouts.batches("sequences.parquet", columns):
            rows = []
            for row in batch.filter(pc.is_in(batch["episode_id"], pa.array(_open(reasons), pa.string()))).to_pylist():
                prompt = [
                    token
                    for token, role in zip(row["token_ids"], row["token_role"], strict=True)
                    if role == TokenRole.PROMPT
                ]
                name, task = row["episode_id"], tasks[row["episode_id"]]
                found = reserved.task_of(task, user_messages(tokenizer.decode(prompt)))
                if found is None:
                    rows.append({**row, "clean": True, "task_id": task})
                elif refuse:
                    raise MixtureError(
                        f"episode {name[:16]} of {graded.place} is of {found}, which this experiment measures: set"
                        " reserved to leave_out, or leave the source out"
                    )
                else:
                    reasons[name] = "reserved"
            if rows:
                yield pa.Table.from_pylist(rows, schema=ROWS), [row["task_id"] for row in rows]


def _open(reasons: Mapping[str, str | None]) -> list[str]:
    return [name for name, reason in reasons.items() if reason is None]
