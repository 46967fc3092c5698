"""A store with a tiny tokenizer and a synthetic task: the policy repeats a word of the prompt between its markup."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.chat import END_OF_TEXT, SPECIAL_TOKENS, ChatTokenizer
from contracts.digests import digest_of
from contracts.episodes import ROUTED_EXPERTS, SUPPORTS, TokenRole
from contracts.store import Store, open_store
from trainer.algorithms.grpo import Grpo
from trainer.backends.base import AdamWRule
from trainer.backends.torch import TorchBackend
from trainer.config import RlConfig, RlJob, SftConfig, SftJob
from trainer.model_config import ModelConfig
from trainer.parameters import Parameters

TINY = ModelConfig(
    hidden_size=128,
    layers=2,
    experts=4,
    expert_width=128,
    experts_per_token=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    max_positions=64,
)
QUICKSTART = Grpo(advantage="group_mean", aggregation="token", clip_high=0.28, dual_clip=3.0)
"""The algorithm of experiments/quickstart.yaml."""
ROWS = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("token_role", pa.list_(pa.uint8())),
        ("clean", pa.bool_()),
        ("family", pa.string()),
        ("task_id", pa.string()),
    ]
)


@dataclass(frozen=True)
class World:
    """Artifacts that jobs name."""

    store: Store
    tokenizer: Artifact
    demonstrations: Artifact
    vocabulary: int

    def sft_job(self, name: str = "sft", **config: Any) -> SftJob:
        """A small warm start that no other test names."""
        defaults: dict[str, Any] = {"max_steps": 6, "evaluate_every": 3, "snapshot_every": 2, "warmup_steps": 2}
        return SftJob(
            store=self.store.url,
            key=digest_of([name]),
            seed=1,
            threads=1,
            tokenizer=self.tokenizer.ref,
            demonstrations=self.demonstrations.ref,
            model=TINY,
            config=SftConfig(**(defaults | config)),
        )

    def rl_job(self, name: str, dataset: Artifact, checkpoint: ArtifactRef, state: ArtifactRef, **config: Any) -> RlJob:
        """One iteration on `dataset`."""
        return RlJob(
            store=self.store.url,
            key=digest_of([name]),
            seed=5,
            threads=1,
            dataset=dataset.ref,
            checkpoint=checkpoint,
            trainer_state=state,
            config=RlConfig(**({"optimizer_steps": 2, "learning_rate": 3e-3, "algorithm": QUICKSTART} | config)),
        )

    def dataset(self, rows: list[dict[str, Any]], members: list[dict[str, Any]]) -> Artifact:
        """A `dataset` artifact of the columns that the trainer reads."""
        recorded = [each for each in (ROUTED_EXPERTS, SUPPORTS) if any(each.name in row for row in rows)]
        train = pa.Table.from_pylist(rows, schema=pa.schema([*TRAIN, *recorded]))
        rewards: dict[str, list[float]] = {}
        for row in members:
            rewards.setdefault(row["group_id"], []).extend([] if row["reward"] is None else [row["reward"]])
        means = {group: fmean(found) if found else None for group, found in rewards.items()}
        filled = [{**row, "group_reward_mean": means[row["group_id"]]} for row in members]
        table = pa.Table.from_pylist(filled, schema=MEMBERS)
        key = digest_of([str(rows), str(members)])
        with ArtifactWriter(self.store, "dataset", key, parents={}, config={}, code_version="1") as out:
            out.add_table("train.parquet", train)
            out.add_table("members.parquet", table)
            return out.commit()


TRAIN = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("group_index", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_role", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.string())),
        ("reward", pa.float32()),
    ]
)
MEMBERS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("reward", pa.float32()),
        ("kept", pa.bool_()),
        ("group_reward_mean", pa.float64()),
    ]
)


def backend_of(parameters: Parameters) -> TorchBackend:
    """The default backend around `parameters`, with AdamW."""
    return TorchBackend(parameters, AdamWRule(0.9, 0.95, 0.0))


def make_world(folder: Path, url: str | None = None) -> World:
    """Artifacts in a fresh store: below `folder`, or at `url`."""
    store = open_store(url or str(folder / "store"))
    tokenizer = _tokenizer(store)
    chat = ChatTokenizer.from_directory(tokenizer.directory())
    return World(store, tokenizer, _demonstrations(store, chat), chat.vocabulary_size)


def episodes(world: World, count: int) -> list[tuple[list[int], list[int]]]:
    """(token ids, roles) of `count` episodes that copy rightly."""
    chat = ChatTokenizer.from_directory(world.tokenizer.directory())
    return [_episode(chat, random.Random(index)) for index in range(count)]


def _tokenizer(store: Store) -> Artifact:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=264,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(["user", "assistant"], trainer)
    with ArtifactWriter(store, "tokenizer", digest_of("tokenizer"), parents={}, config={}, code_version="1") as out:
        out.add_bytes("tokenizer.json", tokenizer.to_str().encode())
        out.add_json("tokenizer_config.json", {"pad_token": END_OF_TEXT})
        out.add_bytes("chat_template.jinja", b"{{ messages }}")
        return out.commit()


def _episode(chat: ChatTokenizer, rng: random.Random) -> tuple[list[int], list[int]]:
    letter = rng.choice("abcdefgh")
    filler = "x" * rng.randrange(3)
    prompt = [chat.pad, *chat.encode_text(letter), *chat.encode_text(filler), chat.pad]
    answer = [*chat.encode_text(letter), chat.end_of_turn]
    middle = chat.encode_text("ok")
    roles = [TokenRole.PROMPT] * len(prompt) + [TokenRole.POLICY] * len(answer)
    roles += [TokenRole.ENVIRONMENT] * len(middle) + [TokenRole.POLICY]
    return prompt + answer + middle + [chat.end_of_turn], [int(role) for role in roles]


def _demonstrations(store: Store, chat: ChatTokenizer) -> Artifact:
    rng = random.Random(0)
    rows = [
        {"token_ids": ids, "token_role": roles, "clean": index % 8 != 7, "family": "copy", "task_id": str(index)}
        for index, (ids, roles) in enumerate(_episode(chat, rng) for _ in range(256))
    ]
    with ArtifactWriter(store, "demonstrations", digest_of("demos"), parents={}, config={}, code_version="1") as out:
        out.add_table("train.parquet", pa.Table.from_pylist(rows[64:], schema=ROWS))
        out.add_table("validation.parquet", pa.Table.from_pylist(rows[:64], schema=ROWS))
        return out.commit()


def recorded_row(sample: int, column: str, record: bytes | None) -> dict[str, Any]:
    """A row of train.parquet with ten tokens, of which the policy sampled the last five, and a record in `column`."""
    return {
        "episode_id": f"e{sample}",
        "group_id": "g",
        "group_index": 0,
        "token_ids": list(range(10)),
        "token_role": [0] * 5 + [1] * 5,
        "logprobs": [None] * 5 + [-1.0] * 5,
        "policy_versions": ["v"],
        "reward": float(sample),
        column: record,
    }
