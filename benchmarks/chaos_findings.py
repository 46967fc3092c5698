"""Examine a store after a disturbed run: equal content, nothing sampled twice, nothing left over."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import boto3

from benchmarks.chaos_lab import NAME, Lab
from contracts.artifacts import MANIFEST, list_artifacts
from contracts.errors import ArtifactCorrupt
from contracts.parts import FOLDER as PARTS
from contracts.store import Store
from envd.sandbox.cgroups import OWNED, abandoned_groups
from envd.sandbox.proctree import descendants
from inference.rollouts.ledger import Sampled, read_ledger
from ops.ledger.segments import KIND
from ops.readings import EVALUATION_RUN
from resources.registry import Registry
from trainer.config import SNAPSHOT

Work = tuple[str, str]
"""Action key of rollouts or of an evaluation run, and group id; or action key of an evaluation run and ""."""
ORPHANS_END_S = 30.0
"""Seconds for orphaned processes to end."""


@dataclass(frozen=True)
class Content:
    """Reproducible content of a store."""

    artifacts: Mapping[tuple[str, str], str]
    """(kind, action key) -> content digest."""
    history: Sequence[tuple[int, str, str, str]]
    """(number, policy, parent, iteration) of every policy that went live."""

    def differing(self, other: Content) -> list[str]:
        """Kinds and keys that differ or exist in only one of the two."""
        names = sorted(set(self.artifacts) | set(other.artifacts))
        return [
            f"{kind}/{key[:12]}"
            for kind, key in names
            if self.artifacts.get((kind, key)) != other.artifacts.get((kind, key))
        ]


def read_content(store: Store) -> Content:
    """Current content of a store. Its index may be cut otherwise into segments: `ops.ledger`."""
    found = {(each.ref.kind, each.ref.key): each.ref.digest for each in list_artifacts(store) if each.ref.kind != KIND}
    history = [
        (each.number, each.policy.digest, each.parent, each.iteration) for each in Registry(store, NAME).history()
    ]
    return Content(found, history)


@dataclass(frozen=True)
class Tokens:
    """Counts of sampled tokens from the ledger."""

    sampled: int
    lost_at_most: int
    """Tokens sampled before an interruption, or by an attempt that it ended, for work committed after it: upper bound
    of the tokens sampled again.
    """
    sampled_after_commit: int
    """Groups, evaluated tasks and evaluations with tokens sampled after their commit."""


def account(lines: Iterable[Sampled], commits: Mapping[Work, float], interruptions: Sequence[float]) -> Tokens:
    """Count tokens. commits: time of each commit; interruptions: times of kills and failed runs; both in seconds since
    1970.
    """
    sampled = lost = 0
    again: set[Work] = set()
    lines = list(lines)
    last_attempts: dict[tuple[str, str], float] = defaultdict(float)
    for line in lines:
        last_attempts[line.key, line.episode] = max(line.begun, last_attempts[line.key, line.episode])
    for line in lines:
        work = (line.key, line.group) if (line.key, line.group) in commits else (line.key, "")
        committed = commits.get(work, float("inf"))
        sampled += line.tokens
        # what an attempt that was replaced still sampled after the interruption is lost as well
        since = line.begun if line.begun < last_attempts[line.key, line.episode] else line.unix
        lost += line.tokens * any(since <= moment < committed for moment in interruptions)
        if line.unix > committed:
            again.add(work)
    return Tokens(sampled, lost, len(again))


def committed_tasks(store: Store) -> set[Work]:
    """Tasks of unfinished evaluations that are committed now."""
    keys = (key.split("/") for key in store.list(f"artifacts/{EVALUATION_RUN}/"))
    return {(key[2], key[4]) for key in keys if key[3] == PARTS}


def read_tokens(lab: Lab, interruptions: Sequence[float], tasks: Mapping[Work, float]) -> Tokens:
    """Token counts of a lab. tasks: first known time of commit of each evaluated task."""
    store = lab.store()
    commits = dict(tasks)
    for group in list_artifacts(store, "group"):
        config = group.manifest.config
        commits[config["rollouts"], config["group_id"]] = group.manifest.created_unix
    for run in list_artifacts(store, EVALUATION_RUN):
        commits[run.ref.key, ""] = run.manifest.created_unix
    return account(read_ledger(lab.ledger), commits, interruptions)


def broken_artifacts(store: Store) -> list[str]:
    """Artifacts with a file that is missing or differs from the manifest."""
    found = []
    for artifact in list_artifacts(store):
        try:
            artifact.directory()
        except ArtifactCorrupt:
            found.append(artifact.ref.uri)
    return found


def unnamed_keys(store: Store) -> list[str]:
    """Unreferenced keys of a store: files of losing attempts, snapshots and claims of finished work."""
    named = set()
    for artifact in list_artifacts(store):
        if artifact.ref.kind != SNAPSHOT:
            folder = f"{artifact.ref.uri}/{artifact.manifest.attempt}"
            named |= {f"{artifact.ref.uri}/{MANIFEST}", *(f"{folder}/{name}" for name in artifact.names())}
    return [key for key in store.list("artifacts/") if key not in named] + store.list("pointers/claims/")


def temporary_files(lab: Lab) -> list[str]:
    """Leftover files in the folders for temporary files."""
    folders = (lab.folder / "t", lab.folder / "s" / "tmp", lab.folder / "c" / "tmp")
    return [str(path.relative_to(lab.folder)) for folder in folders if folder.is_dir() for path in folder.iterdir()]


def pending_uploads(lab: Lab) -> int:
    """Number of unfinished multipart uploads."""
    if not lab.url.startswith("s3:"):
        return 0
    bucket = lab.url.split("/")[2]
    return len(boto3.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", []))


def mounts_of(folder: Path) -> list[str]:
    """Mounts whose target or source is below `folder`."""
    return [line for line in Path("/proc/mounts").read_text().splitlines() if f"{folder}/" in line]


def groups_of(pids: Iterable[int]) -> list[str]:
    """Leftover control groups of servers with these pids."""
    ours = {str(pid) for pid in pids}
    return [path.name for path in abandoned_groups() if path.name.removeprefix(OWNED).split(".")[1] in ours]


def orphans(spared: Set[int]) -> list[int]:
    """Descendants of this process, which adopts orphans, that are alive after a grace period. spared: children to
    ignore.
    """
    deadline = time.monotonic() + ORPHANS_END_S
    while True:
        reap(spared)
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def reap(spared: Set[int]) -> None:
    """Reap adopted children that have ended."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z" and int(fields[1]) == os.getpid():
                os.waitpid(int(entry.name), os.WNOHANG)
