"""Verifications: final states graded in fresh sandboxes, which the verifier's zygote forks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envd.errors import ServerBusy
from envd.server.exporting import patterns_of
from envd.server.templates import Templates
from envd.server.zygotes import Zygote
from envd.types import Limits

_ASK_S = 60.0
"""How long a verifier may take beyond its tests' own deadline before it counts as hung."""


class Verifications:
    """Runs at most one verification a core at a time."""

    def __init__(self, zygote: Zygote, templates: Templates) -> None:
        self._zygote, self._templates = zygote, templates
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)

    @classmethod
    async def start(cls, run_dir: Path, templates: Templates, *, isolated: bool) -> Verifications:
        """Start the zygote. isolated: in namespaces, else as ordinary processes. Raises BackendUnavailable."""
        backend = "namespaces" if isolated else "plain"
        return cls(await Zygote.start(run_dir, f"{run_dir.name}-verifier", backend), templates)

    async def verify(
        self,
        template: str,
        diff: bytes,
        hidden: Mapping[str, bytes],
        tests: Sequence[str],
        limits: Limits,
        timeout_s: float,
        patience_s: float | None = None,
        artifacts: Sequence[str] = (),
        product: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Grade a final state in a sandbox of its own.

        Raises ServerBusy when none of the slots came free within `patience_s` (None: waits without end), and EnvdError for artifacts that
        are no patterns.
        """
        patterns_of(artifacts)
        digest = self._templates.require(template)
        files = sorted(hidden.items())
        header = {
            "op": "verify",
            "diff_bytes": len(diff),
            "hidden": [[path, len(content)] for path, content in files],
            "tests": list(tests),
            "timeout_s": timeout_s,
            "artifacts": list(artifacts),
            "product": list(product),
        }
        blob = diff + b"".join(content for _, content in files)
        try:
            async with asyncio.timeout(patience_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise ServerBusy(f"no verification slot came free in {patience_s:g} s: ask again") from error
        try:
            link = await self._zygote.spawn(digest, limits, {})
            try:
                reply, _ = await link.ask(header, blob, timeout_s=timeout_s + _ASK_S)
            finally:
                link.close()
        finally:
            self._slots.release()
        return dict(reply["result"])

    async def died(self) -> str:
        """Return when the zygote has ended by itself."""
        return await self._zygote.died()

    async def stop(self) -> None:
        """End the zygote and what it forked."""
        await self._zygote.stop()
