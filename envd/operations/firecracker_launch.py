"""Launches many microVMs at once from one template and says how long that took: `python -m
envd.operations.firecracker_launch --count 50`.

Each counts as started when a first command has returned. With --hold they run until Ctrl-C; else they are destroyed at
once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from contracts.errors import TriplaneError
from contracts.owned import owned_name, remove
from envd.backends.base import Box, BoxSpec
from envd.backends.firecracker import backend as firecracker
from envd.sandbox.cgroups import OWNED
from envd.sandbox.delegation import make_room
from envd.sandbox.linux import sandbox_owner
from envd.server.templates import Templates
from envd.types import Limits

_COMMAND_S = 30.0


async def launch(
    count: int, template: Path | None, limits: Limits, image: Path | None, hold: bool
) -> dict[str, float | int]:
    """Start `count` machines, all at the same time as far as the host can. Returns milliseconds and a rate."""
    run_dir = Path(tempfile.gettempdir(), f"{OWNED}{owned_name()}")
    run_dir.mkdir(mode=0o711)
    make_room()
    try:
        templates = Templates(run_dir / "templates", sandbox_owner())
        (run_dir / "templates").mkdir()
        files = {} if template is None else _files(template)
        digest = await templates.put(files)
        backend = await firecracker.start(run_dir, image)
        try:
            await (
                await backend.create(_spec(0, digest, run_dir, limits))
            ).destroy()  # the base machine's boot is not what is measured
            began = time.perf_counter()
            started = await asyncio.gather(
                *(_one(backend, _spec(n, digest, run_dir, limits)) for n in range(1, count + 1))
            )
            seconds = time.perf_counter() - began
            if hold:
                print(f"{count} machines run; Ctrl-C ends them", file=sys.stderr)
                await asyncio.Event().wait()
            await asyncio.gather(*(box.destroy() for box, _ in started))
        finally:
            await backend.stop()
    finally:
        await asyncio.to_thread(remove, run_dir)
    times = sorted(1000 * each for _, each in started)
    return {
        "count": count,
        "seconds": round(seconds, 3),
        "per_second": round(count / seconds, 1),
        "p50_ms": round(statistics.median(times), 1),
        "p99_ms": round(times[min(count - 1, int(count * 0.99))], 1),
    }


async def _one(backend: firecracker.FirecrackerBackend, spec: BoxSpec) -> tuple[Box, float]:
    began = time.perf_counter()
    box = await backend.create(spec)
    await box.guest.shell([("true", _COMMAND_S)])
    return box, time.perf_counter() - began


def _spec(number: int, digest: str, run_dir: Path, limits: Limits) -> BoxSpec:
    return BoxSpec(f"launch{number}", digest, run_dir / "templates" / digest, limits, host_name=f"launch{number}")


def _files(directory: Path) -> dict[str, bytes]:
    if not directory.is_dir():
        raise TriplaneError(f"--template {directory} is not a directory")
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m envd.operations.firecracker_launch", description="Launch many Firecracker microVMs at once."
    )
    parser.add_argument("--count", type=int, default=50, help="machines; default: 50")
    parser.add_argument("--template", type=Path, help="directory with the workspace's files; default: an empty one")
    parser.add_argument("--memory-mb", type=int, default=Limits.memory_mb, help="memory of each, in MiB")
    parser.add_argument("--image", type=Path, help="guest image; default: $TRIPLANE_ENVD_IMAGE, else the user's cache")
    parser.add_argument("--hold", action="store_true", help="keep them running until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    if given.count < 1:
        parser.error("--count must be at least 1")
    try:
        with suppress(KeyboardInterrupt):
            found = asyncio.run(
                launch(given.count, given.template, Limits(memory_mb=given.memory_mb), given.image, given.hold)
            )
            words = "{count} machines in {seconds} s, {per_second} a second; each p50 {p50_ms} ms, p99 {p99_ms} ms"
            print(json.dumps(found) if given.json else words.format(**found))
    except (TriplaneError, OSError) as error:
        print(f"firecracker_launch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
