"""Sandboxes that are ordinary processes of the host, on a copy of the template. They isolate nothing: for trusted code, and for machines
where nothing else works."""

from __future__ import annotations

from pathlib import Path

from envd.backends.zygote_box import ZygoteBackend, start_zygote_backend


async def start(run_dir: Path) -> ZygoteBackend:
    """Start the backend. Raises BackendUnavailable."""
    return await start_zygote_backend(run_dir, "plain", isolated=False)
