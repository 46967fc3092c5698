"""The process that starts verifications outlives requests that it can't serve."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from envd.backends.base import Runtime
from envd.errors import SandboxStartError
from envd.sandbox import wire
from envd.server.zygotes import Zygote
from envd.types import Limits
from tests.envd.boxes import template


@pytest.mark.parametrize("characters", [15_000, 40_000])
def test_long_variables_of_a_runtime_do_not_end_the_zygote(run_dir: Path, characters: int) -> None:
    runtime = Runtime("d" * 64, run_dir, is_root=True, env=(("MOTD", "é" * characters),))

    async def job() -> None:
        template(run_dir)
        zygote = await Zygote.start(run_dir, run_dir.name, "plain")
        try:
            if 6 * characters > wire.MAX_REQUEST:
                with pytest.raises(SandboxStartError, match=r"variables of runtime dddddddddddd .* shorten them"):
                    await zygote.spawn("template", Limits(), {}, runtime=runtime)
            else:
                (await zygote.spawn("template", Limits(), {}, runtime=runtime)).close()
            (await zygote.spawn("template", Limits(), {})).close()
        finally:
            await zygote.stop()

    asyncio.run(job())


def test_a_request_that_is_no_json_is_refused(run_dir: Path) -> None:
    async def job() -> None:
        template(run_dir)
        zygote = await Zygote.start(run_dir, run_dir.name, "plain")
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(zygote._control, [b'{"id": "cut'], [theirs.fileno()])
                theirs.close()
                ours.settimeout(20)
                refused = await asyncio.to_thread(wire.receive, ours)
            assert refused is not None and "JSONDecodeError" in refused[0]["failed"]
            (await zygote.spawn("template", Limits(), {})).close()
        finally:
            await zygote.stop()

    asyncio.run(job())
