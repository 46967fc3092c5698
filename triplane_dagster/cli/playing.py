"""Play a policy in a command: engine and sandboxes are opened and closed here, and bars show the progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from contracts.store import Store

if TYPE_CHECKING:
    from ops.evaluation import Playing
    from resources.evaluation import PlaySettings


@contextmanager
def playing(store: Store, settings: PlaySettings, what: str) -> Iterator[Playing]:
    """What readings of policies are played with. what: name of the work beside its bars."""
    from ops.evaluation import Playing
    from resources.progress import Progress
    from resources.sampler import SamplerResource
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.bars import Bars

    sampler, sandboxes = SamplerResource(), SandboxesResource()
    try:
        with Bars() as bars:

            def show(phase: str, done: float, total: float | None, **numbers: Any) -> None:
                bars(Progress(what, None, phase, done, total, numbers))

            yield Playing(store, settings, sampler, sandboxes, show)
    finally:
        sampler.close()
        sandboxes.close()
