"""Requests that no servicer sees: bytes that are no message, and methods that do not exist. Both are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from envd.server.audit import AuditLog


class Watched:
    """Stands for a server where services are added to it: each request that is no message of its method becomes an event.

    Costs a call nothing but one more Python frame while its request is parsed.
    """

    def __init__(self, server: grpc.aio.Server, audit: AuditLog) -> None:
        self._server, self._audit = server, audit

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """See grpc.aio.Server; generated code gives these the same methods as registered ones."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See grpc.aio.Server."""
        watched = {name: self._watched(f"{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, watched)

    def _watched(self, method: str, handler: Any) -> Any:
        parse: Callable[[bytes], Any] = handler.request_deserializer

        def parsed(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError:
                self._audit.record(
                    "request.refused", "", method=method, reason="no message of this method", bytes=len(data)
                )
                raise

        return handler._replace(request_deserializer=parsed)


class Unknown(grpc.GenericRpcHandler):
    """Records what is asked for and not there. Added last: it is asked only where nothing else answers."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    def service(self, handler_call_details: Any) -> None:
        """See grpc.GenericRpcHandler."""
        self._audit.record("request.refused", "", method=str(handler_call_details.method), reason="no such method")
