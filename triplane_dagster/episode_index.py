"""Find one episode among all artifacts by its id or an unambiguous prefix of it.

`rollouts` (of an iteration) and `evaluation_run` (of a policy) contain an episode's rows; while its iteration is still
sampling, only `group` does. The `members.parquet` of a dataset shows whether it uses the episode, and why not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from contracts.artifacts import Artifact, find_artifact, list_artifacts
from contracts.episodes import Episode, read_episodes
from contracts.errors import ArtifactMissing
from contracts.store import Store
from curation.mixture.accepted import ACCEPTED
from curation.mixture.chats import CHATS
from resources.refs import read_ref

MERGED = ("rollouts", "evaluation_run")
"""Artifact kinds with the episodes of finished work, the most informative first."""
UNMERGED = ("group", "unfinished")
"""Hundreds of artifacts per iteration, needed only while it samples; and what was carried over."""
ID_DIGITS = 32


@dataclass(frozen=True)
class EpisodeHome:
    """Artifact and row of an episode."""

    episode_id: str
    artifact: Artifact

    def read(self) -> Episode:
        """The episode with its tokens."""
        wanted = pc.field("episode_id") == self.episode_id
        episodes = self.artifact.table("episodes.parquet").filter(wanted)
        sequences = self.artifact.table("sequences.parquet").filter(wanted)
        return read_episodes(episodes, sequences)[0]

    def telemetry(self) -> dict[str, Any]:
        """Row of TELEMETRY; empty if the artifact has none."""
        if "telemetry.parquet" not in self.artifact.names():
            return {}
        rows = self.artifact.table("telemetry.parquet").filter(pc.field("episode_id") == self.episode_id).to_pylist()
        return rows[0] if rows else {}


@dataclass(frozen=True)
class Membership:
    """How one dataset, or one source of a base policy, used an episode."""

    dataset: Artifact
    kept: bool
    reason: str | None
    """Reason why the episode was left out."""
    reward: float | None


def find_episodes(store: Store, prefix: str, kinds: Sequence[str]) -> list[EpisodeHome]:
    """Episodes whose id starts with `prefix` in artifacts of these kinds; an episode in several kinds is taken from the
    first.
    """
    found: dict[str, EpisodeHome] = {}
    if not 0 < len(prefix) <= ID_DIGITS:
        return []
    for kind in kinds:
        for artifact in list_artifacts(store, kind):
            for episode_id in _ids_starting_with(artifact, prefix):
                found.setdefault(episode_id, EpisodeHome(episode_id, artifact))
    return [found[episode_id] for episode_id in sorted(found)]


def find_episode(store: Store, prefix: str) -> EpisodeHome:
    """The only episode whose id starts with `prefix`. Raises ArtifactMissing for none or several."""
    found = find_episodes(store, prefix, MERGED) or find_episodes(store, prefix, UNMERGED)
    if not found:
        raise ArtifactMissing(
            f"store {store.url} has no episode {prefix!r}: `triplane episodes list` lists its episodes"
        )
    if len(found) > 1:
        some = ", ".join(home.episode_id[:16] for home in found[:4])
        raise ArtifactMissing(
            f"{prefix!r} is ambiguous, {len(found)} episode ids start with it ({some}, ...): give more digits"
        )
    return found[0]


def memberships(store: Store, episode_id: str) -> list[Membership]:
    """Datasets, and sources of base policies, that considered the episode: by kind, in order of key."""
    found = []
    for dataset in (each for kind in ("dataset", ACCEPTED, CHATS) for each in list_artifacts(store, kind)):
        rows = dataset.table("members.parquet").filter(pc.field("episode_id") == episode_id).to_pylist()
        found += [Membership(dataset, row["kept"], row["reason"], row.get("reward")) for row in rows]
    return found


def rewards_of(store: Store, rollouts: Artifact, iteration: tuple[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Rows of `rewards.parquet` by episode id: of the artifact itself (evaluation_run), else of the rewards made from
    it. These may be several: the current ones of an iteration count, else the latest.

    iteration: experiment and key; None: the iteration that sampled.
    """
    graded: Artifact | None = rollouts
    if "rewards.parquet" not in rollouts.names():
        place = iteration or sampled_by(store, rollouts)
        current = read_ref(store, place[0], "rewards", place[1]) if place else None
        made = [each for each in list_artifacts(store, "rewards") if rollouts.ref in each.manifest.parents.values()]
        graded = max(made, key=lambda each: (each.ref == current, each.manifest.created_unix), default=None)
    return {row["episode_id"]: row for row in graded.table("rewards.parquet").to_pylist()} if graded else {}


def sampled_by(store: Store, rollouts: Artifact) -> tuple[str, str] | None:
    """Experiment and key of the iteration that sampled; None if its inputs were deleted."""
    refs = [ref for ref in rollouts.manifest.parents.values() if ref.kind == "iteration_inputs"]
    found = find_artifact(store, refs[0].kind, refs[0].key) if refs else None
    config = found.manifest.config if found else {}
    return (config["experiment"], config["iteration"]) if "iteration" in config else None


def _ids_starting_with(artifact: Artifact, prefix: str) -> Iterator[str]:
    column = artifact.table("episodes.parquet", columns=["episode_id"]).column("episode_id")
    yield from column.filter(pc.starts_with(column, prefix)).to_pylist()
