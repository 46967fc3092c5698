"""Sandboxes with their own kernel in user space, gVisor's `runsc`: find the program, start the backend and test it.

docs/sandboxes-gvisor.md describes the installation of runsc and its protection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import subprocess
from pathlib import Path

from envd.backends.gvisor.boxes import GVisorBackend
from envd.backends.gvisor.server import Stage
from envd.backends.probing import probe
from envd.errors import BackendUnavailable
from envd.native import guest_binary

_OLDEST = "20240729"
"""Date of the oldest runsc whose checkpoints this backend can restore."""
_INSTALL = "install it by deploy/install-runsc.sh"
_log = logging.getLogger("envd")


async def start(run_dir: Path, pool: int = 0, *, runsc: Path | None = None, agent: Path | None = None) -> GVisorBackend:
    """Start the backend and test it by running a sandbox.

    pool: number of sandboxes kept ready for each requested template and limits.
    runsc: the program; None: search PATH and ~/.local/bin.
    agent: the program envd-guest; None: the one built here.
    Raises BackendUnavailable with the reason and the fix.
    """
    program = runsc or find_runsc()
    agent = agent or guest_binary()
    version = await asyncio.to_thread(_version, program)
    stage = await Stage.start(run_dir)
    try:
        ours = stage.directory / "agent"
        ours.mkdir()
        shutil.copy2(agent, ours / "envd-guest")  # a rebuilt agent must not affect running sandboxes
        backend = GVisorBackend(stage, program, version, ours, pool)
        unpooled = GVisorBackend(stage, program, version, ours, pool=0)
        await probe(unpooled.create, ours, "the gvisor backend")
    except BaseException:
        await stage.stop()
        raise
    if not backend.stage.enforced:
        _log.warning("gvisor sandboxes run without limits of memory and cpu: no control group can be written here")
    return backend


def find_runsc() -> Path:
    """Find the installed runsc. Raises BackendUnavailable with the fix."""
    local = Path.home() / ".local/bin"
    found = shutil.which("runsc") or shutil.which("runsc", path=str(local))
    if found is None:
        raise BackendUnavailable(
            f"the gvisor backend needs the program `runsc`, which is neither on PATH nor in {local}: {_INSTALL}"
        )
    return Path(found).resolve()


def _version(program: Path) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(f"{program} does not run ({error}): {_INSTALL}") from error
    version = done.stdout.partition("\n")[0].removeprefix("runsc version").strip()
    date = re.search(r"\d{8}", version)
    if date is None or date[0] < _OLDEST:
        raise BackendUnavailable(f"{program} is version {version!r}, older than {_OLDEST}: {_INSTALL}")
    return f"runsc {version}"
