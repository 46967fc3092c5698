"""Channel of messages between a launched process and its Dagster run, shared by its implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import dagster as dg

PIPES_BUCKET = "TRIPLANE_PIPES_BUCKET"
"""Names the bucket in the environment."""


@dataclass(frozen=True)
class Channel:
    """Sender and receiver of one launched process."""

    injector: dg.PipesContextInjector
    reader: dg.PipesMessageReader
    ended: Callable[[], None]
    """To be called when the process has ended: nobody waits for messages that a killed one would still have sent."""
