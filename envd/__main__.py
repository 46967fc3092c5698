"""`python -m envd`: the environment plane on its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path

from contracts.errors import describe
from envd.errors import EnvdError

_HELP = """\
Serve sandboxes over gRPC.

  python -m envd serve --listen unix:/run/envd.sock
  python -m envd serve --listen 127.0.0.1:7070 --backend namespaces

Then, in Python:

  async with SandboxClient("unix:/run/envd.sock") as client:      # from envd.client
      template = await client.put_template({"calc.py": b"..."})
      sandbox = await client.create(template)
      await sandbox.call(ToolCall("exec", {"command": "ls"}))

The namespaces backend isolates (as root or as an ordinary user); the plain one does not and says so. `auto` starts
a real sandbox to find out. SIGTERM ends every sandbox and leaves nothing behind. There is no authentication yet: listen on a
unix socket or on a loopback address.
"""


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
    parser = argparse.ArgumentParser(prog="python -m envd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser(
        "serve", description=_HELP, help="serve sandboxes", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    serving.add_argument("--listen", default="127.0.0.1:7070", help="unix:/path or host:port (default %(default)s)")
    serving.add_argument("--backend", choices=("auto", "namespaces", "plain"), default="auto")
    serving.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    serving.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="a directory of the server's own, removed when it ends (default: a temporary one)",
    )
    serving.add_argument(
        "--failure-fd", type=int, metavar="FD", help="a pipe for the reason when it fails, instead of standard error"
    )
    serving.add_argument("--with-parent", type=int, metavar="PID", help="stop when this process, our parent, dies")
    arguments = parser.parse_args(argv)
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=arguments.log_level.upper(), handlers=[handler])
    from envd.server.serve import serve

    try:
        asyncio.run(
            serve(
                arguments.listen,
                arguments.backend,
                state_dir=arguments.state_dir,
                with_parent=arguments.with_parent,
            )
        )
    except (EnvdError, OSError) as error:
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


if __name__ == "__main__":
    sys.exit(main())
