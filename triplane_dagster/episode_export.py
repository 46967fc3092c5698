"""Episodes as JSON lines, for tools that read no Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow.compute as pc

from contracts.artifacts import Artifact
from contracts.episodes import read_episodes
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
