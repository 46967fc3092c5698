"""`python -m envd`: the environment plane on its own."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from contracts.errors import TriplaneError, describe
from envd.backends import AUTO, BACKENDS
from envd.errors import EnvdError

_HELP = """\
Serve sandboxes over gRPC.

  python -m envd serve                                             # a socket that only you can connect to
  python -m envd serve --listen unix:/run/envd.sock --backend namespaces,gvisor --pool 8
  python -m envd serve --listen 127.0.0.1:7070                     # asks for a key, which it makes and prints
  python -m envd serve --listen 0.0.0.0:7070 --tls-cert tls.crt --tls-key tls.key --key-file keys

Then, in Python:

  async with SandboxClient() as client:      # from envd.client; or with the address
      template = await client.put_template({"calc.py": b"..."})
      sandbox = await client.create(template)
      await sandbox.call(ToolCall("exec", {"command": "ls"}))

The namespaces backend isolates (as root or as an ordinary user); the plain one does not, says so, and is never chosen
by `auto`, which starts a real sandbox to find out what works. SIGTERM ends every sandbox and leaves nothing behind;
with --drain it first lets them end by themselves. A unix socket has mode 0600; a port asks for a key (or client
certificates), beyond this machine with TLS, unless --insecure says that the network keeps others out.
"""
_COMMANDS = {
    "mcp": ("envd.mcp", "run_mcp", "the tools over MCP, for agents that nobody here wrote"),
    "top": ("envd.operations.top", "run_top", "a live table of a server's sandboxes"),
    "audit": ("envd.operations.audit_check", "run_audit_check", "check the signatures of an audit log"),
    "policy": ("envd.rules_check", "run_check", "check a file of sandbox rules"),
    "pause": ("envd.operations.states", "pause", "stop a sandbox's processes where they stand"),
    "resume": ("envd.operations.states", "resume", "continue a sandbox after pause or hibernate"),
    "hibernate": ("envd.operations.states", "hibernate", "store a sandbox's state and end its processes"),
    "fork": ("envd.operations.states", "fork", "make an independent copy of a sandbox"),
    "snapshot": ("envd.operations.states", "snapshot", "store a sandbox's state for restore"),
    "restore": ("envd.operations.states", "restore", "start a sandbox from a snapshot"),
    "delete-snapshot": ("envd.operations.states", "delete_snapshot", "remove a snapshot"),
    "migrate": ("envd.operations.states", "migrate", "move a sandbox to another server"),
}
"""Commands that parse their own arguments: module, function (arguments -> exit code), help."""


class _JsonLines(logging.Formatter):
    """One JSON object a line, on standard error."""

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
        said = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in _COMMANDS:
        module, function, _ = _COMMANDS[given[0]]
        return int(getattr(importlib.import_module(module), function)(given[1:]))
    arguments = _parser().parse_args(given)
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=arguments.log_level.upper(), handlers=[handler])
    # Read by gRPC when it is first used. Its handlers of fork crash a child now and then that uvloop is about to make
    # another program.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    try:
        _run(_served(arguments))
    except (TriplaneError, OSError) as error:
        reason = describe(error) if isinstance(error, OSError) else str(error)
        try:
            if arguments.failure_fd is not None:
                os.write(arguments.failure_fd, reason.encode())
                return 1
        except BrokenPipeError:
            pass  # who started it stopped listening when it was ready
        print(f"envd: {reason}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m envd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser(
        "serve", description=_HELP, help="serve sandboxes", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_serving(serving.add_argument)
    _add_access(serving.add_argument_group("who may connect").add_argument)
    for name, (_, _, words) in _COMMANDS.items():
        commands.add_parser(name, help=words, add_help=False)
    return parser


def _add_serving(add: Any) -> None:
    add(
        "--listen",
        metavar="ADDRESS",
        help="unix:/path or host:port (default: a socket that only this user can connect to)",
    )
    add(
        "--backend",
        default="auto",
        help=(
            f"auto ({', else '.join(AUTO)}; never plain), or of {', '.join(BACKENDS)}; several with commas, the "
            "default one first"
        ),
    )
    add("--pool", type=int, default=0, metavar="N", help="sandboxes kept ready for each template in use (default 0)")
    add("--policy", type=Path, metavar="YAML", help="what sandboxes may be and do (docs/sandboxes-rules.md)")
    add("--audit-log", type=Path, metavar="FILE", help="append audit events to FILE as JSON lines")
    add("--audit-key", type=Path, metavar="FILE", help="sign these lines with the key in FILE (`python -m envd audit`)")
    add("--audit-calls", action="store_true", help="audit events of each call too (docs/sandboxes-rules.md)")
    add("--metrics", metavar="HOST:PORT", help="Prometheus metrics at http://HOST:PORT/metrics")
    add(
        "--snapshot-dir",
        type=Path,
        metavar="DIR",
        help="keep snapshots in DIR, or in a subfolder if others may enter DIR, also when the server ends",
    )
    add(
        "--drain",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="after SIGTERM refuse new sandboxes, and let running ones end for so long (default 0; again: at once)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="where the server makes a directory of its own, removed when it ends (default: among the temporary ones)",
    )
    add("--failure-fd", type=int, metavar="FD", help="a pipe for the reason when it fails, instead of standard error")
    add("--with-parent", type=int, metavar="PID", help="stop when this process, our parent, dies")


def _add_access(add: Any) -> None:
    add("--tls-cert", type=Path, metavar="PEM", help="speak TLS with this certificate")
    add("--tls-key", type=Path, metavar="PEM", help="its private key")
    add("--tls-client-ca", type=Path, metavar="PEM", help="ask clients for a certificate of this authority")
    add(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=(
            "ask for a bearer key; FILE holds those accepted, one a line (default: on a port, one that is made and"
            " printed)"
        ),
    )
    add(
        "--peer-ca",
        type=Path,
        metavar="PEM",
        help="speak TLS, with our certificate, to servers that sandboxes are moved to",
    )
    add("--insecure", action="store_true", help="no TLS beyond this machine, and no key unless --key-file is given")


async def _served(arguments: argparse.Namespace) -> None:
    from contracts.rpc.connecting import prefer_short_round_trips
    from contracts.rpc.listening import Listening
    from envd.meeting import default_address
    from envd.server.ending import bound_end
    from envd.server.serve import Options, serve

    prefer_short_round_trips()
    if arguments.pool < 0:
        raise EnvdError(f"--pool {arguments.pool} must be 0 or more")
    if not 0 <= arguments.drain < math.inf:
        raise EnvdError(f"--drain {arguments.drain} must be 0 or more seconds")
    listening = Listening(
        arguments.listen or default_address(),
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        tls_client_ca=arguments.tls_client_ca,
        key_file=arguments.key_file,
        insecure=arguments.insecure,
    )
    options = Options(
        listening,
        tuple(arguments.backend.split(",")),
        state_dir=arguments.state_dir,
        snapshot_dir=arguments.snapshot_dir,
        pool=arguments.pool,
        rules=arguments.policy,
        audit_log=arguments.audit_log,
        audit_calls=arguments.audit_calls,
        audit_key=arguments.audit_key,
        peer_ca=arguments.peer_ca,
        metrics=arguments.metrics,
        drain_s=arguments.drain,
        with_parent=arguments.with_parent,
    )
    await serve(options, on_death=bound_end)


def _run(main: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it is installed: a tenth less of a call's time."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


if __name__ == "__main__":
    sys.exit(main())
