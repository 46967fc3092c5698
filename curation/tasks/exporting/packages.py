"""Versions of the packages that a task's tests see, for the image of an exported task."""

from __future__ import annotations

from importlib import metadata

from contracts.runtimes import ROOT, find_runtime
from contracts.store import Store
from curation.errors import TaskError


def packages_of(store: Store, runtime: str) -> dict[str, str]:
    """Versions by name. runtime: digest of the task's runtime; empty: pytest in the version that grades here.

    Raises TaskError if the store lacks the runtime, or if it is an image.
    """
    if not runtime:
        return {"pytest": metadata.version("pytest")}
    found = find_runtime(store, runtime)
    if found is None:
        raise TaskError(f"runtime {runtime[:12]} of its environment is not in {store.url}: make it again")
    if ROOT in found.names():
        raise TaskError(
            f"runtime {runtime[:12]} of its environment is an image, of which no Dockerfile is known: export rows"
            " (--format swebench)"
        )
    return {each["name"]: each["version"] for each in found.json("packages.json")}
