"""Test of a backend on this host: start a sandbox, use its workspace by its shell, and end it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from envd.backends.base import Box, BoxSpec
from envd.errors import BackendUnavailable, EnvdError
from envd.sandbox.linux import sandbox_owner
from envd.types import Limits

_COMMAND_S, _PATIENCE_S = 30.0, 60.0
_CONTENT = b"probe\n"


async def probe(
    create: Callable[[BoxSpec], Awaitable[Box]], directory: Path, what: str, patience_s: float = _PATIENCE_S
) -> None:
    """Start a sandbox by `create` and run a command in it. Raises BackendUnavailable with the reason.

    directory: where the probe creates and removes its template. what: name of the backend, for error messages.
    """
    template, owner = directory / f"probe-{secrets.token_hex(4)}", sandbox_owner()
    try:
        template.mkdir()
        (template / "probe").write_bytes(_CONTENT)
        for path in (template, template / "probe"):
            os.chown(path, owner, owner)
        async with asyncio.timeout(patience_s):
            box = await create(BoxSpec(template.name, template.name, template, Limits()))
            try:
                (result,) = await box.guest.shell([("test -w . && cat probe", _COMMAND_S)])
            finally:
                await box.destroy()
    except (OSError, EnvdError, TimeoutError) as error:  # a TimeoutError is an OSError without a message
        why = str(error) or f"no answer in {patience_s:g} s"
        raise BackendUnavailable(f"no sandbox starts under {what}: {why}") from error
    finally:
        shutil.rmtree(template, ignore_errors=True)
    if (result.code, result.head) != (0, _CONTENT):
        said = result.head.decode(errors="replace").strip()
        raise BackendUnavailable(f"a sandbox under {what} can't run commands in its workspace: {said[:300]!r}")
