"""The work of the `trainer` benchmark: one iteration's dataset and starting policy, for Triplane and for TRL.

    shape, counts  ->  store: checkpoint, trainer_state, dataset   (read by Triplane)
                       plain/: the same weights in float32         (read by TRL)
                       case.json: the same sequences and settings

Episodes alternate between runs of the policy's tokens and of tool output, as those of agents do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from pydantic import BaseModel, ConfigDict

from benchmarks.policies import dequantize_policy
from contracts.artifacts import Artifact, ArtifactWriter
from contracts.digests import digest_of
from contracts.episodes import TokenRole
from contracts.store import Store, open_store
from trainer.config import RlConfig, RlJob
from trainer.data import cut_by_tokens, make_batch, read_sequences
from trainer.export import TOKENIZER_FILES, publish_checkpoint
from trainer.model import score
from trainer.model_config import ModelConfig
from trainer.parameters import Parameters, draw_masters
from trainer.state import capture_state, publish_state

VOCABULARY = 768
SHAPES = {
    "quickstart": ModelConfig(),
    "dense": ModelConfig(
        hidden_size=256, layers=4, experts=1, experts_per_token=1, expert_width=768, heads=8, kv_heads=4, head_dim=32
    ),
}
"""quickstart: that of experiments/quickstart.yaml. dense: one expert, which every token takes."""
ALGORITHM = {
    "kind": "grpo",
    "advantage": "group_mean",
    "aggregation": "token",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
}
"""That of experiments/quickstart.yaml."""
PROMPT, POLICY_RUN, TOOL_RUN, RUNS = (36, 60), (6, 14), (8, 24), (2, 5)
"""Shortest and longest prompt, run of policy tokens, tool output, and number of policy runs of an episode."""
STEP, FORMS, USUAL = 4, 2, 0.75
"""Lengths are these ranges' ends and what lies between them in steps. The episodes of one group take few courses, each
with its own lengths; most take the first. So the lengths are distributed as in a quickstart iteration: 400 rows of it
had 29 distinct lengths, and 127 tokens on average, of which 36 were the policy's.
"""
CASE = "case.json"


class Case(BaseModel):
    """What both sides train on."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prompts: list[list[int]]
    """Token ids of each row's prompt; equal within a group."""
    completions: list[list[int]]
    """Token ids of each row after its prompt."""
    masks: list[list[int]]
    """1 where a token of `completions` is the policy's, 0 for tool output."""
    rewards: list[float]
    logprobs: list[list[float]]
    """Log probability of each policy token under the starting weights, by Triplane's model."""
    group_size: int
    optimizer_steps: int
    learning_rate: float
    job: dict[str, Any]
    """The RlJob of the first iteration; later ones have another key."""

    @property
    def tokens(self) -> int:
        """Tokens of all rows, without padding: prompts, policy tokens and tool output."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))


def write_case(folder: Path, shape: ModelConfig, groups: int, group_size: int, optimizer_steps: int) -> Case:
    """Write the case below `folder`, which must not exist. Equal arguments give equal cases."""
    store = open_store(str(folder / "store"))
    config = shape.hf_config(VOCABULARY)
    parameters = Parameters.from_masters(config, draw_masters(config, seed=0))
    checkpoint, state = _publish(store, parameters)
    dequantize_policy(checkpoint.directory(), folder / "plain")
    prompts, completions, masks = _episodes(groups, group_size)
    dice = random.Random(1)
    rewards = [float(dice.random() < 0.5) for _ in prompts]
    rows = [
        {
            "episode_id": f"{row:06}",
            "group_id": f"{row // group_size:06}",
            "token_ids": prompt + completion,
            "token_role": _roles(len(prompt), mask),
        }
        for row, (prompt, completion, mask) in enumerate(zip(prompts, completions, masks, strict=True))
    ]
    logprobs = _score(parameters, rows)
    trained = RlConfig.model_validate({"algorithm": ALGORITHM, "optimizer_steps": optimizer_steps})
    job = RlJob(
        store=store.url,
        key=digest_of(["iteration", 0]),
        seed=0,
        dataset=_dataset(store, rows, logprobs, rewards).ref,
        checkpoint=checkpoint.ref,
        trainer_state=state.ref,
        config=trained,
    )
    case = Case(
        prompts=prompts,
        completions=completions,
        masks=masks,
        rewards=rewards,
        logprobs=logprobs,
        group_size=group_size,
        optimizer_steps=optimizer_steps,
        learning_rate=trained.learning_rate,
        job=job.model_dump(mode="json"),
    )
    (folder / CASE).write_text(case.model_dump_json())
    return case


def read_case(folder: Path) -> Case:
    """Case that `write_case` wrote."""
    return Case.model_validate(json.loads((folder / CASE).read_text()))


def _episodes(groups: int, group_size: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Prompts, completions and masks, row by row."""
    dice = random.Random(0)

    def draw(count: int) -> list[int]:
        return [dice.randrange(8, VOCABULARY) for _ in range(count)]

    prompts, completions, masks = [], [], []
    for _ in range(groups):
        prompt = draw(_length(dice, PROMPT))
        forms = [_mask(dice) for _ in range(FORMS)]
        for _ in range(group_size):
            mask = forms[0] if dice.random() < USUAL else dice.choice(forms[1:])
            prompts.append(prompt)
            completions.append(draw(len(mask)))
            masks.append(mask)
    return prompts, completions, masks


def _length(dice: random.Random, bounds: tuple[int, int]) -> int:
    return dice.randrange(bounds[0], bounds[1] + 1, STEP)


def _mask(dice: random.Random) -> list[int]:
    mask = [1] * _length(dice, POLICY_RUN)
    for _ in range(dice.randint(*RUNS) - 1):
        mask += [0] * _length(dice, TOOL_RUN) + [1] * _length(dice, POLICY_RUN)
    return mask


def _roles(prompt: int, mask: Sequence[int]) -> list[int]:
    own = (TokenRole.ENVIRONMENT, TokenRole.POLICY)
    return [int(TokenRole.PROMPT)] * prompt + [int(own[each]) for each in mask]


@torch.no_grad()
def _score(parameters: Parameters, rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    table = pa.table({name: [row[name] for row in rows] for name in ("token_ids", "token_role")})
    config = parameters.config
    sequences = read_sequences(table, "the case", config["vocab_size"], config["max_position_embeddings"])
    found: list[list[float]] = []
    for part in cut_by_tokens(sequences, 4096):
        members = [sequences[index] for index in part]
        scores = score(parameters.leaves, config, make_batch(members))
        found += [each.tolist() for each in torch.split(scores.logprobs, [len(member.scored) for member in members])]
    return found


def _publish(store: Store, parameters: Parameters) -> tuple[Artifact, Artifact]:
    """(checkpoint, trainer_state) of fresh weights."""
    # no one reads this tokenizer's files: both sides train on token ids
    with ArtifactWriter(store, "tokenizer", digest_of("case"), parents={}, config={}, code_version="1") as out:
        for name in TOKENIZER_FILES:
            out.add_bytes(name, b"{}")
        tokenizer = out.commit()
    key = digest_of(["start"])
    checkpoint = publish_checkpoint(
        store, key, parameters, tokenizer, parents={}, config={}, code_version="1", meta={}, metrics=b""
    )
    state = capture_state(parameters, {}, "none", 0, {})
    return checkpoint, publish_state(store, "trainer_state", key, state, parents={}, config={}, code_version="1")


def _dataset(
    store: Store, rows: Sequence[dict[str, Any]], logprobs: Sequence[list[float]], rewards: Sequence[float]
) -> Artifact:
    """A `dataset` artifact of the columns that the trainer reads."""
    spread = [_spread(row["token_role"], own) for row, own in zip(rows, logprobs, strict=True)]
    means: dict[str, list[float]] = {}
    for row, reward in zip(rows, rewards, strict=True):
        means.setdefault(row["group_id"], []).append(reward)
    names = [row["group_id"] for row in rows]
    train = pa.table(
        {
            "episode_id": [row["episode_id"] for row in rows],
            "group_id": names,
            "token_ids": pa.array([row["token_ids"] for row in rows], pa.list_(pa.int32())),
            "token_role": pa.array([row["token_role"] for row in rows], pa.list_(pa.uint8())),
            "logprobs": pa.array(spread, pa.list_(pa.float32())),
            "reward": pa.array(rewards, pa.float32()),
        }
    )
    members = pa.table(
        {
            "episode_id": [row["episode_id"] for row in rows],
            "group_id": names,
            "reward": pa.array(rewards, pa.float32()),
            "group_reward_mean": [sum(means[name]) / len(means[name]) for name in names],
        }
    )
    with ArtifactWriter(store, "dataset", digest_of("case"), parents={}, config={}, code_version="1") as out:
        out.add_table("train.parquet", train)
        out.add_table("members.parquet", members)
        return out.commit()


def _spread(roles: Sequence[int], logprobs: Sequence[float]) -> list[float | None]:
    """Log probabilities at the policy's tokens, null elsewhere."""
    own = iter(logprobs)
    return [next(own) if role == TokenRole.POLICY else None for role in roles]
