"""Notes of a writer in its stage, written before it touches the store, by which traces of a killed writer are found.

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
    """URL."""
    folder: str
    """The artifact's, `artifacts/<kind>/<key>`."""
    attempt: str
    """Name of the attempt's own folder below it."""


def note_attempt(stage: Path, store: Store, folder: str, attempt: str) -> None:
    """Write the note."""
    (stage / _NOTE).write_text(json.dumps(asdict(AttemptNote(store.url, folder, attempt))))


def read_note(stage: Path) -> AttemptNote | None:
    """Note in a stage; None if there is none or it is incomplete (then nothing is in the store)."""
    try:
        return AttemptNote(**json.loads((stage / _NOTE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def seal_attempt(stage: Path, manifest: bytes) -> None:
    """Record that every file is in the store; from now on any process may complete the artifact with this manifest."""
    (stage / _SEAL).write_bytes(manifest)


def read_seal(stage: Path) -> bytes | None:
    """Manifest of a sealed attempt, or None while files are missing."""
    try:
        return (stage / _SEAL).read_bytes()
    except OSError:
        return None
