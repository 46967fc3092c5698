"""The C parts of envd: the agent in a sandbox and the spawner of namespaces sandboxes.

`python -m envd.native.build` compiles them where there is a C compiler; without them envd uses its Python ones.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

_log = logging.getLogger(__name__)


def guest_binary() -> Path | None:
    """The built agent `envd-guest`, a static program; None where it was not built from the sources as they are now."""
    return _built("envd-guest")


def spawner_binary() -> Path | None:
    """The built spawner `envd-spawn`, a static program; None where it was not built from the sources as they are now."""
    return _built("envd-spawn")


def _built(name: str) -> Path | None:
    path = Path(__file__).resolve().parent / "bin" / name
    return path if path.exists() and _current(name) else None


@functools.cache
def _current(name: str) -> bool:
    from envd.native import build

    current = build.recorded_fingerprint(name) == build.fingerprint(name)
    if not current:
        _log.warning("%s is older than its sources: run `python -m envd.native.build`", build.BINARIES / name)
    return current
