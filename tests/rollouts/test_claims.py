from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from contracts.errors import StoreError
from contracts.store import LocalStore
from inference.rollouts.claims import ClaimOwner, clear_claims
from inference.rollouts.worker import holding

ROOT = Path(__file__).parents[2]


def owner(store: LocalStore, lease_s: float = 60.0) -> ClaimOwner:
    found = ClaimOwner(store, "k", lease_s=lease_s)
    found.renew()
    return found


def test_concurrent_claims_succeed_once_per_group(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    groups = [f"g{index}" for index in range(12)]
    won: dict[str, list[str]] = {group: [] for group in groups}
    start = threading.Barrier(6)

    def work() -> None:
        me = owner(store)
        start.wait()
        for group in groups:
            if me.claim(group):
                won[group].append(me.name)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(winners) == 1 for winners in won.values())


def test_a_claim_is_kept_by_its_owner_and_free_once_the_lease_ends(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first, second = owner(store), owner(store)
    assert first.claim("g") and first.claim("g")
    assert not second.claim("g")
    first.end()
    assert second.claim("g")
    assert not owner(store).claim("g")


def test_a_failed_renewal_does_not_end_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, full = LocalStore(tmp_path), iter([StoreError("store is full")])
    create = store.create

    def create_or_fail(key: str, data: bytes, *, cached: bool = False) -> bool:
        if key.endswith("/00000002.json") and (fault := next(full, None)) is not None:
            raise fault
        return create(key, data, cached=cached)

    monkeypatch.setattr(store, "create", create_or_fail)
    first = ClaimOwner(store, "k", lease_s=0.6)

    async def hold() -> None:
        async with holding(first):
            assert first.claim("g")
            await asyncio.sleep(1.0)
            assert not owner(store).claim("g")

    asyncio.run(hold())
    assert owner(store).claim("g")


class SlowStore(LocalStore):
    """Writes wait for `go`, as they may on a store that is far away."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.writing, self.go = threading.Event(), threading.Event()
        self.go.set()

    def create(self, key: str, data: bytes, *, cached: bool = False) -> bool:
        self.writing.set()
        self.go.wait(20)
        return super().create(key, data, cached=cached)


def test_an_owner_that_ends_while_its_lease_is_being_renewed_holds_nothing(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    first = owner(store)
    assert first.claim("g")
    store.go.clear()
    store.writing.clear()
    renewing, ending = threading.Thread(target=first.renew), threading.Thread(target=first.end)
    renewing.start()
    assert store.writing.wait(20)
    ending.start()
    time.sleep(0.1)  # time for `end` to meet the renewal
    store.go.set()
    renewing.join(20)
    ending.join(20)
    first.renew()
    assert owner(LocalStore(tmp_path)).claim("g")


def test_an_expired_lease_is_taken_over_and_a_renewed_one_is_not(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    slow, keen = owner(store, lease_s=0.1), owner(store)
    assert slow.claim("g") and slow.claim("h")
    time.sleep(0.15)
    assert keen.claim("g")
    slow.renew()
    slow.lease_s = 60.0
    slow.renew()
    assert not keen.claim("h")


def test_claims_of_a_dead_process_are_free(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from contracts.store import LocalStore;"
        "from inference.rollouts.claims import ClaimOwner;"
        "me = ClaimOwner(LocalStore(Path(sys.argv[1])), 'k'); me.renew(); assert me.claim('g');"
        "print('claimed', flush=True); sys.stdin.read(); os._exit(1)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"claimed\n"
    me = owner(LocalStore(tmp_path))
    assert not me.claim("g")
    child.kill()
    child.communicate()
    assert me.claim("g")


def test_cleared_claims_leave_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert owner(store).claim("g")
    clear_claims(store, "k")
    assert store.list("pointers/") == []


def test_a_machine_whose_clock_was_far_ahead_holds_nothing_once_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, here = LocalStore(tmp_path), time.time
    with monkeypatch.context() as there:
        there.setattr("inference.rollouts.claims.time.time", lambda: here() + 30 * 86400)
        there.setattr("inference.rollouts.claims.this_process", lambda: {"host": "b", "machine": "b", "pid": 1})
        assert owner(store).claim("g")
    assert owner(store).claim("g")
