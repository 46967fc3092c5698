"""Notes in a writer's stage, written before it changes the store, to find leftovers of a killed writer.

<scratch>/stage-<owner>/.attempt     store, the artifact's folder, and the attempt whose files it writes there
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from contracts.store import Store

_NOTE, _SEAL = ".attempt", ".manifest"


@dataclass(frozen=True)
class AttemptNote:
    """One attempt at committing an artifact."""

    store: str
    """URL of the store."""
    folder: str
    """Folder of the artifact, `artifacts/<kind>/<key>`."""
    attempt: str
    """Name of the attempt's folder below it."""


def note_attempt(stage: Path, store: Store, folder: str, attempt: str) -> None:
    """Write the note."""
    (stage / _NOTE).write_text(json.dumps(asdict(AttemptNote(store.url, folder, attempt))))


def read_note(stage: Path) -> AttemptNote | None:
    """Note in a stage; None if it is missing or incomplete (then the store has no files of the attempt)."""
    try:
        return AttemptNote(**json.loads((stage / _NOTE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def seal_attempt(stage: Path, manifest: bytes) -> None:
    """Record that the store has all files; from now on any process may complete the artifact with this manifest."""
    (stage / _SEAL).write_bytes(manifest)


def read_seal(stage: Path) -> bytes | None:
    """Manifest of a sealed attempt, or None while files are missing."""
    try:
        return (stage / _SEAL).read_bytes()
    except OSError:
        return None
