"""`python -m envd mcp`: options, and what is run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.stdio import stdio_server

from contracts.errors import TriplaneError, describe
from contracts.http_connections import BoundedConnection
from contracts.rpc.connecting import is_local, read_keys
from contracts.rpc.meeting import MadeKey
from envd.client import SandboxClient
from envd.connection import access_of, add_access
from envd.errors import EnvdError
from envd.local import LocalEnvd
from envd.mcp.http import Gate
from envd.mcp.server import make_server
from envd.mcp.sessions import Sessions
from envd.tools.schemas import DEFAULT_TOOLSET, toolset_named
from envd.types import Limits

_HELP = """\
The tools of a sandbox over MCP. A session has a sandbox of its own, from its first tool call to its end.

  python -m envd mcp                                           # standard streams, a private envd server
  # sandboxes of that server; workspaces begin as this directory
  python -m envd mcp --address unix:/run/envd.sock --files .
  python -m envd mcp --http 127.0.0.1:8000                     # streamable HTTP at http://127.0.0.1:8000/mcp
"""
_MAX_FILES, _MAX_BYTES = 10_000, 32 * 1024 * 1024
_SKIPPED = frozenset({".git", "__pycache__", ".pytest_cache"})


def run(given: list[str]) -> int:
    """Parse the arguments, serve until the end, return the exit code."""
    arguments = _parser().parse_args(given)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_serve(arguments))
    except (TriplaneError, OSError) as error:
        print(f"envd: {describe(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m envd mcp", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--address", help="an envd server, unix:/path or host:port (default: a private one)")
    add_access(add)
    add("--backend", default="auto", help="backend of a private server (default auto)")
    add("--files", type=Path, metavar="DIR", help="workspaces begin as a copy of this directory (default: empty)")
    add(
        "--toolset",
        default=DEFAULT_TOOLSET,
        metavar="NAME",
        help="tools of a sandbox, such as files+sql (default default)",
    )
    add("--http", metavar="HOST:PORT", help="serve streamable HTTP instead of standard streams")
    add(
        "--http-keys",
        type=Path,
        metavar="FILE",
        help="bearer keys of HTTP clients, one a line (default: on this machine, one that is made and printed)",
    )
    add("--timeout", type=float, default=60, metavar="S", help="seconds a tool call may take (default 60)")
    add("--idle", type=float, default=1800, metavar="S", help="end a session's sandbox after so long without calls")
    add("--lifetime", type=float, default=86_400, metavar="S", help="seconds a sandbox may live (default a day)")
    add("--max-sessions", type=int, default=64, metavar="N", help="sessions at the same time (default 64)")
    return parser


async def _serve(arguments: argparse.Namespace) -> None:
    if not (0 < arguments.timeout <= 3600 and arguments.idle > 0 and arguments.lifetime > 0):
        raise EnvdError("--timeout must be above 0 and at most 3600, --idle and --lifetime above 0")
    toolset_named(arguments.toolset)
    files = {} if arguments.files is None else await asyncio.to_thread(_files, arguments.files)
    listening = None if arguments.http is None else _listening(arguments)
    access = access_of(arguments)
    async with AsyncExitStack() as stack:
        address = arguments.address or stack.enter_context(LocalEnvd(arguments.backend)).address
        client = await stack.enter_async_context(SandboxClient(address, access))
        limits = Limits(lifetime_s=arguments.lifetime)
        sessions = Sessions(client, files, limits, arguments.timeout, arguments.max_sessions, arguments.toolset)
        stack.push_async_callback(sessions.end_all)
        await client.put_template(files)  # a server that is not there is told at once
        idle = asyncio.create_task(sessions.end_idle(arguments.idle))
        stack.callback(idle.cancel)
        server = make_server(sessions, version("triplane"))
        if listening is None:
            async with stdio_server() as (reading, writing):
                await server.run(reading, writing, server.create_initialization_options())
        else:
            await _serve_http(server, sessions, *listening, arguments)


class _Web(uvicorn.Server):
    """Ends at a signal as at any other end: uvicorn's own way raises the signal again, and nothing is cleaned up."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


async def _serve_http(
    server: Any, sessions: Sessions, host: str, port: int, keys: tuple[bytes, ...], arguments: argparse.Namespace
) -> None:
    made = None if keys else MadeKey.fresh("mcp")
    keys = (made.key.encode(),) if made is not None else keys
    app = server.streamable_http_app(
        host=host, session_idle_timeout=arguments.idle, max_sessions=arguments.max_sessions
    )
    gate = Gate(app, keys, sessions.end)
    config = uvicorn.Config(gate, host, port, http=BoundedConnection, log_level="warning", lifespan="on")
    web = _Web(config)
    print(f"envd: MCP at http://{arguments.http}/mcp", file=sys.stderr)
    if made is not None:
        file = made.publish(port)
        print(
            f"envd: it asks for this bearer key: {made.key} (also in {file} until it stops)",
            file=sys.stderr,
            flush=True,
        )
    try:
        await web.serve()
    finally:
        if made is not None:
            made.withdraw(file)
    if not web.started:
        raise EnvdError(f"--http {arguments.http} can't be listened on: choose a port that is free")


def _listening(arguments: argparse.Namespace) -> tuple[str, int, tuple[bytes, ...]]:
    host, _, port = arguments.http.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise EnvdError(f"--http {arguments.http!r} must be HOST:PORT")
    keys = () if arguments.http_keys is None else read_keys(arguments.http_keys)
    if not keys and not is_local(arguments.http):
        raise EnvdError(f"--http {arguments.http} is reached from other machines: give --http-keys")
    return host, int(port), keys


def _files(directory: Path) -> dict[str, bytes]:
    """The files of a directory, without git's and Python's. Raises EnvdError where there are too many."""
    found: dict[str, bytes] = {}
    size = 0
    if not directory.is_dir():
        raise EnvdError(f"--files {directory} is not a directory")
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if _SKIPPED.intersection(name.parts) or path.is_symlink() or not path.is_file():
            continue
        size += path.stat().st_size
        if len(found) >= _MAX_FILES or size > _MAX_BYTES:
            raise EnvdError(
                f"--files {directory} holds over {_MAX_FILES} files or {_MAX_BYTES} bytes: name a smaller one"
            )
        found[str(name)] = path.read_bytes()
    return found
