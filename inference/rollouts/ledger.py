"""Journal of every token that a policy sampled, committed or lost; telemetry covers only committed episodes.

    $TRIPLANE_LEDGER/tokens.jsonl      one line a turn, appended by one write; off unless the variable names a folder

A killed process loses no line that it wrote, and tears at most the last one.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "TRIPLANE_LEDGER"
FILE = "tokens.jsonl"
_FOLDER = os.environ.get(VARIABLE)


@dataclass(frozen=True)
class Sampled:
    """One sampled turn."""

    unix: float
    """When it had been sampled."""
    pid: int
    key: str
    """Action key of the work: of the rollouts, or of the evaluation run."""
    group: str
    episode: str
    attempt: int
    """From 0; counts infrastructure faults."""
    turn: int
    """From 1."""
    tokens: int
    begun: float
    """When the attempt began; in seconds since 1970, as `unix`."""


def record(key: str, group: str, episode: str, attempt: int, turn: int, tokens: int, begun: float) -> None:
    """Append a line if a ledger is configured."""
    if _FOLDER is None:
        return
    line = asdict(Sampled(time.time(), os.getpid(), key, group, episode, attempt, turn, tokens, begun))
    # the line break comes first: a line torn by a kill spoils no other
    os.write(_descriptor(_FOLDER, os.getpid()), b"\n" + json.dumps(line).encode())


def read_ledger(folder: Path) -> Iterator[Sampled]:
    """Complete lines in order of writing; a line cut off by a kill is skipped."""
    path = folder / FILE
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield Sampled(**json.loads(line))
        except (ValueError, TypeError):
            continue


@functools.lru_cache(maxsize=2)
def _descriptor(folder: str, pid: int) -> int:
    """Descriptor of the journal, opened once a process; lines of several processes do not mix."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return os.open(Path(folder) / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
