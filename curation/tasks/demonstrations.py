"""Demonstrations: scripted expert episodes with noisy answers, what the base policy is warmed up on.

Format and copying are always right; the answer is right with probability `clean_share`, else a random other family's expression.
So the base policy can act, and reinforcement has something left to teach.
"""

from __future__ import annotations

from random import Random

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact
from contracts.chat import ChatTokenizer
from contracts.digests import action_key
from contracts.store import Store
from contracts.tasks import Split
from curation.tasks.bugs import Bug, draw_bugs
from curation.tasks.expert import expert_tokens, open_workbench
from curation.tasks.families import others
from curation.tasks.names import name_pools
from curation.tasks.suite import TaskSuiteConfig

DEMONSTRATIONS_VERSION = "1"
DEMONSTRATIONS = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("token_role", pa.list_(pa.uint8())),
        ("clean", pa.bool_()),
        ("family", pa.string()),
        ("task_id", pa.string()),
    ]
)
"""One row a demonstration. `clean`: its answer is the right one."""


class DemonstrationConfig(BaseModel):
    """How many demonstrations, and how right they are."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    count: int = Field(default=20_000, ge=1, le=2_000_000)
    """Rows of train.parquet, each of a different task."""
    validation_count: int = Field(default=1024, ge=1, le=100_000)
    """Rows of validation.parquet: all clean, of tasks that train.parquet does not hold."""
    clean_share: float = Field(default=0.55, ge=0, le=1)
    """Probability that a training answer is right."""
    parallel_share: float = Field(default=0.03, ge=0, le=1)
    """Probability that the first turn makes two calls at once."""
    seed: int = Field(default=0, ge=0)
    """Draws the tasks and the noise."""


def demonstrations_key(config: DemonstrationConfig, suite_seed: int, tokenizer: ArtifactRef) -> str:
    """Action key of the demonstrations."""
    slice_ = {**config.model_dump(), "suite_seed": suite_seed}
    return action_key("demonstrations", {"tokenizer": tokenizer.digest}, slice_, DEMONSTRATIONS_VERSION)


def build_demonstrations(
    config: DemonstrationConfig, suite_config: TaskSuiteConfig, tokenizer_artifact: Artifact, store: Store
) -> Artifact:
    """The `demonstrations` artifact. Of the suite only the seed counts: it deals the names of the train split."""
    slice_ = {**config.model_dump(), "suite_seed": suite_config.seed}
    parents = {"tokenizer": tokenizer_artifact.ref}
    key = demonstrations_key(config, suite_config.seed, tokenizer_artifact.ref)
    found = find_artifact(store, "demonstrations", key)
    if found is not None:
        return found
    tokenizer = ChatTokenizer.from_directory(tokenizer_artifact.directory())
    train, validation = render_demonstrations(config, suite_config.seed, tokenizer)
    with ArtifactWriter(
        store, "demonstrations", key, parents=parents, config=slice_, code_version=DEMONSTRATIONS_VERSION
    ) as out:
        out.add_table("train.parquet", train)
        out.add_table("validation.parquet", validation)
        tokens = len(train["token_ids"].combine_chunks().flatten())
        return out.commit(meta={"train": len(train), "validation": len(validation), "tokens_mean": tokens / len(train)})


def render_demonstrations(
    config: DemonstrationConfig, suite_seed: int, tokenizer: ChatTokenizer
) -> tuple[pa.Table, pa.Table]:
    """(train, validation) rows of DEMONSTRATIONS."""
    pool = name_pools(suite_seed)[Split.TRAIN]
    rng = Random(f"demonstrations/{config.seed}")
    seen: set[str] = set()
    train = draw_bugs(config.count, pool, rng, seen)
    validation = draw_bugs(config.validation_count, pool, rng, seen)
    rng.shuffle(train)
    return (
        _render(train, config, config.clean_share, rng, tokenizer),
        _render(validation, config, 1.0, rng, tokenizer),
    )


def _render(
    bugs: list[Bug], config: DemonstrationConfig, clean_share: float, rng: Random, tokenizer: ChatTokenizer
) -> pa.Table:
    ids: list[list[int]] = []
    roles: list[list[int]] = []
    clean: list[bool] = []
    with open_workbench() as bench:
        for bug in bugs:
            clean.append(rng.random() < clean_share)
            answer = bug.family if clean[-1] else rng.choice(others(bug.family))
            episode = bench.play(bug, answer, parallel=rng.random() < config.parallel_share)
            tokens, token_roles = expert_tokens(episode, tokenizer)
            ids.append(tokens)
            roles.append(token_roles)
    columns = [ids, roles, clean, [bug.family.name for bug in bugs], [bug.task_id for bug in bugs]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, DEMONSTRATIONS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=DEMONSTRATIONS)
