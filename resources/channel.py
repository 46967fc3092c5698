"""Channel of messages between a launched process and its Dagster run, shared by its implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import dagster as dg

PIPES_BUCKET = "TRIPLANE_PIPES_BUCKET"
"""Environment variable with the bucket."""


@dataclass(frozen=True)
class Channel:
    """Sender and receiver of one launched process."""

    injector: dg.PipesContextInjector
    reader: dg.PipesMessageReader
    ended: Callable[[], None]
    """Call this when the process has ended, so that the reader stops waiting for messages of a killed process."""
