"""Sandboxes in namespaces, forked by the Python zygote: what the namespaces backend is where nothing could be compiled."""

from __future__ import annotations

from pathlib import Path

from envd.backends.zygote_box import ZygoteBackend, start_zygote_backend


async def start(run_dir: Path) -> ZygoteBackend:
    """Start the backend. Raises BackendUnavailable."""
    return await start_zygote_backend(run_dir, "namespaces", isolated=True)
