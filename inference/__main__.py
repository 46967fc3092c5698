"""The inference plane's command line: `python -m inference serve --policy DIR --listen 127.0.0.1:8000`, and
`python -m inference weights --folder DIR` beside a vLLM server.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import TriplaneError

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
        typer.Option(min=0, help="Seconds in which requests are still accepted after SIGTERM [default: 5 in a pod]."),
    ] = None,
) -> None:
    """Serve a policy until interrupted."""
    from inference.server.draining import default_drain_s
    from inference.server.serve import Serving, find_policy
    from inference.server.serve import serve as run

    directory, found = find_policy(policy, store)
    drain_s = default_drain_s() if drain is None else drain
    run(directory, version or found, Serving(listen, model, max_batch, threads, drain_s))


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


def main() -> None:
    """Run the command line; a TriplaneError ends it with one line and exit code 1."""
    try:
        app()
    except TriplaneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
