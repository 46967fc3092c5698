"""Read the result of each hidden test from the store's verdicts, if they still exist."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from contracts.errors import ArtifactCorrupt
from contracts.store import Store
from contracts.tasks import Task
from curation.verdicts import read_verdict, verdict_key

READERS = 16
"""Verdicts read concurrently: each is a separate small object, with high latency on S3."""
MAX_MESSAGE = 600
"""Maximum characters of a test's message."""

Tests = list[dict[str, str]]


def read_verdicts(store: Store, states: Mapping[str, tuple[str, bytes]], tasks: Mapping[str, Task]) -> dict[str, Tests]:
    """Test results by episode id. states: episode id -> (task id, final diff).

    An episode without a stored verdict is absent.
    """
    keys = {episode: verdict_key(tasks[task], diff) for episode, (task, diff) in states.items() if task in tasks}
    wanted = sorted(set(keys.values()))
    with ThreadPoolExecutor(READERS) as pool:
        found = dict(zip(wanted, pool.map(lambda key: _read(store, key), wanted), strict=True))
    return {episode: tests for episode, key in keys.items() if (tests := found[key]) is not None}


def _read(store: Store, key: str) -> Tests | None:
    try:
        verdict = read_verdict(store, key)
    except ArtifactCorrupt:
        return None
    return None if verdict is None else [_shown(test.model_dump()) for test in verdict.tests]


def _shown(test: dict[str, Any]) -> dict[str, str]:
    return {"name": test["name"], "status": test["status"], "message": test["message"][:MAX_MESSAGE]}
