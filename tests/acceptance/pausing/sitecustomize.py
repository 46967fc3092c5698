"""On PYTHONPATH, makes the first commit of a $PAUSE_AT artifact in a `triplane` or trainer process take for ever, as on
a disk that hangs.

The file $PAUSED appears when that point is reached.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

if os.environ.get("PAUSE_AT") and any(part.rpartition("/")[2] in ("triplane", "trainer") for part in sys.orig_argv):
    from contracts.artifacts import Artifact, ArtifactWriter

    _commit = ArtifactWriter.commit

    def _pause(self: ArtifactWriter, *arguments: Any, **named: Any) -> Artifact:
        if self._kind == os.environ["PAUSE_AT"]:
            Path(os.environ["PAUSED"]).touch()
            while True:
                time.sleep(0.05)
        return _commit(self, *arguments, **named)

    ArtifactWriter.commit = _pause  # type: ignore[method-assign]
