"""On PYTHONPATH, makes leasing an engine for rollouts and launching a trainer take $SAMPLING_SECONDS and
$TRAINING_SECONDS longer, as work on GPUs elsewhere would: this machine's cores stay free meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

if os.environ.get("SAMPLING_SECONDS") and any(
    part.endswith("triplane") or "multiprocessing" in part for part in sys.orig_argv
):
    from resources.launcher import LocalLauncher
    from resources.sampler import SamplerResource

    _lease, _run = SamplerResource.lease, LocalLauncher.run

    @asynccontextmanager
    async def _slow_lease(self: SamplerResource, policy: Any, role: str, config: Any) -> AsyncIterator[Any]:
        if role == "rollouts":
            await asyncio.sleep(float(os.environ["SAMPLING_SECONDS"]))
        async with _lease(self, policy, role, config) as engine:  # type: ignore[arg-type]
            yield engine

    def _slow_run(self: LocalLauncher, context: Any, launch: Any, on_message: Any) -> Any:
        time.sleep(float(os.environ["TRAINING_SECONDS"]))
        return _run(self, context, launch, on_message)

    SamplerResource.lease = _slow_lease  # type: ignore[method-assign]
    LocalLauncher.run = _slow_run  # type: ignore[method-assign]
