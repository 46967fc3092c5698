"""The C parts of envd: the agent in a sandbox and the spawner of namespaces sandboxes.

`python -m envd.native.build` compiles them; `make install` runs it.
"""

from __future__ import annotations

import functools
from pathlib import Path

from envd.errors import BackendUnavailable


def guest_binary() -> Path:
    """The built agent `envd-guest`, a static program.

    Raises BackendUnavailable where it is not built from the present sources.
    """
    return _built("envd-guest")


def spawner_binary() -> Path:
    """The built spawner `envd-spawn`, a static program.

    Raises BackendUnavailable where it is not built from the present sources.
    """
    return _built("envd-spawn")


@functools.cache
def _built(name: str) -> Path:
    from envd.native import build

    recorded = build.recorded_fingerprint(name, build.BINARIES)
    if recorded != build.fingerprint(name):
        state = "is older than its sources" if recorded else "is not built"
        raise BackendUnavailable(f"{build.BINARIES / name} {state}: run `python -m envd.native.build`")
    return build.BINARIES / name
