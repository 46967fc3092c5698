"""Descriptions of table columns for the asset pages. A name has one meaning in all tables."""

from __future__ import annotations

import pyarrow as pa

COLUMNS = {
    "episode_id": "One attempt at a task: H(slot, action key, attempt).",
    "group_id": "The samples of one prompt.",
    "group_index": "Number of the kept group, from 0, in the order of rollouts.",
    "task_id": "Name of the task in its suite.",
    "task_digest": "Digest of the task's content when the episode ran.",
    "image_digest": "Files that the sandbox started from.",
    "sample": "Number of the sample in its group, from 0.",
    "attempt": "Number of the attempt; above 0 after infrastructure faults, only under the throughput profile.",
    "seed": "Sampling seed of this episode.",
    "policy_version": "Content digest of the acting checkpoint.",
    "policy_versions": "Distinct checkpoints that sampled the tokens, sorted.",
    "temperature": "Of sampling.",
    "max_tokens": "Maximum number of policy tokens.",
    "outcome": "How the episode ended. completed: the policy ended it; graded later.",
    "failure": "Cause, if the agent broke its own sandbox.",
    "sequence": "Number of the sequence in its episode, from 0.",
    "turns": "Turns of the policy.",
    "tool_calls": "Turn, tool, arguments (canonical JSON), success and result of each call.",
    "format_errors": "Turns whose tool call could not be parsed.",
    "policy_tokens": "Number of tokens sampled by the policy.",
    "final_state": "Digest of the final state.",
    "final_diff": "The final state: the agent's changes as a git diff, or what `final_state` names.",
    "token_ids": "Token ids as sampled, never tokenized again.",
    "token_role": "Role of each token: 0 prompt, 1 policy, 2 environment, 3 forced by grammar.",
    "logprobs": "Log-probabilities under the sampling distribution; null for other tokens than the policy's.",
    "routed_experts": "Experts that the sampler chose: NumPy array [positions, layers, experts per token].",
    "supports": "Sets of tokens that the tokens were drawn from: four NumPy arrays.",
    "reward": "Sum of the components; null, not 0, if the episode must not train.",
    "solved": "Whether every hidden test passed on the final state.",
    "components": "Weighted contribution of each component.",
    "verdict": "How the run of the hidden tests ended.",
    "tests_passed": "Hidden tests that passed; those of an unsolved state are confirmed if a reward pays for them.",
    "tests_total": "Total number of hidden tests.",
    "findings": "Named attempts of the final state to influence its verdict.",
    "checks": "Decoys and observations of the hidden tests, as proven when the suite was built.",
    "from_reward": "Reward of the previous grading.",
    "to_reward": "Reward of this grading.",
    "from_reason": "Verdict of the previous grading.",
    "to_reason": "Verdict and findings of this grading.",
    "from_version": "Code version and digest of the rules of the previous grading.",
    "to_version": "Code version and digest of the rules of this grading.",
    "checkpoints": "Checkpoints of this iteration that trained on the episode with its previous reward.",
    "family": "Kind of bug or source of the task.",
    "split": "train, gate (decides on promotion), held_out or unseen (read by no decision).",
    "instruction": "Instructions for the agent.",
    "files": "Repository that the agent works on.",
    "hidden_files": "Test files that exist only in the verifier's sandbox.",
    "tests": "Hidden tests that must pass.",
    "reference_diff": "A change that solves the task.",
    "meta": "Metadata from the author of the task, as JSON.",
}
"""Descriptions by column name."""


def type_text(kind: pa.DataType) -> str:
    """Name of a column's type without the types of its nested fields: list<struct<turn, name>>."""
    if pa.types.is_list(kind):
        return f"list<{type_text(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(field.name for field in kind)}>"
    return str(kind)
