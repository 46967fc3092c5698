"""`python -m envd top`: a live table of a server's sandboxes, or one look at them.

What comes from sandboxes' owners (labels, host names) is printed without control characters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from contracts.pb import envd_operations_pb2 as pb
from envd.connection import access_of, add_access
from envd.errors import EnvdError
from envd.meeting import default_address
from envd.operations.client import OperationsClient
from envd.types import SandboxStatus

_MOST_ROWS = 500
_COLUMNS = {"ID": 8, "STATE": 10, "BACKEND": 10, "AGE": 6, "EXPIRES": 7, "MEMORY": 7, "PIDS": 4, "CPU%": 4}
"""With their widths; labels get what is left."""
_PIPE_WIDTH = 160
_Row = tuple[SandboxStatus, float]
"""A sandbox and its use of the processor since the last look, in percent of a core."""
_SORTS: dict[str, Callable[[_Row], object]] = {
    "age": lambda row: -row[0].age_s,
    "expires": lambda row: row[0].expires_in_s,
    "memory": lambda row: -row[0].memory_bytes,
    "pids": lambda row: -row[0].pids,
    "cpu": lambda row: -row[1],
    "state": lambda row: (row[0].state, -row[0].age_s),
    "backend": lambda row: (row[0].backend, -row[0].age_s),
}


def run_top(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        asyncio.run(_top(arguments))
    except KeyboardInterrupt:
        return 0
    except EnvdError as error:
        print(f"envd: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0  # who read it has seen enough
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m envd top", description="A live table of a server's sandboxes.")
    add = parser.add_argument
    add("--address", help="unix:/path or host:port of the server (default: this user's server)")
    add("--sort", choices=sorted(_SORTS), default="age", help="largest first; expires: soonest first (default age)")
    add("--label", action="append", default=[], metavar="KEY=VALUE", help="only sandboxes with this label; repeatable")
    add("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (default 1)")
    add("--once", action="store_true", help="look once and end")
    add("--json", action="store_true", help="print JSON, one object a look")
    add_access(add)
    return parser


async def _top(arguments: argparse.Namespace) -> None:
    labels = _labels(arguments.label)
    if not arguments.interval > 0:
        raise EnvdError(f"--interval {arguments.interval:g} must be above 0")
    arguments.address = arguments.address or default_address()
    access = access_of(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    async with OperationsClient(arguments.address, access) as client:
        watch = _Watch(client, labels, _SORTS[arguments.sort])
        info = await client.reached()
        if arguments.once or arguments.json:
            while True:
                rows = await watch.look()
                if arguments.json:
                    print(json.dumps(_object(info, rows)), flush=True)
                else:
                    console.print(_screen(info, rows, console.size.height if console.is_terminal else _MOST_ROWS))
                if arguments.once:
                    return
                await asyncio.sleep(arguments.interval)
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                rows = await watch.look()
                live.update(_screen(info, rows, console.size.height), refresh=True)
                await asyncio.sleep(arguments.interval)


class _Watch:
    """Looks at a server again and again."""

    def __init__(self, client: OperationsClient, labels: Mapping[str, str], sort: Callable[[_Row], object]) -> None:
        self._client, self._labels, self._sort = client, labels, sort
        self._before: dict[str, float] = {}
        self._when = time.monotonic()

    async def look(self) -> list[_Row]:
        """The sandboxes now, sorted."""
        found = await self._client.list(self._labels)
        now = time.monotonic()
        passed = max(now - self._when, 1e-3)
        rows = []
        for each in found:
            used = self._before.get(each.id)
            # at the first look: over its whole life
            percent = each.cpu_s / max(each.age_s, 1e-3) if used is None else max(each.cpu_s - used, 0) / passed
            rows.append((each, 100 * percent))
        self._before, self._when = {each.id: each.cpu_s for each in found}, now
        return sorted(rows, key=self._sort)  # type: ignore[arg-type]


def _object(info: pb.InfoReply, rows: list[_Row]) -> dict[str, object]:
    """A look as JSON; ids are whole, since no token comes with them."""
    sandboxes = [{**asdict(each), "labels": dict(each.labels), "cpu_percent": round(cpu, 2)} for each, cpu in rows]
    return {"backend": info.backend, "live": info.live, "sandboxes": sandboxes}


def _screen(info: pb.InfoReply, rows: list[_Row], height: int) -> Group:
    memory, pids = sum(each.memory_bytes for each, _ in rows), sum(each.pids for each, _ in rows)
    head = (
        f"envd {info.backend}, {len(rows)} sandboxes, {_size(memory)}, {pids} processes,"
        f" {sum(cpu for _, cpu in rows):.0f}% cpu"
    )
    table = Table(expand=False, pad_edge=False, box=None)
    for name, width in _COLUMNS.items():
        table.add_column(name, min_width=width, no_wrap=True, justify="left" if width > 7 else "right")
    table.add_column("LABELS", overflow="ellipsis", no_wrap=True)
    shown = rows[: max(1, min(_MOST_ROWS, height - 4))]
    for each, cpu in shown:
        labels = " ".join(f"{key}={value}" for key, value in sorted(each.labels.items()))
        cells = [
            each.id[:8],
            each.state,
            each.backend,
            _span(each.age_s),
            _span(each.expires_in_s),
            _size(each.memory_bytes),
            str(each.pids),
            f"{cpu:.0f}",
            labels,
        ]
        table.add_row(*(Text(harmless(cell)) for cell in cells))
    more = len(rows) - len(shown)
    return Group(Text(harmless(head)), table, *([Text(f"and {more} more")] if more else []))


def harmless(text: str) -> str:
    """Text without what a terminal obeys: control characters, and those that turn the direction of writing, become
    `?`.
    """
    return "".join(each if each.isprintable() else "?" for each in text)


def _span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f}M" if count < 2**30 else f"{count / 2**30:.1f}G"


def _labels(given: Sequence[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    if wrong := [key for key, equals, _ in pairs if not (key and equals)]:
        raise EnvdError(f"--label {wrong[0]!r} is no label: write KEY=VALUE")
    return {key: value for key, _, value in pairs}
