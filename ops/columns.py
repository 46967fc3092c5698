"""Descriptions of table columns for the asset pages. A name means the same in every table."""

from __future__ import annotations

import pyarrow as pa

COLUMNS = {
    "episode_id": "One attempt at a task: H(slot, action key, attempt).",
    "group_id": "The samples of one prompt.",
    "group_index": "Counts the kept groups, in the order of rollouts.",
    "task_id": "Name of the task in its suite.",
    "task_digest": "Content of the task as it was played.",
    "image_digest": "Files that its sandbox started from.",
    "sample": "Which sample of its group, from 0.",
    "attempt": "Above 0 after infrastructure faults, under the throughput profile only.",
    "seed": "Seeds the sampling of this episode alone.",
    "policy_version": "Content digest of the checkpoint that acted.",
    "policy_versions": "Checkpoints that sampled its tokens, distinct and sorted.",
    "temperature": "Of sampling.",
    "max_tokens": "Bound on the policy's tokens.",
    "outcome": "How it ended; completed: by the policy itself, graded later.",
    "failure": "What ended an episode that failed by what its agent did to its own sandbox.",
    "sequence": "Which sequence of its episode, from 0.",
    "turns": "Turns of the policy.",
    "tool_calls": "Turn, tool, arguments (canonical JSON), success and result of each call.",
    "format_errors": "Turns whose tool call could not be parsed.",
    "policy_tokens": "Tokens the policy sampled.",
    "final_state": "Digest of what the agent left behind.",
    "final_diff": "What the agent changed, in git's format.",
    "token_ids": "The sequence as it was sampled, never tokenized again.",
    "token_role": "Of each token: 0 prompt, 1 policy, 2 environment, 3 forced by grammar.",
    "logprobs": "Of the distribution really sampled from; null off policy tokens.",
    "reward": "Sum of its components; null where nothing may be learned, never 0 instead.",
    "solved": "Whether every hidden test passed on the final state.",
    "components": "What each component contributed, weight included.",
    "verdict": "How the run of the hidden tests ended.",
    "tests_passed": "Hidden tests that passed.",
    "tests_total": "Hidden tests in all.",
    "findings": "What the final state tried on its verdict, by name.",
    "checks": "Decoys and observations of the hidden tests, as proven when the suite was built.",
    "family": "Kind of bug or source of the task.",
    "split": "train, gate (decides on promotion), held_out or unseen (read by no decision).",
    "instruction": "What the agent is told.",
    "files": "The repository the agent gets.",
    "hidden_files": "Test files that only the verifier's sandbox has.",
    "tests": "Hidden tests that must pass.",
    "reference_diff": "A change that solves the task.",
    "meta": "Facts of the task's maker, as JSON.",
}
"""By column name."""


def type_text(kind: pa.DataType) -> str:
    """Name of a column's type without the types of its nested fields: list<struct<turn, name>>."""
    if pa.types.is_list(kind):
        return f"list<{type_text(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(field.name for field in kind)}>"
    return str(kind)
