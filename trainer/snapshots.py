"""Snapshots of a running job, from which a killed job continues with the same bits.

    state --copied at once--> a thread --> artifact of kind `trainer_snapshot` --> earlier ones are removed

Training goes on while the thread writes; the next snapshot waits for it. Of a state that several ranks hold, each rank
writes its part, in a thread of its own; rank 0 commits. A snapshot exists as soon as its manifest
does, so a partial one is never seen. A damaged one is refused by its name when it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from contracts.adapters import Adapter
from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import action_key, canonical_json
from contracts.errors import ArtifactCorrupt, SchemaError
from contracts.failpoints import failpoint
from contracts.store import Store
from trainer.config import SNAPSHOT, SNAPSHOT_JOB
from trainer.errors import SnapshotRefused, TrainingStopped
from trainer.ranks import ALONE, Ranks
from trainer.state import TrainerState, commit_state, follow_state, load_state
from trainer.together import together

STOP_S = 4.0
"""Seconds that a job which was asked to stop waits for the snapshot that is being written."""
FAIL_S = 30.0
"""Seconds that a job which fails waits for it, so that the last good state is kept."""


class Snapshots:
    """Crash-safe snapshots of one job, found by the job's key. Only the latest is kept.

    A context: at its end no thread is left, or only one whose files are removed.
    """

    def __init__(
        self,
        store: Store,
        job_key: str,
        every: int,
        last: int,
        config: Mapping[str, Any],
        code_version: str,
        ranks: Ranks = ALONE,
    ) -> None:
        """every: steps between two snapshots. last: the job's last step. config: settings that a snapshot must have
        been written with.
        """
        self._store, self._job, self._version, self._ranks = store, job_key, code_version, ranks
        self._config = {**config, SNAPSHOT_JOB: job_key}
        self._steps = range(every, last + 1, every)
        self._writing: _Writing | None = None
        self._swept = False
        """Whether what an earlier process may have left is removed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            stopped = (error is not None and not isinstance(error, Exception)) or isinstance(error, TrainingStopped)
            if not writing.over.wait(STOP_S if stopped else FAIL_S):
                writing.abandon()

    def due(self, step: int) -> bool:
        """Whether a snapshot is due after `step`."""
        return step in self._steps

    def latest(
        self, model: Mapping[str, Any], adapter: Adapter | None = None, *, lazily: bool = False
    ) -> TrainerState | None:
        """State of the snapshot of the highest step, or None. model: config.json of its weights. adapter, lazily: see
        `load_state`. Every rank must call this, and gets the one that rank 0 finds.

        Raises SnapshotRefused for a snapshot that is damaged or of other settings, RanksLost.
        """
        try:
            found = self._find()
            return None if found is None else load_state(found, model, adapter, lazily=lazily)
        except (ArtifactCorrupt, SchemaError) as error:
            raise SnapshotRefused(f"the job's snapshot is damaged: {error}") from None

    def save(self, state: TrainerState, step: int) -> None:
        """Commit a copy of `state` in the background, then remove earlier snapshots. Every rank must call this.

        Waits for the snapshot before, on all ranks. Raises its error, if it had one.
        """
        if state.staged is None:  # rank 0 alone writes
            with together(self._ranks):
                self.wait()
        else:
            self.wait()
        if self._ranks.leads:
            out = ArtifactWriter(
                self._store,
                SNAPSHOT,
                self._key(step),
                parents={},
                config=self._config,
                code_version=self._version,
            )
            earlier = [each for each in self._steps if each < step]
            self._writing = _Writing(self, out, state.copied(), earlier[-1:] if self._swept else earlier)
            self._swept = True
        elif state.staged is not None:
            self._writing = _Writing(self, None, state, [])
        if self._writing is not None:
            self._writing.start()

    def wait(self) -> None:
        """Wait for the snapshot that is being written. Raises its error, if it had one."""
        writing = self._writing
        if writing is not None:
            writing.over.wait()  # a signal may end this
            self._writing = None
            writing.require_success()

    def clear(self) -> None:
        """Remove all snapshots."""
        self.wait()
        self.drop(self._steps)

    def drop(self, steps: Iterable[int]) -> None:
        """Remove the snapshots of some steps."""
        for step in steps:
            # the manifest sorts last and goes first: a kill leaves no artifact without files
            for key in reversed(self._store.list(f"artifacts/{SNAPSHOT}/{self._key(step)}/")):
                self._store.delete(key)

    def _find(self) -> Artifact | None:
        """Snapshot of the highest step that rank 0 sees: one may be completed or removed between two looks."""
        step, found = 0, None
        for step in reversed(self._steps) if self._ranks.leads else ():
            if (found := self._at(step)) is not None:
                self._require_own(found)
                break
        told = self._ranks.tell("" if found is None else str(step))
        if told and not self._ranks.leads:
            found = self._at(int(told))
            if found is None:
                raise SnapshotRefused(f"the snapshot of step {told}, which rank 0 read, is gone: run the job again")
        return found

    def _at(self, step: int) -> Artifact | None:
        return find_artifact(self._store, SNAPSHOT, self._key(step))

    def _require_own(self, found: Artifact) -> None:
        """Raise SnapshotRefused for a snapshot of other settings than the job's."""
        theirs = {**found.manifest.config, "code version": found.manifest.code_version}
        ours = {**self._config, "code version": self._version}
        for name, value in theirs.items():
            if canonical_json(value) != canonical_json(ours.get(name)):
                raise SnapshotRefused(
                    f"{found.ref.uri} is a snapshot of this job's key with {name} {_shown(value)}, the job has"
                    f" {_shown(ours.get(name))}: give the job another key, or delete the folder"
                )

    def _key(self, step: int) -> str:
        return action_key(SNAPSHOT, {"job": self._job}, {"step": step}, "1")


class _Writing(threading.Thread):
    """Write of one snapshot. out: None on ranks other than 0, which write their part alone."""

    def __init__(
        self, snapshots: Snapshots, out: ArtifactWriter | None, state: TrainerState, earlier: list[int]
    ) -> None:
        super().__init__(name="trainer-snapshot", daemon=True)
        self._snapshots, self._out, self._state, self._earlier = snapshots, out, state, earlier
        self._error: BaseException | None = None
        self.over = threading.Event()
        """Set at the end. Unlike `join`, a wait for it may be interrupted by a signal and repeated."""

    def run(self) -> None:
        """Write, commit, and remove the earlier snapshots."""
        try:
            if self._out is None:
                follow_state(self._state)
                return
            with self._out:
                commit_state(self._out, self._state)
            failpoint("snapshot-committed")
            self._snapshots.drop(self._earlier)
        except BaseException as error:  # noqa: BLE001 - `require_success` raises it in the thread that trains
            self._error = error
        finally:
            self.over.set()

    def require_success(self) -> None:
        """Raise the error of the write, if there was one."""
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Remove the files of a write that does not end."""
        with suppress(OSError):  # it may still be adding files
            if self._out is not None:
                self._out.__exit__(None, None, None)
            if self._state.staged is not None:
                self._state.staged.folder.cleanup()


def _shown(value: object) -> str:
    return f"{value!s:.60}"
