"""Named points at which a process can be killed or made to fail, to test crash safety.

    TRIPLANE_KILL_AT=group-committed       SIGKILL when this process first reaches that point
    TRIPLANE_KILL_AT=group-committed:3     ... the third time
    TRIPLANE_FAIL_AT=store-write:2:ENOSPC  raise that OSError instead (EIO when no name is given), as a bad disk would

Children inherit the variables and count separately. The variables are read once, at import; if unset, a point costs one
comparison.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from contracts.errors import ConfigError

KILL_VARIABLE = "TRIPLANE_KILL_AT"
FAIL_VARIABLE = "TRIPLANE_FAIL_AT"

POINTS: Mapping[str, str] = {
    "store-write": "an object of a local store is about to be written",
    "artifact-staged": "an artifact's files are staged, none is in the store but parts of several ranks",
    "before-manifest": "an artifact's files are in the store, its manifest is not",
    "after-manifest": "an artifact exists, leftovers of losing attempts are not removed yet",
    "multipart-under-way": "some parts of a large file are being uploaded to S3",
    "references-removed": "references to an iteration's pinned inputs are removed, the inputs are not",
    "manifest-removed": "an artifact's manifest is removed, its files are not",
    "hosted-asked": "the journal says that a hosted episode needs a sandbox, which was not asked for",
    "hosted-made": "a hosted episode has a sandbox, the journal does not name it",
    "hosted-sending": "calls of a hosted episode are in the journal, but not sent",
    "hosted-answered": "calls of a hosted episode have been executed, their answers are not in the journal",
    "hosted-taken": "the final state of a hosted episode is taken and its sandbox gone, the journal does not have it",
    "hosted-over": "the final state of a hosted episode is in the journal, its sandbox may live",
    "hosted-closing": "a hosted episode was ended or has expired, its sandbox lives",
    "hosted-graded": "a hosted episode is graded, its grade is not in the journal",
    "group-claimed": "a worker has claimed a group",
    "group-sampled": "a group's episodes have ended with their diffs, nothing is committed",
    "group-committed": "a group is committed",
    "task-sampled": "a task's episodes of an evaluation have ended and are graded, none is committed",
    "task-committed": "a task of an evaluation is committed, the evaluation is not",
    "data-batch-done": "a batch of a data pipeline has passed its stages, nothing is committed",
    "data-batch-committed": "a batch of a data pipeline is committed, the pipeline's artifact is not",
    "part-written": "a file of tensors is written to its stage, nothing names it",
    "rank-staged": "a rank has written its parts to its own disk, the other ranks do not know",
    "rank-part-stored": "a part of a rank is in the store, no manifest names it",
    "ranks-gathered": "the parts of all ranks are in the store, no manifest names them",
    "state-staged": "a trainer state or snapshot is written to its stage",
    "state-committed": "a trainer state is committed, its checkpoint is not",
    "checkpoint-staged": "a checkpoint's weights are written to their stage",
    "snapshot-committed": "a snapshot is committed, earlier ones are not dropped yet",
    "policy-promoted": "a policy went live, the decision about it is not recorded",
    "episodes-marked": "a mark of quarantined episodes is made or lifted, no dataset is rebuilt",
    "rolled-back": "an earlier policy is live again, no server knows",
    "artifact-described": "an artifact is committed, Dagster has no record of it",
    "file-staged": "a new file of settings is written under a temporary name",
    "reference-written": "an asset's reference is in the store, Dagster has no event",
}
"""Points with the state of the work there."""


@dataclass
class _Order:
    """Point, number of the arrival, and action."""

    name: str
    left: int
    """Arrivals until the action."""
    error: int | None
    """errno to raise; None: SIGKILL."""


def failpoint(name: str) -> None:
    """Kill the process or raise here if an environment variable requests it. name: one of POINTS."""
    if _ORDERED:
        _arrive(name)


def parse_order(variable: str, text: str) -> _Order:
    """Parse `name`, `name:n`, and for TRIPLANE_FAIL_AT `name:n:ERRNO`. Raises ConfigError."""
    name, _, rest = text.partition(":")
    number, _, code = rest.partition(":")
    fails = variable == FAIL_VARIABLE
    error = getattr(errno, code or "EIO", None) if fails else None
    if name not in POINTS:
        raise ConfigError(f"{variable}={text}: no failpoint is called {name!r}; choose one of {', '.join(POINTS)}")
    if not (number or "1").isdecimal() or int(number or 1) < 1 or (fails and error is None) or (code and not fails):
        raise ConfigError(f"{variable}={text}: write {name}, {name}:2" + (f", or {name}:2:ENOSPC" if fails else ""))
    return _Order(name, int(number or 1), error)


def _arrive(name: str) -> None:
    for order in _orders():
        if order.name != name:
            continue
        with _LOCK:
            order.left -= 1
            due = order.left == 0
        if due and order.error is None:
            os.write(2, f"failpoint {name}: killed by {KILL_VARIABLE}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        elif due and order.error is not None:
            os.write(2, f"failpoint {name}: failed by {FAIL_VARIABLE}\n".encode())
            raise OSError(order.error, os.strerror(order.error))


@functools.cache
def _orders() -> list[_Order]:
    """Orders from the environment; parsed late, so that a malformed one is a one-line error instead of an import
    error.
    """
    return [parse_order(each, os.environ[each]) for each in (KILL_VARIABLE, FAIL_VARIABLE) if os.environ.get(each)]


_LOCK = threading.Lock()
_ORDERED = bool(os.environ.get(KILL_VARIABLE) or os.environ.get(FAIL_VARIABLE))
