"""`python -m triplane_dagster.doctor.trials.sandbox auto|namespaces|ADDRESS [BACKEND]`: run a command in a real sandbox
and print the backend.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from contracts.errors import TriplaneError
from envd.addresses import entries_of, is_list, servers_of
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.types import ToolCall

ANSWER_S = 5.0


async def use_all(address: str, backend: str = "") -> str:
    """Run a command on every server that an address stands for."""
    servers, faults = await servers_of(entries_of(address))
    if faults or not servers:
        raise TriplaneError("; ".join(faults) or f"{address} stands for no server")
    said = [await _named(each, backend) for each in sorted(servers)]
    return said[0] if len(said) == 1 else f"{len(said)} servers: {'; '.join(dict.fromkeys(said))}"


async def _named(address: str, backend: str) -> str:
    try:
        return await use(address, backend)
    except TimeoutError as error:
        raise TriplaneError(f"no envd answers at {address} within {ANSWER_S:g} s") from error


async def use(address: str, backend: str = "") -> str:
    """Run a command in one sandbox of the server. backend: of that sandbox; empty: the server's choice."""
    async with OperationsClient(address) as client:
        async with asyncio.timeout(ANSWER_S):
            about = await client.info()
        template = await client.put_template({"probe": b"probe\n"})
        sandbox = await client.create(template, backend=backend)
        ran_on = (await sandbox.status()).backend
        answer = await sandbox.call(ToolCall("exec", {"command": "cat probe"}))
        await sandbox.close()
    if "probe" not in answer.text:
        raise TriplaneError(f"a sandbox did not run a command: {answer.text}")
    facts = next(each for each in about.backends if each.name == ran_on)
    isolates = "ISOLATES NOTHING: run trusted policies only" if facts.isolation_level == "none" else "isolates"
    limits = ", ".join(facts.limits_enforced) or "none"
    return f"{ran_on}: ran a command, {isolates}; enforced limits: {limits}"


def main(what: str, backend: str = "") -> int:
    """Run the check. Exits 0 with one line on stdout if a sandbox ran."""
    backends: dict[str, Literal["auto", "namespaces"]] = {"auto": "auto", "namespaces": "namespaces"}
    try:
        if what in backends:
            with LocalEnvd(backends[what]) as server:
                print(asyncio.run(use(server.address)))
        else:
            print(asyncio.run(use_all(what, backend) if is_list(what) else use(what, backend)))
    except TimeoutError:
        print(f"no envd answers at {what} within {ANSWER_S:g} s", file=sys.stderr)
        return 1
    except TriplaneError as error:
        if "its last lines say why" not in str(error):
            print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
