"""On PYTHONPATH, holds the commit of an artifact in a run of the UI, or in its trainer, while $BRAKES/KIND exists, as
on a disk that hangs for a time.

The file $BRAKES/KIND.reached appears when that point is reached.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

if os.environ.get("BRAKES") and any("spawn_main" in part or part == "trainer" for part in sys.orig_argv):
    from contracts.artifacts import Artifact, ArtifactWriter

    _commit = ArtifactWriter.commit

    def _hold(self: ArtifactWriter, *arguments: Any, **named: Any) -> Artifact:
        brake = Path(os.environ["BRAKES"]) / self._kind
        while brake.exists():
            brake.with_suffix(".reached").touch()
            time.sleep(0.05)
        return _commit(self, *arguments, **named)

    ArtifactWriter.commit = _hold  # type: ignore[method-assign]
