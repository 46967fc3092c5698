"""A local S3 server (moto) in a separate process, which records every completed request.

s3_server(folder) -> S3Server(endpoint) ; .taken() -> requests completed since the last call
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, StoreError
from contracts.processes import end_process
from trainer.lifetime import PARENT_VARIABLE, end_with_parent

_GRACE_S = 10.0
Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


@dataclass(frozen=True)
class Request:
    """One completed request."""

    verb: str
    """GET, HEAD, PUT, POST, DELETE, or LIST."""
    key: str
    """Bucket and key, or bucket and prefix of a list."""
    status: int
    received: int
    """Bytes of the request's body."""
    sent: int
    """Bytes of the reply's body."""


class S3Server:
    """The running server."""

    def __init__(self, endpoint: str, log: Path) -> None:
        self.endpoint = endpoint
        self._log, self._read = log, 0

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for access by boto3."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def taken(self) -> list[Request]:
        """Requests completed since the last call, in order."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._read += sum(map(len, whole))
        return [Request(**json.loads(line)) for line in whole]


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start a server without persistent data, which ends with the block. folder: for its log.

    Raises ConfigError if moto is not installed.
    """
    log = folder / "requests.jsonl"
    log.touch()
    with (folder / "server.log").open("wb") as errors:
        # a new session: on Ctrl-C the client still needs the server for its cleanup
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(log)],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(["", *sys.path[1:]])},
        )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().decode().strip()
        if not port:
            lines = (folder / "server.log").read_text(errors="replace").strip().splitlines()
            raise StoreError(f"the S3 server did not start ({''.join(lines[-1:])}): pip install -e '.[dev]'")
        yield S3Server(f"http://127.0.0.1:{port}", log)
    finally:
        end_process(server, _GRACE_S)


def counted(application: Application, log: Path) -> Application:
    """`application`, with a line in `log` for every request."""
    lock, file = threading.Lock(), log.open("a", buffering=1)

    def answer(environ: Environ, start: StartResponse) -> Iterable[bytes]:
        seen: dict[str, Any] = {"status": 0, "sent": 0}

        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            seen["status"] = int(status.split()[0])
            seen["sent"] = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
            return start(status, headers, *rest)

        body = application(environ, started)
        with lock:
            file.write(json.dumps(asdict(_request(environ, **seen))) + "\n")
        return body

    return answer


def _request(environ: Environ, status: int, sent: int) -> Request:
    verb, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
    key = environ["PATH_INFO"].strip("/")
    if "list-type=2" in query:
        from urllib.parse import parse_qs

        verb, key = "LIST", f"{key}/{parse_qs(query).get('prefix', [''])[0]}"
    received = environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH") or environ.get("CONTENT_LENGTH") or 0
    return Request(verb, key, status, int(received), 0 if verb == "HEAD" else sent)


def main(log: Path) -> None:
    """Print the port and serve until signaled."""
    end_with_parent()
    try:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing") from None

    class Quiet(MotoRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Log nothing: the log of `counted` has more detail."""

    application = counted(DomainDispatcherApplication(create_backend_app), log)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
