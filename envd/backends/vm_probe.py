"""Whether machines really start on this host."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from envd.backends.base import Backend, BoxSpec
from envd.errors import BackendUnavailable, EnvdError
from envd.types import Limits

_COMMAND_S = 30.0


async def probe(backend: Backend, directory: Path, what: str, patience_s: float) -> None:
    """Boot a machine, start a sandbox from it and run a command in that. Raises BackendUnavailable with what went wrong."""
    template = directory / "probe"
    template.mkdir()
    (template / "probe").write_text("probe\n")
    try:
        async with asyncio.timeout(patience_s):
            box = await backend.create(BoxSpec("probe", "probe", template, Limits()))
            try:
                (result,) = await box.guest.shell([("cat probe", _COMMAND_S)])
            finally:
                await box.destroy()
    except (EnvdError, OSError, TimeoutError) as error:
        raise BackendUnavailable(
            f"no machine starts under {what}: {error or f'no answer in {patience_s:g} s'}"
        ) from error
    finally:
        shutil.rmtree(template, ignore_errors=True)
    if result.head != b"probe\n":
        raise BackendUnavailable(f"a machine under {what} can't run commands: {result.head[:200]!r}")
