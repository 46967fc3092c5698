"""The inference plane's command line: `python -m inference serve --policy DIR --listen 127.0.0.1:8000`,
`python -m inference route --replica URL` in front of several servers, `python -m inference bridge --policy DIR` for
trainers that are not ours, and `python -m inference weights --folder DIR` beside a vLLM server.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import ConfigError, TriplaneError, describe
from inference.bridge import options as bridge_options

_BRIDGE = """Serve episodes of a policy, over gRPC, to a trainer that is not ours.

The trainer plays the environment, this server the policy. It prints its address when it is ready.

A socket that only you can connect to:

\b
  python -m inference bridge --policy DIR

Episodes that survive kill -9 and restarts:

\b
  python -m inference bridge --policy DIR --journal FOLDER

A port of this machine, which asks for a key that is made and printed:

\b
  python -m inference bridge --policy DIR --listen 127.0.0.1:7080

A port for others, with --tls-cert, --tls-key and --key-file:

\b
  python -m inference bridge --policy DIR --listen 0.0.0.0:7080 ...

SIGTERM starts no more episodes, lets turns end (without --journal: episodes) and exits; Ctrl-C does not wait. The
protocol is contracts/protos/bridge.proto; docs/bridge.md explains it.
"""
_ROUTE = """Route requests to several servers of one policy, each to the one that has most of its prompt cached.

Servers are those of `python -m inference serve`, vLLM, or any other with the OpenAI API and GET /health:

\b
  python -m inference route --replica http://a:8000 --replica http://b:8000

Every server behind a DNS name, looked up again every two seconds:

\b
  python -m inference route --replica dns:engines.default.svc:8000

With the cache events of the servers (vLLM: --kv-events-config; ours: serve --events-port), and metrics:

\b
  python -m inference route --replica ... --events-port 5557 --metrics

A fleet whose servers come and go: each joins by itself and renews a lease (ours: serve --join URL; any other: join):

\b
  python -m inference route --listen 0.0.0.0:8080 --fleet-key-file keys
  python -m inference serve --policy DIR --join http://router:8080

Several routers in front of the same servers, which share their state through Redis:

\b
  python -m inference route --replica ... --redis redis://10.0.0.9:6379/0

Clients send what they would send to a server: POST /v1/completions, /v1/chat/completions or /inference/v1/generate,
streams included. Headers help: `X-Session` names a conversation whose prompts continue each other, `X-Group` requests
with a common prompt, `X-Policy-Version` the only policy whose tokens the reply may have. `X-Replica` in a reply names
the server. Anybody who reaches the port can send requests.

SIGTERM ends the router when its requests have ended. docs/routing.md explains how it chooses, docs/fleet.md how servers
join, drain and get new weights (`triplane fleet`).
"""
_JOIN = """Keep a server of another project in the fleet of a router, as its sidecar.

\b
  python -m inference join --replica http://10.0.0.7:8000 --router http://router:8080 --capacity 256

The server is probed (GET /health; its policy version from /weight_info or /v1/models), and its lease renewed while it
is well. When this command ends, or the server fails or hangs, it gets no more requests. A router with --fleet-key-file
asks for a key: set TRIPLANE_FLEET_KEY_FILE. `python -m inference serve` joins by itself, with --join.
"""
app = typer.Typer(add_completion=False, no_args_is_help=True, help="Serve policies, and pull them for servers.")


@app.callback()
def _inference() -> None:
    """Serve policies, and pull them for servers."""


@app.command()
def serve(
    policy: Annotated[str, typer.Option(help="Checkpoint directory, or a digest prefix of a checkpoint in the store.")],
    listen: Annotated[str, typer.Option(help="host:port to listen on; port 0 picks a free one.")] = "127.0.0.1:8000",
    store: Annotated[str | None, typer.Option(help="Store with the checkpoints [default: $TRIPLANE_STORE].")] = None,
    version: Annotated[str | None, typer.Option(help="Policy version of the tokens [default: digest or name].")] = None,
    model: Annotated[str, typer.Option(help="Name of the model in /v1/models.")] = "policy",
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of sequences in a batch.")] = 256,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads [default: torch's].")] = None,
    drain: Annotated[
        float | None,
        typer.Option(
            min=0, max=86_400, help="Seconds in which requests are still accepted after SIGTERM [default: 5 in a pod]."
        ),
    ] = None,
    events_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65534, help="Publish the prefix cache's events here, as vLLM does; replay at the next."
        ),
    ] = None,
    join: Annotated[
        list[str] | None, typer.Option(help="URL of a router whose fleet this server joins; may be repeated.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="URL at which those routers reach this server [default: --listen].")
    ] = None,
) -> None:
    """Serve a policy until interrupted."""
    from inference.server.draining import default_drain_s
    from inference.server.policies import find_policy
    from inference.server.serve import Serving
    from inference.server.serve import serve as run

    directory, found = find_policy(policy, store)
    drain_s = default_drain_s() if drain is None else drain
    joining = (tuple(join or ()), advertise)
    run(directory, version or found, Serving(listen, model, max_batch, threads, drain_s, events_port, *joining))


@app.command(help=_ROUTE)
def route(
    replica: Annotated[
        list[str] | None,
        typer.Option(help="Address of a server, or dns:NAME:PORT; may be repeated [default: those that join]."),
    ] = None,
    listen: Annotated[str, typer.Option(help="host:port to listen on; port 0 picks a free one.")] = "127.0.0.1:8080",
    block_tokens: Annotated[
        int, typer.Option(min=1, max=65_536, help="Block size of the servers, e.g. vLLM's --block-size.")
    ] = 16,
    events_port: Annotated[
        int | None,
        typer.Option(min=1, max=65534, help="Port at each server for its cache events [default: assume its cache]."),
    ] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="Answer GET /metrics, for Prometheus.")] = False,
    redis: Annotated[
        str | None,
        typer.Option(
            envvar="TRIPLANE_REDIS",
            help="URL of the Redis server for the shared state of several routers [default: none].",
        ),
    ] = None,
    fleet: Annotated[str, typer.Option(help="Name of the group of routers that share their state.")] = "default",
    fleet_key_file: Annotated[
        Path | None,
        typer.Option(help="File with keys, one a line, for joins and drains [default: this machine needs none]."),
    ] = None,
    webhook: Annotated[
        str | None, typer.Option(help="URL that is told as JSON of each join, leave, fault, ejection and drain.")
    ] = None,
    scaler: Annotated[
        str | None, typer.Option(help="host:port of KEDA's external scaler: tokens in flight, and the queue.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Longest silence of a server in a reply, in seconds.")] = 600.0,
    drain: Annotated[
        float | None,
        typer.Option(
            min=0, max=86_400, help="Seconds in which requests are still accepted after SIGTERM [default: 5 in a pod]."
        ),
    ] = None,
) -> None:
    """Route requests to several servers until interrupted."""
    from inference.server.draining import default_drain_s
    from inference.server.route import Routing
    from inference.server.route import route as run

    drain_s = default_drain_s() if drain is None else drain
    addresses = ",".join(replica or ())
    options = (block_tokens, events_port, metrics, redis, fleet, timeout, drain_s, fleet_key_file, webhook, scaler)
    run(Routing(addresses, listen, *options))


@app.command(help=_JOIN)
def join(
    replica: Annotated[str, typer.Option(help="URL at which the routers reach the server, http://host:port.")],
    router: Annotated[list[str], typer.Option(help="URL of a router; repeated for routers that share no Redis.")],
    capacity: Annotated[int, typer.Option(min=0, help="Sequences that it samples at once; 0: unknown.")] = 0,
    lease: Annotated[float, typer.Option(min=0.5, max=3600, help="Seconds of a lease, renewed three times.")] = 15.0,
) -> None:
    """Keep a server in the fleet of a router until interrupted."""
    from inference.fleet.joining import Joining, stay

    stay(Joining(tuple(router), replica, capacity, lease))


@app.command()
def weights(
    folder: Annotated[Path, typer.Option(help="Folder for the checkpoints, at the same path as the server's.")],
    listen: Annotated[str, typer.Option(help="host:port to listen on; port 0 picks a free one.")] = "127.0.0.1:7500",
    store: Annotated[str | None, typer.Option(help="Store with the checkpoints [default: $TRIPLANE_STORE].")] = None,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 2,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the keys that clients must send, one a line.")
    ] = None,
    first: Annotated[
        str | None, typer.Option(help="Digest prefix of a checkpoint to pull before listening, as FOLDER/first.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Make float32 weights of the first one.")] = False,
) -> None:
    """Pull checkpoints from the store for a vLLM server on this machine, until interrupted."""
    from inference.weights.serve import serve as run

    run(listen, folder, store=store, keep=keep, key_file=key_file, first=first, plain=plain)


@app.command(help=_BRIDGE)
def bridge(
    policy: Annotated[
        str | None, typer.Option(help="Checkpoint directory, or a digest prefix of a checkpoint in the store.")
    ] = None,
    policy_file: Annotated[
        Path | None,
        typer.Option(help="Instead: a file whose first line names the policy; another one is served when it changes."),
    ] = None,
    listen: bridge_options.Listen = None,
    store: Annotated[str | None, typer.Option(help="Store with the checkpoints (default: $TRIPLANE_STORE).")] = None,
    version: Annotated[
        str | None, typer.Option(help="Policy version of the tokens (default: digest or name, or the server's).")
    ] = None,
    journal: bridge_options.JournalFolder = None,
    max_episodes: Annotated[int, typer.Option(min=1, help="Open episodes at most, of all keys.")] = 10_000,
    lease: bridge_options.Lease = 600.0,
    drain: bridge_options.Drain = 30.0,
    engine_url: Annotated[
        str | None, typer.Option(help="Sample at this server of --policy, e.g. http://127.0.0.1:8000/v1, not here.")
    ] = None,
    engine_model: Annotated[str, typer.Option(help="Name of the policy at --engine-url.")] = "policy",
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch of the built-in engine.")] = 256,
    threads: Annotated[int | None, typer.Option(min=1, help="Its torch threads (default: torch's).")] = None,
    key_file: bridge_options.KeyFile = None,
    tls_cert: bridge_options.TlsCert = None,
    tls_key: bridge_options.TlsKey = None,
    tls_client_ca: bridge_options.TlsClientCa = None,
    insecure: bridge_options.Insecure = False,
    metrics: bridge_options.Metrics = None,
) -> None:
    """Serve episodes of a policy to a trainer."""
    from contracts.rpc.listening import Listening
    from contracts.rpc.meeting import default_address
    from inference.bridge.policy_file import PolicyFile
    from inference.bridge.registry import Bounds
    from inference.bridge.serve import SOCKET, Options
    from inference.bridge.serve import serve as run
    from inference.engines.config import BuiltinConfig, OpenAIConfig
    from inference.server.policies import find_policy

    if (policy is None) == (policy_file is None):
        raise ConfigError("give either --policy or --policy-file")
    if policy_file is not None and (engine_url or version):
        raise ConfigError("--policy-file goes with neither --engine-url nor --version: the file names versions itself")
    named = None if policy_file is None else PolicyFile(policy_file, store)
    directory, found = find_policy(policy or "", store) if named is None else named.read()
    listening = Listening(listen or default_address(SOCKET), tls_cert, tls_key, tls_client_ca, key_file, insecure)
    engine = (
        BuiltinConfig(max_batch=max_batch, threads=threads)
        if engine_url is None
        else OpenAIConfig(base_url=engine_url, model=engine_model)
    )
    bounds = Bounds(max_episodes, lease)
    pinned = engine_url is None or version is not None
    options = Options(listening, bounds, journal, drain, engine, pinned, named, metrics=metrics)
    run(directory, version or found, options)


def main() -> None:
    """Run the command line; a TriplaneError or system error ends it with one line and exit code 1."""
    try:
        app()
    except (TriplaneError, OSError) as error:
        print(f"error: {describe(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
