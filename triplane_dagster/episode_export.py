"""Episodes as JSON lines, for tools that read no Parquet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from contracts.artifacts import Artifact
from contracts.episodes import read_episodes
from contracts.errors import ConfigError, describe
from contracts.store import Store
from triplane_dagster.cli.transcript import content_of, tokenizer_of

_AT_ONCE = 64
"""Episodes in memory."""


def exported(
    store: Store,
    source: Artifact,
    rewards: Mapping[str, Mapping[str, Any]],
    members: Mapping[str, Mapping[str, Any]],
    *,
    tokens: bool = False,
) -> Iterator[dict[str, Any]]:
    """A JSON object for each episode of a `rollouts` or `evaluation_run` artifact, in its order.

    rewards, members: rows of rewards.parquet and of a dataset's members.parquet by episode id. tokens: with
    `sequences`: ids, roles (`contracts.episodes.TokenRole`), log-probabilities and policy spans. Raises ArtifactMissing
    if the store lacks a policy's tokenizer.
    """
    episodes, sequences = (source.table(f"{name}.parquet") for name in ("episodes", "sequences"))
    tokenizers: dict[str, Any] = {}
    for start in range(0, episodes.num_rows, _AT_ONCE):
        part = episodes.slice(start, _AT_ONCE)
        theirs = sequences.filter(pc.is_in(sequences["episode_id"], part["episode_id"].combine_chunks()))
        for episode in read_episodes(part, theirs):
            name = episode.policy_version
            if name not in tokenizers:
                tokenizers[name] = tokenizer_of(store, name)
            member = members.get(episode.episode_id, {})
            row = content_of(episode, tokenizers[name])
            row |= {"artifact": source.ref.uri, "reward": rewards.get(episode.episode_id)}
            row |= {"kept": member.get("kept"), "left_out": member.get("reason")}
            if tokens:
                names = ("token_ids", "token_role", "logprobs", "policy_spans")
                row["sequences"] = [{name: getattr(each, name) for name in names} for each in episode.sequences]
            yield row


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write lines to `path`, whole or not at all; returns their number. Raises ConfigError if it can't be written."""
    part = path.with_name(f".{path.name}.part")
    count = 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(line + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {describe(error)}") from None
    finally:
        part.unlink(missing_ok=True)
    return count
