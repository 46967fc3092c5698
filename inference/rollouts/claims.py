"""Claims of workers on groups, so that two workers never sample the same one.

    pointers/claims/<rollouts key>/owners/<owner>/<n>.json   the owner's lease, renewed while it lives
    pointers/claims/<rollouts key>/groups/<group>/<n>.json   who claimed the group; the highest number counts

Both are `contracts.pointers.Pointer`s, so a take-over is a compare-and-swap. A claim holds while its owner's lease has
not run out and, on the machine where that can be seen, its process lives. A claim saves work and decides nothing: the
first commit of a group wins.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from typing import Any

from contracts.pointers import Pointer
from contracts.processes import pid_space, start_of
from contracts.store import Store

LEASE_S = 60.0
"""Seconds a lease holds after its last renewal: how long the groups of a machine that vanished wait."""


class ClaimOwner:
    """Lease of one worker and the claims made under it. Its methods access the store: call them off the event loop."""

    def __init__(self, store: Store, key: str, *, lease_s: float = LEASE_S) -> None:
        self.name = uuid.uuid4().hex
        self.lease_s = lease_s
        self._store = store
        self._prefix = f"claims/{key}"
        self._lease = Pointer(store, f"{self._prefix}/owners/{self.name}")
        self._renewals = 0
        self._ended = False
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Take or extend the lease, unless it was given up. Every claim of this owner depends on it."""
        with self._lock:
            if not self._ended:
                self._set_lease(time.time() + self.lease_s)

    def end(self) -> None:
        """Give up the lease and all its claims at once, after a renewal that another thread may be making."""
        with self._lock:
            self._ended = True
            self._set_lease(0.0)

    def claim(self, group_id: str) -> bool:
        """Try to claim `group_id`. Returns False while another live owner holds it."""
        pointer = Pointer(self._store, f"{self._prefix}/groups/{group_id}")
        if pointer.advance({"owner": self.name}, 0):
            return True
        current = pointer.current_of_few()
        if current is not None:
            if current.value["owner"] == self.name:
                return True
            if self._is_live(current.value["owner"]):
                return False
        return pointer.advance({"owner": self.name}, current.number if current else 0)

    def _is_live(self, owner: str) -> bool:
        lease = Pointer(self._store, f"{self._prefix}/owners/{owner}").current()
        if lease is None:
            return False
        left = lease.value["expires_unix"] - time.time()
        # a machine whose clock is far ahead must not hold groups for that long
        return 0 < left <= 2 * max(self.lease_s, LEASE_S) and not _is_dead(lease.value["process"])

    def _set_lease(self, expires_unix: float) -> None:
        self._lease.advance({"expires_unix": expires_unix, "process": this_process()}, self._renewals)
        self._renewals += 1


def clear_claims(store: Store, key: str) -> None:
    """Remove the claims of finished rollouts, which nobody needs once every group is committed."""
    store.discard(f"pointers/claims/{key}/")


def this_process() -> dict[str, Any]:
    """Identity of this process: its machine, its pid there, and its start time (pids are reused)."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": pid_space(), "pid": pid, "started": start_of(pid)}


def _is_dead(process: dict[str, Any]) -> bool:
    """Whether the process is known to be gone; False if it ran where this process can't look."""
    here = pid_space()
    if here is None or process["machine"] != here:
        return False
    try:
        return bool(start_of(process["pid"]) != process["started"])
    except OSError:
        return False
