"""Command-line options shared by the commands that serve a bridge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Listen = Annotated[
    str | None, typer.Option(help="unix:/path or host:port (default: a socket that only you can connect to).")
]
JournalFolder = Annotated[
    Path | None, typer.Option(help="Directory that lets episodes survive this process (default: they end with it).")
]
Lease = Annotated[float, typer.Option(min=1, help="Seconds after which an episode that nobody asks for is freed.")]
Drain = Annotated[float, typer.Option(min=0, help="Longest time after SIGTERM for work to end, in seconds.")]
KeyFile = Annotated[
    Path | None, typer.Option(help="Accepted bearer keys, one a line (default: on a port, one that is printed).")
]
TlsCert = Annotated[Path | None, typer.Option(help="Speak TLS with this certificate.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its private key.")]
TlsClientCa = Annotated[Path | None, typer.Option(help="Ask clients for a certificate of this authority.")]
Metrics = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Prometheus metrics at http://HOST:PORT/metrics.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS beyond this machine, and no key unless --key-file is given.")
]
