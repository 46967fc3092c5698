"""Demonstrations for the base policy: scripted episodes of a teacher that makes mistakes.

The teacher follows the calls to the wrong line, copies and edits without errors. The operation that it writes is right
with probability `right_share`. With probability `mistaken_share` it is the teacher's usual mistake, which depends only
on the operation and its place; else any other operation. A policy that imitates the teacher perfectly is wrong at
temperature 0 and by majority, and sometimes right: it lacks knowledge, not certainty.
"""

from __future__ import annotations

from random import Random
from typing import Any, Self

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, model_validator

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact
from contracts.chat import ChatTokenizer
from contracts.digests import action_key
from contracts.store import Store
from contracts.tasks import Split
from curation.tasks.bugs import Bug, draw_bugs
from curation.tasks.compositions import Family, families_of, family_name
from curation.tasks.expert import expert_episode, expert_tokens
from curation.tasks.operations import OPERATIONS_VERSION, Operation, Place, trained
from curation.tasks.suite import TaskSuiteConfig

DEMONSTRATIONS_VERSION = f"2{OPERATIONS_VERSION}"
DEMONSTRATIONS = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("token_role", pa.list_(pa.uint8())),
        ("clean", pa.bool_()),
        ("family", pa.string()),
        ("task_id", pa.string()),
    ]
)
"""One row per demonstration. `clean`: whether its answer is right."""


class DemonstrationConfig(BaseModel):
    """Number of demonstrations and share of right answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(default=20_000, ge=1, le=2_000_000)
    """Rows of train.parquet, each of a different task."""
    validation_count: int = Field(default=1024, ge=1, le=100_000)
    """Rows of validation.parquet: all clean, of tasks that train.parquet lacks."""
    right_share: float = Field(default=0.25, ge=0, le=1)
    """Probability that a training answer is right."""
    mistaken_share: float = Field(default=0.5, ge=0, le=1)
    """Probability that a training answer is the teacher's usual mistake; the rest is spread over the other
    operations.
    """
    parallel_share: float = Field(default=0.03, ge=0, le=1)
    """Probability that the first turn makes two calls at once."""
    seed: int = Field(default=0, ge=0)
    """Seed of the tasks, and of the teacher's usual mistakes and their occurrence."""

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.right_share + self.mistaken_share > 1:
            raise ValueError(
                f"right_share {self.right_share} and mistaken_share {self.mistaken_share} exceed 1 in sum: lower one"
            )
        return self


def demonstrations_slice(config: DemonstrationConfig, suite_seed: int, spaced: bool | None = None) -> dict[str, Any]:
    """Settings that affect the demonstrations, beyond the tokenizer. suite_seed: assigns names and compositions to
    splits. spaced: layout of calls; None: that of the tokenizer's chat template.
    """
    return {**config.model_dump(), "suite_seed": suite_seed, **({} if spaced is None else {"spaced": spaced})}


def demonstrations_key(
    config: DemonstrationConfig, suite_seed: int, tokenizer: ArtifactRef, spaced: bool | None = None
) -> str:
    """Action key of the demonstrations."""
    slice_ = demonstrations_slice(config, suite_seed, spaced)
    return action_key("demonstrations", {"tokenizer": tokenizer.digest}, slice_, DEMONSTRATIONS_VERSION)


def build_demonstrations(
    config: DemonstrationConfig,
    suite_config: TaskSuiteConfig,
    tokenizer_artifact: Artifact,
    store: Store,
    spaced: bool | None = None,
) -> Artifact:
    """Make the `demonstrations` artifact. spaced: see `demonstrations_slice`.

    Only the seed of the suite matters: it assigns names and compositions to the train split.
    """
    slice_ = demonstrations_slice(config, suite_config.seed, spaced)
    parents = {"tokenizer": tokenizer_artifact.ref}
    key = demonstrations_key(config, suite_config.seed, tokenizer_artifact.ref, spaced)
    found = find_artifact(store, "demonstrations", key)
    if found is not None:
        return found
    tokenizer = ChatTokenizer.from_directory(tokenizer_artifact.directory(), spaced=spaced)
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
    rng = Random(f"demonstrations/{config.seed}")
    seen: set[str] = set()
    train = draw_bugs(config.count, Split.TRAIN, suite_seed, rng, seen)
    validation = draw_bugs(config.validation_count, Split.TRAIN, suite_seed, rng, seen)
    rng.shuffle(train)
    mistakes = usual_mistakes(config.seed)
    taught = [_taught(bug, mistakes, config, rng) for bug in train]
    return (
        _render(train, taught, config, rng, tokenizer),
        _render(validation, [bug.right for bug in validation], config, rng, tokenizer),
    )


def usual_mistakes(seed: int) -> dict[str, Operation]:
    """The teacher's usual mistake, by family name."""
    rng = Random(f"mistakes/{seed}")
    by_place: dict[Place, list[Family]] = {}
    for family in families_of(Split.TRAIN):
        by_place.setdefault(family[0], []).append(family)
    found: dict[str, Operation] = {}
    for families in by_place.values():
        circle = rng.sample(families, len(families))
        found |= {family_name(one): other for one, (_, other) in zip(circle, [*circle[1:], circle[0]], strict=True)}
    return found


def _taught(bug: Bug, mistakes: dict[str, Operation], config: DemonstrationConfig, rng: Random) -> Operation:
    """Operation that the teacher writes into the wrong line."""
    draw, mistake = rng.random(), mistakes[bug.family]
    if draw < config.right_share:
        return bug.right
    if draw < config.right_share + config.mistaken_share:
        return mistake
    return rng.choice([each for each in trained(bug.place) if each is not bug.right and each is not mistake])


def _render(
    bugs: list[Bug], answers: list[Operation], config: DemonstrationConfig, rng: Random, tokenizer: ChatTokenizer
) -> pa.Table:
    ids: list[list[int]] = []
    roles: list[list[int]] = []
    for bug, answer in zip(bugs, answers, strict=True):
        episode = expert_episode(bug, answer, parallel=rng.random() < config.parallel_share)
        tokens, token_roles = expert_tokens(episode, tokenizer)
        ids.append(tokens)
        roles.append(token_roles)
    clean = [answer is bug.right for bug, answer in zip(bugs, answers, strict=True)]
    columns = [ids, roles, clean, [bug.family for bug in bugs], [bug.task_id for bug in bugs]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, DEMONSTRATIONS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=DEMONSTRATIONS)
