"""`python -m envd hibernate`, `fork`, `migrate` and other changes of a sandbox's state, one command each."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import describe
from envd.connection import access_of, add_access
from envd.errors import EnvdError
from envd.meeting import default_address
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.types import Handle

_HANDLE = """\
SANDBOX is a file with the sandbox's handle, or - for standard input: JSON with "id" and "token", as
`json.dumps(dataclasses.asdict(sandbox.handle))` gives it in Python and `--json` prints it here. Whoever has a handle
may use the sandbox, so keep it out of arguments and logs. `python -m envd top` lists ids.

  python -m envd fork agent.json --json > copy.json     # then: python -m envd hibernate copy.json
  python -m envd snapshot agent.json                    # prints the id that restore takes
  python -m envd migrate agent.json envd-2.example:7070 --tls-ca ca.crt --key-file key

Backends that keep files only (`namespaces`, `pods`, `plain`) lose processes and memory: what was not kept is printed.
"""
_HELP = {
    "sandbox": "file with the sandbox's handle, - for standard input",
    "snapshot": "id of a snapshot",
    "target": "the other server's address; key and TLS options hold for both servers",
}
_Said = dict[str, Any]


@dataclass(frozen=True)
class StateCommand:
    """One command; called with its arguments, it returns its exit code."""

    name: str
    words: str
    wanted: str
    """Positional arguments."""
    run: Callable[[OperationsClient, argparse.Namespace], Awaitable[_Said]]

    def __call__(self, argv: Sequence[str]) -> int:
        """Run the command."""
        parser = argparse.ArgumentParser(
            prog=f"python -m envd {self.name}",
            description=self.words,
            epilog=_HANDLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = parser.add_argument
        for name in self.wanted.split():
            add(name, metavar=name.upper(), help=_HELP[name])
        add("--address", help="unix:/path or host:port of the server (default: this user's server)")
        add("--json", action="store_true", help="print one JSON object; that of a new sandbox is its handle, too")
        add_access(add)
        arguments = parser.parse_args(argv)
        try:
            said = asyncio.run(self._run(arguments))
        except EnvdError as error:
            print(f"envd: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        print(json.dumps(said) if arguments.json else "\n".join(_lines(said)))
        return 0

    async def _run(self, arguments: argparse.Namespace) -> _Said:
        arguments.address = arguments.address or default_address()
        async with OperationsClient(arguments.address, access_of(arguments)) as client:
            await client.reached()
            return await self.run(client, arguments)


def _changing(method: Callable[[ManagedSandbox], Awaitable[object]]) -> Callable[..., Awaitable[_Said]]:
    async def run(client: OperationsClient, arguments: argparse.Namespace) -> _Said:
        sandbox = client.attach(_handle(arguments.sandbox))
        before = (await sandbox.status()).state
        await method(sandbox)
        said = await _told(sandbox)
        lost = said["lost"] if "hibernated" in (before, said["state"]) else []  # else it tells of an earlier command
        return said | {"lost": lost}

    return run


async def _fork(client: OperationsClient, arguments: argparse.Namespace) -> _Said:
    copy = await client.attach(_handle(arguments.sandbox)).fork()
    return await _told(copy, token=copy.handle.token)


async def _snapshot(client: OperationsClient, arguments: argparse.Namespace) -> _Said:
    identity, lost = await client.attach(_handle(arguments.sandbox)).snapshot()
    return {"snapshot": identity, "lost": lost}


async def _restore(client: OperationsClient, arguments: argparse.Namespace) -> _Said:
    made = await client.restore(arguments.snapshot)
    return await _told(made, token=made.handle.token)


async def _delete(client: OperationsClient, arguments: argparse.Namespace) -> _Said:
    await client.delete_snapshot(arguments.snapshot)
    return {"snapshot": arguments.snapshot, "state": "deleted"}


async def _migrate(client: OperationsClient, arguments: argparse.Namespace) -> _Said:
    access = access_of(argparse.Namespace(**{**vars(arguments), "address": arguments.target}))
    async with OperationsClient(arguments.target, access) as target:
        sandbox = client.attach(_handle(arguments.sandbox))
        return await _told(await sandbox.migrate(target, key=access.key or ""), server=arguments.target)


async def _told(sandbox: ManagedSandbox, **more: str) -> _Said:
    status = await sandbox.status()
    return {"id": sandbox.id, **more, "state": status.state, "backend": status.backend, "lost": status.lost}


def _lines(said: _Said) -> list[str]:
    """The answer in words, one `name value` a line."""
    lost = "not kept: " + ", ".join(said["lost"]) if said.get("lost") else ""
    return [*(f"{name} {value}" for name, value in said.items() if name != "lost"), *filter(None, [lost])]


def _handle(file: str) -> Handle:
    """Handle of a file. Raises EnvdError."""
    try:
        found = json.loads(sys.stdin.read() if file == "-" else Path(file).read_text())
        texts = (found["id"], found["token"])
        if not all(isinstance(each, str) and each.isascii() and each.isprintable() for each in texts):
            raise ValueError(f"not printable ASCII: {file}")
        return Handle(*texts)
    except OSError as error:
        raise EnvdError(f"SANDBOX: {describe(error)}: name a file with the sandbox's handle, see --help") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise EnvdError(f'SANDBOX: {file} is no handle: it must be JSON with "id" and "token"') from None


pause = StateCommand(
    "pause",
    "Stop a sandbox's processes where they stand; its memory is kept.",
    "sandbox",
    _changing(ManagedSandbox.pause),
)
resume = StateCommand(
    "resume", "Continue a sandbox that was paused or hibernated.", "sandbox", _changing(ManagedSandbox.resume)
)
hibernate = StateCommand(
    "hibernate",
    "Store a sandbox's state on the server's disk and end its processes, until resume.",
    "sandbox",
    _changing(ManagedSandbox.hibernate),
)
fork = StateCommand("fork", "Make an independent copy of a sandbox, which runs on.", "sandbox", _fork)
snapshot = StateCommand("snapshot", "Store a sandbox's state as a snapshot; the sandbox runs on.", "sandbox", _snapshot)
restore = StateCommand("restore", "Start a new sandbox from a snapshot.", "snapshot", _restore)
delete_snapshot = StateCommand("delete-snapshot", "Remove a snapshot.", "snapshot", _delete)
migrate = StateCommand(
    "migrate", "Move a sandbox to another server, under the same id and token.", "sandbox target", _migrate
)
