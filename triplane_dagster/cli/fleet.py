"""`triplane fleet`: the replicas behind a router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.errors import ConfigError
from triplane_dagster.cli.options import AsJson, ExperimentName
from triplane_dagster.cli.output import console, print_json, print_rows

if TYPE_CHECKING:
    from inference.fleet.client import FleetClient

app = typer.Typer(
    no_args_is_help=True,
    help="""See the replicas behind a router, take some out, and roll new weights out without a pause.

    A router is `python -m inference route`; replicas join it with `python -m inference serve --join URL`, or `python -m
    inference join` beside a vLLM server. docs/fleet.md explains leases, health, drains and pins.

        triplane fleet list                                   # who serves what, and how much

        triplane fleet drain http://10.0.0.7:8000 --wait      # then stop it: nobody notices

        triplane fleet update --policy live --at-once 2       # pinned sessions keep their version
    """,
)
Router = Annotated[
    str, typer.Option("--router", envvar="TRIPLANE_ROUTER", help="URL of a router, e.g. http://router:8080.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        envvar="TRIPLANE_FLEET_KEY_FILE",
        help="File with a key of the router's --fleet-key-file [default: none, for a router on this machine].",
    ),
]
ROUTER = "http://127.0.0.1:8080"


@app.command("list")
def list_replicas(router: Router = ROUTER, as_json: AsJson = False) -> None:
    """Print the replicas: state, policy version, and requests, tokens and sessions of all routers.

    States: serving; faulty (fails, and is still asked, since half of the fleet is ejected already); ejected; away
    (nobody accepts connections); draining; updating (its weights are not proven yet). `lease` are the seconds after
    which a replica is forgotten unless it renews, `-` those of an address that was given to the router.

    Examples:

        triplane fleet list

        triplane fleet list --router http://router:8080 --json
    """
    state = _run(router, None, lambda client: client.state())
    if as_json:
        print_json(state)
        return
    columns = {"url": "url", "state": "state", "version": "version", "requests": "requests", "tokens": "tokens"}
    columns |= {"sessions": "sessions", "capacity": "capacity", "lease": "lease_s", "fault": "fault"}
    rows = [{name: _short(key, each[key]) for name, key in columns.items()} for each in state["replicas"]]
    print_rows(rows, as_json=False, empty="no replica: start one with --join, or give the router a --replica")
    for version, sessions in state["pinned"].items():
        console().print(f"{sessions} open sessions are pinned to {version[:12]}.")
    if state["registry"] != "well":
        console().print("The router can't reach Redis: leases and drains are as they were before.")


@app.command()
def drain(
    replica: Annotated[
        str, typer.Argument(metavar="URL", help="URL of the replica, as `triplane fleet list` shows it.")
    ],
    deadline: Annotated[
        float, typer.Option(min=0, max=604_800, help="Seconds for which the sessions that it has may stay.")
    ] = 300.0,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has neither requests nor sessions.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Send it new sessions again.")] = False,
    router: Router = ROUTER,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Send no new sessions to a replica. Those that it has stay until they end, or until the deadline; a session ends
    by `DELETE /fleet/sessions/NAME`, or ten minutes after its last request. Requests in flight are answered.

    Examples:

        triplane fleet drain http://10.0.0.7:8000 --deadline 60 --wait && kubectl delete pod engine-7

        triplane fleet drain http://10.0.0.7:8000 --undo
    """
    if undo and wait:
        raise ConfigError("--undo ends the drain: give it without --wait")

    from inference.fleet.client import row_of
    from inference.fleet.registry import check_url

    try:
        replica = check_url(replica)
    except ValueError as error:
        raise ConfigError(str(error)) from None

    async def drained(client: FleetClient) -> dict[str, Any]:
        if undo:
            return await client.undrain(replica)
        state = await client.drain(replica, deadline)
        while wait and not _is_empty(row_of(state, replica)):
            await asyncio.sleep(0.5)
            state = await client.state()
        return state

    row = row_of(_run(router, key_file, drained), replica)
    if as_json:
        print_json(row)
    elif undo:
        console().print(f"{replica} is {row['state']}.")
    else:
        left = f"{row['requests']} requests in flight, {row['sessions']} sessions"
        console().print(f"{replica} drains: {'nothing is left, stop it' if _is_empty(row) else left}.", soft_wrap=True)


@app.command()
def update(
    experiment: ExperimentName = "quickstart",
    policy: Annotated[
        str, typer.Option(help="Checkpoint directory, digest (or prefix) of a checkpoint, base, or live.")
    ] = "live",
    at_once: Annotated[int, typer.Option(min=1, help="Replicas to update at the same time, at most.")] = 1,
    deadline: Annotated[
        float,
        typer.Option(
            min=0, max=604_800, help="Seconds for which the last replicas of a version wait for its sessions."
        ),
    ] = 600.0,
    weights_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of `python -m inference weights` beside each vLLM server."),
    ] = None,
    router: Router = ROUTER,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Load a policy into every replica, a few at a time, while the others serve.

    Each is drained, loaded, proven to serve the policy, and asked again. Requests with the header `X-Policy-Version`
    get tokens of that version only: their sessions move to other replicas of it, and the last of those waits for them.
    A session that is open after the deadline gets 409. Stops at the first replica that can't load the policy. Safe to
    interrupt and to run again.

    Replicas read the checkpoint under the same path as this machine, or have a weights service (--weights-port).

    Examples:

        triplane fleet update

        triplane fleet update --policy /checkpoints/0007 --at-once 4 --deadline 120 --router http://router:8080
    """
    from contracts.store import open_store
    from inference.engines.policies import PolicyDirectory
    from inference.fleet.update import Loader, Rollout, roll
    from triplane_dagster.cli.serve import asked_policy

    is_folder = Path(policy).is_dir()
    if is_folder:
        files = PolicyDirectory(Path(policy).resolve(), Path(policy).resolve().name)
    else:
        checkpoint = asked_policy(open_store(), experiment, policy)
        files = PolicyDirectory(checkpoint.directory(), checkpoint.ref.digest)
    began = time.monotonic()

    def say(line: str) -> None:
        if not as_json:
            console().print(f"{time.monotonic() - began:6.1f} s  {line}", soft_wrap=True)

    async def rolled(client: FleetClient) -> dict[str, Any]:
        known = sum(row["version"] == files.version for row in (await client.state())["replicas"])
        if is_folder and known:
            say(f"{known} serve {files.version} already: rename the folder if it has other weights than they")
        loader = Loader(files, weights_port)
        await roll(client, files.version, loader.load, Rollout(at_once, deadline), say)
        return await client.state()

    state = _run(router, key_file, rolled)
    if as_json:
        print_json(state)
        return
    count = sum(each["version"] == files.version for each in state["replicas"])
    console().print(f"{count} of {len(state['replicas'])} replicas serve {files.version}.", soft_wrap=True)


def _run(
    router: str, key_file: Path | None, work: Callable[[FleetClient], Coroutine[Any, Any, dict[str, Any]]]
) -> dict[str, Any]:
    from inference.fleet.client import FleetClient, read_key

    async def run() -> dict[str, Any]:
        async with FleetClient(router, read_key(key_file)) as client:
            return await work(client)

    return asyncio.run(run())


def _is_empty(row: dict[str, Any]) -> bool:
    """Whether a replica that drains may be stopped."""
    return bool(row["drain_seen"]) and not row["requests"] and (not row["sessions"] or not row["sessions_s"])


def _short(key: str, value: Any) -> Any:
    return value[:12] if key == "version" and value else value
