"""Endpoint of Prometheus metrics, as text at http://HOST:PORT/metrics, in threads of its own."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from contracts.errors import ConfigError

SILENT_S = 10.0
"""Timeout for the next byte of a request, in seconds: each connection occupies a thread."""


def prometheus_client() -> Any:
    """The package. Raises ConfigError if it is not installed."""
    try:
        import prometheus_client as module
    except ImportError:
        raise ConfigError("--metrics needs the package prometheus-client: pip install 'triplane[metrics]'") from None
    return module


class Endpoint:
    """Metrics of one registry. Listens from `start` to `stop`."""

    def __init__(self) -> None:
        """Raises ConfigError without the package prometheus-client."""
        self.prometheus = prometheus_client()
        self.registry = self.prometheus.CollectorRegistry()
        self._server: Any = None

    def start(self, address: str) -> int:
        """Listen on HOST:PORT and return the port. Raises ConfigError."""
        host, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"--metrics {address!r} is not an address: write HOST:PORT, as 127.0.0.1:9464")
        try:
            self._server, _ = self.prometheus.start_http_server(
                int(port), host.strip("[]") or "127.0.0.1", registry=self.registry
            )
            self._server.RequestHandlerClass = _impatient(self._server.RequestHandlerClass)
        except OSError as error:
            raise ConfigError(f"metrics can't be served on {address}: {error.strerror}: choose another port") from error
        return int(self._server.server_port)

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def _impatient(handler: Any) -> Any:
    """Subclass of a server's request handler that closes connections after SILENT_S without data."""

    class Impatient(handler):  # type: ignore[misc]
        timeout = SILENT_S

        def handle(self) -> None:
            with suppress(TimeoutError):
                super().handle()

    return Impatient
