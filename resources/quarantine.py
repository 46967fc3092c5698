"""Marks of quarantined episodes, which no dataset trains on.

pointers/quarantine/<number>.json              a Mark, or the Lift of an earlier one; appended, never changed
artifacts/quarantine/<key>/marked.parquet      the episodes of a mark, as found when it was made

A mark names episodes by id, so that its meaning never changes; episodes sampled later need another mark.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from contracts.artifacts import ArtifactRef, ArtifactWriter, Frozen, open_artifact
from contracts.digests import digest_of, table_digest
from contracts.errors import ConfigError
from contracts.failpoints import failpoint
from contracts.pointers import Pointer
from contracts.store import Store

MARK = "quarantine"
"""Kind of the artifact with the episodes of a mark."""
MARKED = pa.schema([("episode_id", pa.binary()), ("rollouts", pa.string()), ("rewards", pa.string())])
"""Marked episodes, by rollouts. rollouts: URI of the artifact that holds the episode. rewards: URI of the only grading
that the mark concerns, or null for every use of the episode.
"""
_FILE = "marked.parquet"
_ROW_GROUP = 20_000
"""Rows read at least for one iteration."""


class Change(Frozen):
    """One change of what is quarantined."""

    number: int
    """Position in the history, from 1."""
    reason: str
    by: str
    """User and host."""
    unix: float
    """Time, in seconds since 1970."""


class Mark(Change):
    """Episodes that an operator does not trust."""

    what: str
    """Kind of the question that found them: task, image, episode, tool or rule."""
    value: str
    episodes: int
    marked: ArtifactRef
    """Artifact with a table MARKED."""

    def __str__(self) -> str:
        return f"mark {self.number} ({self.what} {self.value}: {self.reason})"


class Lift(Change):
    """Takes back a mark."""

    lifts: int
    """Number of the mark."""


class Quarantine:
    """The marks of a store."""

    def __init__(self, store: Store) -> None:
        self._store, self._pointer = store, Pointer(store, MARK)

    def history(self) -> list[Mark | Lift]:
        """All changes, oldest first."""
        entries = self._pointer.history()
        return [(Lift if "lifts" in each.value else Mark)(number=each.number, **each.value) for each in entries]

    def marks(self) -> list[Mark]:
        """Marks in force, oldest first."""
        history = self.history()
        lifted = {each.lifts for each in history if isinstance(each, Lift)}
        return [each for each in history if isinstance(each, Mark) and each.number not in lifted]

    def mark(self, what: str, value: str, marked: pa.Table, reason: str) -> tuple[Mark, bool]:
        """Mark episodes, and whether this call did: a mark in force of the same question and episodes is returned.

        marked: MARKED, sorted by rollouts.
        """
        key = digest_of([MARK, what, value, table_digest(marked)])
        config = {"what": what, "value": value}
        with ArtifactWriter(self._store, MARK, key, parents={}, config=config, code_version="1") as out:
            pq.write_table(marked, out.directory / _FILE, compression="zstd", row_group_size=_ROW_GROUP)
            out.add_file(_FILE, table_digest(marked))
            ref = out.commit(meta={"episodes": marked.num_rows}).ref
        while True:
            history = self.history()
            same = next((each for each in self.marks() if (each.marked, each.what) == (ref, what)), None)
            if same is not None:
                return same, False
            added = Mark(
                number=len(history) + 1, what=what, value=value, episodes=marked.num_rows, marked=ref, **_now(reason)
            )
            if self._append(added):
                return added, True

    def lift(self, number: int, reason: str) -> tuple[Mark, bool]:
        """Take back a mark; returns it, and whether this call did. Raises ConfigError for a number that is none."""
        while True:
            history = self.history()
            mark = next((each for each in history if isinstance(each, Mark) and each.number == number), None)
            if mark is None:
                raise ConfigError(f"there is no mark {number}: `triplane quarantine --list` lists the marks")
            if mark not in self.marks():
                return mark, False
            if self._append(Lift(number=len(history) + 1, lifts=number, **_now(reason))):
                return mark, True

    def episodes(self, rollouts: ArtifactRef, rewards: ArtifactRef) -> dict[str, list[Mark]]:
        """Quarantined episodes of these rollouts, as graded by these rewards, with their marks; sorted by id."""
        found: dict[str, list[Mark]] = {}
        for mark in self.marks():
            table = pq.read_table(self.path(mark), filters=[("rollouts", "=", rollouts.uri)])
            for row in table.to_pylist():
                if row["rewards"] in (None, rewards.uri):
                    found.setdefault(row["episode_id"].hex(), []).append(mark)
        return dict(sorted(found.items()))

    def of_episode(self, episode_id: str) -> list[Mark]:
        """Marks in force of one episode."""
        wanted = [("episode_id", "=", bytes.fromhex(episode_id))]
        return [mark for mark in self.marks() if pq.read_table(self.path(mark), filters=wanted).num_rows]

    def path(self, mark: Mark) -> Path:
        """Local Parquet file with the MARKED rows of a mark."""
        return open_artifact(self._store, mark.marked).path(_FILE)

    def _append(self, change: Mark | Lift) -> bool:
        done = self._pointer.advance(change.model_dump(mode="json", exclude={"number"}), change.number - 1)
        failpoint("episodes-marked")
        return done


def _now(reason: str) -> dict[str, Any]:
    """The part of a change that says who made it, when and why."""
    if not reason.strip():
        raise ConfigError("the reason is empty: give a few words, which the mark records")
    return {"reason": reason.strip(), "by": f"{_user()}@{socket.gethostname()}", "unix": time.time()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name in the environment and none for the user id
        return str(os.getuid())
