"""What a writer notes in its stage before it touches the store, so that the traces of one that was killed can be found.

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
    """The note in a stage; None where there is none, or only a part of one: then nothing was in the store yet."""
    try:
        return AttemptNote(**json.loads((stage / _NOTE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def seal_attempt(stage: Path, manifest: bytes) -> None:
    """Note that every file is in the store: from here on anybody may complete the artifact by this manifest."""
    (stage / _SEAL).write_bytes(manifest)


def read_seal(stage: Path) -> bytes | None:
    """The manifest, or None while files are missing."""
    try:
        return (stage / _SEAL).read_bytes()
    except OSError:
        return None
