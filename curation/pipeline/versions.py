"""Names of results: each run of a pipeline that gives other rows is its next version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.pointers import Pointer, pointer_folders
from contracts.store import Store
from curation.errors import PipelineError

_FOLDER = "data"


@dataclass(frozen=True)
class Version:
    """One version of a pipeline's result."""

    name: str
    number: int
    """From 1."""
    artifact: Artifact

    def __str__(self) -> str:
        return f"{self.name}@{self.number}"


def record_version(store: Store, name: str, artifact: Artifact) -> Version:
    """Make an artifact the latest version of a pipeline, unless it is."""
    pointer = _pointer(store, name)
    while True:
        current = pointer.current()
        if current is not None and ArtifactRef(**current.value) == artifact.ref:
            return Version(name, current.number, artifact)
        pointer.advance(artifact.ref.model_dump(), current.number if current else 0)


def versions(store: Store, name: str | None = None) -> Iterator[Version]:
    """Versions of a pipeline, or of all by name, the oldest first."""
    for each in [name] if name else pointer_folders(store, _FOLDER):
        for entry in _pointer(store, each).history():
            yield Version(each, entry.number, open_artifact(store, ArtifactRef(**entry.value)))


def find_version(store: Store, text: str) -> Version:
    """The version that `NAME`, `NAME@latest` or `NAME@3` names. Raises PipelineError."""
    name, _, number = text.partition("@")
    found = _pointer(store, name).history() if name in pointer_folders(store, _FOLDER) else []
    if not found:
        known = ", ".join(pointer_folders(store, _FOLDER)) or "none"
        raise PipelineError(f"{text}: no pipeline {name} has run into {store.url} ({known}): triplane data run {name}")
    entry = found[-1] if number in ("", "latest") else next((e for e in found if str(e.number) == number), None)
    if entry is None:
        raise PipelineError(f"{text}: {name} has versions 1 to {found[-1].number}: name one of them, or latest")
    return Version(name, entry.number, open_artifact(store, ArtifactRef(**entry.value)))


def _pointer(store: Store, name: str) -> Pointer:
    return Pointer(store, f"{_FOLDER}/{name}")
