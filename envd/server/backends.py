"""Start and stop the requested backends of a server."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from envd.backends import AUTO, BACKENDS
from envd.backends.base import Backend, IsolationLevel
from envd.errors import BackendUnavailable

_FIX = (
    "On a machine: sysctl -w user.max_user_namespaces=10000 kernel.apparmor_restrict_unprivileged_userns=0. "
    "In a container: run it with --security-opt seccomp=deploy/envd-seccomp.json --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined, as deploy/compose.yaml does, or with --privileged. "
    "In a pod: set the securityContext that docs/sandboxes.md (In a pod) shows. "
    "For trusted code only: name --backend plain, which isolates nothing"
)
_log = logging.getLogger("envd")


async def start_backends(names: Sequence[str], run_dir: Path, *, pool: int) -> dict[str, Backend]:
    """Start the backends and return them by name, the default one first.

    `auto`: namespaces if it starts, else gVisor; never plain.

    pool: number of sandboxes kept ready, if the backend supports it. Raises BackendUnavailable with the reason of the
    first backend that does not start.
    """
    started: dict[str, Backend] = {}
    try:
        for name in names:
            for each in await _auto(run_dir, pool) if name == "auto" else [await _named(name, run_dir, pool)]:
                started.setdefault(each.name, each)
    except BaseException:
        await stop_backends(started)
        raise
    for name, backend in started.items():
        if backend.features.isolation == IsolationLevel.NONE:
            _log.error(
                "%s BACKEND: sandboxes are ordinary processes and isolate nothing; run trusted code only", name.upper()
            )
    return started


async def stop_backends(backends: dict[str, Backend]) -> None:
    """Stop all backends; log the error of each that fails to stop."""
    for error in await asyncio.gather(*(each.stop() for each in backends.values()), return_exceptions=True):
        if isinstance(error, BaseException):
            _log.error("a backend did not stop cleanly", exc_info=error)


async def _auto(run_dir: Path, pool: int) -> list[Backend]:
    """Start the first of the `AUTO` backends that works here.

    Raises BackendUnavailable, with the fix, if none does: plain must be requested by name.
    """
    refusals: list[str] = []
    for name in AUTO:
        try:
            return [await _start(name, run_dir, pool)]
        except BackendUnavailable as error:
            refusals.append(f"{name}: {error}")
    raise BackendUnavailable(f"no backend with isolation starts on this machine ({'; '.join(refusals)}). {_FIX}")


async def _named(name: str, run_dir: Path, pool: int) -> Backend:
    try:
        return await _start(name, run_dir, pool)
    except BackendUnavailable as error:
        if name != "namespaces":
            raise
        raise BackendUnavailable(f"the namespaces backend does not start here: {error}. {_FIX}") from error


async def _start(name: str, run_dir: Path, pool: int) -> Backend:
    if name not in BACKENDS:
        raise BackendUnavailable(f"unknown backend {name!r}: choose from {', '.join(BACKENDS)}, or auto")
    try:
        start = importlib.import_module(f"envd.backends.{name}.backend").start
    except ImportError as error:
        raise BackendUnavailable(
            f"the {name} backend needs a package that is not installed ({error}): install it"
        ) from error
    options = {"pool": pool} if "pool" in inspect.signature(start).parameters else {}
    return cast(Backend, await start(run_dir, **options))
