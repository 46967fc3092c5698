"""OpenTelemetry spans: one trace from a run of the graph to the tool calls of its episodes.

    run -> step -> group -> episode -> turn -> request to the engine (router, server), tool calls -> calls at envd
             '---> training of each rank -> forward_backward, optim_step, export

A span costs next to nothing unless the packages are installed (`pip install 'triplane[tracing]'`) and a standard
variable asks for spans: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_TRACES_EXPORTER. The
others apply too (OTEL_SDK_DISABLED, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_BSP_*, ...). A trace crosses processes
as W3C trace context: `carrier` in headers and metadata, `environment` of child processes.

Spans have names, ids and numbers: never prompts, outputs, or messages of errors.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value | None]
"""Names are those of OpenTelemetry's semantic conventions where there is one, else `triplane.*`. None is left out."""
Kind = Literal["internal", "client", "server"]
FLUSH_S = 2.0
"""Longest that a step or a process waits at its end for a receiver, in seconds; once it has not answered, no longer."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FIELDS = ("traceparent", "tracestate")
GRPC_CODE = "rpc.grpc.status_code"
"""Attribute with the name of the status that a gRPC call ended with."""
_log = logging.getLogger(__name__)


class Span:
    """A span. Within `with span:`, it is the parent of spans that begin there."""

    def __init__(self, on: _On, span: Any) -> None:
        self._on, self._span, self._token = on, span, None

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(_known(attributes))

    def end(self, error: str | None = None) -> None:
        """End the span. error: name of what went wrong."""
        if error is not None:
            self.fail(error)
        self._span.end()

    def fail(self, error: str) -> None:
        """Mark the span as failed. error: name of what went wrong."""
        self._span.set_attribute("error.type", error)
        self._span.set_status(self._on.trace.StatusCode.ERROR)

    def __enter__(self) -> Self:
        self._token = self._on.context.attach(self._on.trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._on.context.detach(self._token)
        cancelled = kind is None or not issubclass(kind, Exception)  # also the end of a generator, and of a process
        self.end(None if cancelled or kind is None else kind.__name__)


class _NoSpan(Span):
    """What `span` returns while tracing is off."""

    def __init__(self) -> None: ...

    def set(self, attributes: Attributes) -> None: ...

    def end(self, error: str | None = None) -> None: ...

    def fail(self, error: str) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


_NO_SPAN = _NoSpan()


def span(
    name: str,
    attributes: Attributes | None = None,
    kind: Kind = "internal",
    *,
    parent: Mapping[str, str] | None = None,
    run_id: str | None = None,
) -> Span:
    """Begin a span. parent: its trace context, empty for the first span of a trace; None: the current span, else
    $TRACEPARENT. run_id: of the run whose own span this is, see `run_context`.
    """
    on = _start()
    if on is None:
        return _NO_SPAN
    if run_id is not None:
        parent = {}
    elif parent is None and not on.trace.get_current_span().get_span_context().is_valid:
        parent = {each: os.environ[each.upper()] for each in _FIELDS if each.upper() in os.environ}
    context = None if parent is None else on.propagator.extract(parent, on.context.Context())
    token = _ids.set(None if run_id is None else _ids_of(run_id))
    try:
        of_kind = on.trace.SpanKind[kind.upper()]
        return Span(on, on.tracer.start_span(name, context, of_kind, _known(attributes or {})))
    finally:
        _ids.reset(token)


def parent_of(metadata: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    """Trace context that a caller sent, among its headers or metadata."""
    return {name: value for name, value in metadata if name in _FIELDS}


def grpc_call(service: str, method: str) -> tuple[str, Attributes]:
    """Name and attributes of the spans of a gRPC call; GRPC_CODE is added at its end."""
    return f"{service}/{method}", {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}


@contextmanager
def joined(parent: Mapping[str, str]) -> Iterator[None]:
    """Block whose spans continue a trace that began elsewhere. parent: its trace context; empty: none."""
    on = _start()
    if on is None or not parent:
        yield
        return
    token = on.context.attach(on.propagator.extract(parent, on.context.Context()))
    try:
        yield
    finally:
        on.context.detach(token)


def event(name: str, attributes: Attributes) -> None:
    """Note what happened within the current span."""
    on = _start()
    if on is not None:
        on.trace.get_current_span().add_event(name, _known(attributes))


def carrier() -> dict[str, str]:
    """Trace context of the current span, as HTTP headers and gRPC metadata have it; empty without one."""
    found: dict[str, str] = {}
    on = _start()
    if on is not None:
        on.propagator.inject(found)
    return found


def environment() -> dict[str, str]:
    """Variables by which child processes continue the trace of the current span; empty without one."""
    return {name.upper(): value for name, value in carrier().items()}


def run_context(run_id: str) -> dict[str, str]:
    """Parent of the spans of a run that have no other one, in whatever process they begin: the run's own span, whose
    ids are made of the run's. Empty while tracing is off, and within another span.
    """
    on = _start()
    if on is None or on.trace.get_current_span().get_span_context().is_valid:
        return carrier()
    trace, span = _ids_of(run_id)
    sampler: Any = on.provider.sampler
    sampled = sampler.should_sample(None, trace, "").decision.is_sampled()
    return {"traceparent": f"00-{trace:032x}-{span:016x}-{sampled:02x}"}


def trace_id(run_id: str) -> str | None:
    """Trace of a run, 32 hex digits; None while tracing is off."""
    return f"{_ids_of(run_id)[0]:032x}" if is_on() else None


def is_on() -> bool:
    """Whether spans are made."""
    return _start() is not None


def start(service: str) -> bool:
    """Whether the environment asks for spans. service: name of this process in traces, unless $OTEL_SERVICE_NAME.

    If it asks for what can't be had, this logs an error and returns False.
    """
    return _start(service) is not None


@contextmanager
def service(name: str) -> Iterator[None]:
    """Block in which this process is the service of this name, see `start`; its end is that of tracing."""
    start(name)
    try:
        yield
    finally:
        stop()


def flush() -> None:
    """Export the spans that have ended, within FLUSH_S; those that are left go out later if the process lives on."""
    if _state is not None and not _state.failing:
        _state.bounded(_state.provider.force_flush)


def stop() -> None:
    """Export the spans that have ended, within FLUSH_S, and stop tracing, which the next span would start again."""
    global _state, _asked
    with _lock:
        on, _state, _asked = _state, None, False
    if on is not None:
        on.bounded(on.provider.shutdown)


atexit.register(stop)


class _Ids:
    """Ids of spans, see `opentelemetry.sdk.trace.id_generator`, whose own generator draws from the seeded `random`: it
    would shift what others draw, and give the ranks of a job the same ids.
    """

    def generate_trace_id(self) -> int:
        ids = _ids.get()
        return secrets.randbits(128) if ids is None else ids[0]

    def generate_span_id(self) -> int:
        ids = _ids.get()
        return secrets.randbits(64) if ids is None else ids[1]

    def is_trace_id_random(self) -> bool:
        return True


class _Exporter:
    """Exporter that tells what became of each batch."""

    def __init__(self, inner: Any, told: Callable[[bool], None]) -> None:
        self._inner, self._told = inner, told

    def export(self, spans: Any) -> Any:
        result = self._inner.export(spans)
        self._told(result.name == "SUCCESS")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class _On:
    """Tracing of this process."""

    def __init__(self, service: str, *, console: bool) -> None:
        """Raises ImportError without the packages."""
        from opentelemetry import context, trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.context, self.trace = context, trace
        self.answers: bool | None = None
        """Whether the receiver took the last batch in time; None: nothing was sent yet."""
        self._warned = False
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or service})
        ids: Any = _Ids()
        exporter: Any = _Exporter(ConsoleSpanExporter() if console else OTLPSpanExporter(), self.told)
        self.provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self.provider.get_tracer("triplane")
        self.propagator = TraceContextTextMapPropagator()
        # these say for each batch, or span, what `told` says once
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        logging.getLogger("opentelemetry.sdk._shared_internal").addFilter(_is_answered)
        self._works: SimpleQueue[tuple[Callable[[], object], threading.Event]] = SimpleQueue()
        threading.Thread(target=self._work, name="tracing", daemon=True).start()

    @property
    def failing(self) -> bool:
        """Whether the receiver did not take the last batch in time."""
        return self.answers is False

    def told(self, answered: bool) -> None:
        """Note whether the receiver took a batch in time."""
        self.answers = answered
        if self.failing and not self._warned:
            self._warned = True
            _log.warning(
                "spans may be lost: $%s does not take them in time; the work goes on", " or $".join(_ENDPOINTS)
            )

    def bounded(self, work: Callable[[], object]) -> None:
        """Run `work`, which may block on the receiver, in a thread, and wait at most FLUSH_S for it to end; do not wait
        if the receiver is failing. The thread exists already: none can be started while the interpreter ends.
        """
        done = threading.Event()
        self._works.put((work, done))
        if not done.wait(0.0 if self.failing else FLUSH_S):
            self.told(False)

    def _work(self) -> None:
        while True:
            work, done = self._works.get()
            work()
            done.set()
            if work == self.provider.shutdown:
                return


_state: _On | None = None
_asked = False
"""Whether the environment was read."""
_lock = threading.Lock()
_ids: ContextVar[tuple[int, int] | None] = ContextVar("ids_of_span", default=None)
"""Trace and span id of the span that begins; None: random ones."""


def _start(service: str = "triplane") -> _On | None:
    """Tracing of this process, started at the first call; None: the environment asks for none."""
    global _state, _asked
    if not _asked:
        with _lock:
            if not _asked:
                _state, _asked = _opened(service), True
    return _state


def _opened(service: str) -> _On | None:
    """Tracing with the settings of the environment, or None."""
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    asked = exporter != "none" and (exporter or any(os.environ.get(name) for name in _ENDPOINTS))
    if not asked or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if exporter not in ("", "otlp", "console"):
        _log.error("no spans: OTEL_TRACES_EXPORTER=%s: write otlp, console or none", exporter)
    elif protocol != "http/protobuf":
        _log.error("no spans: OTLP over %s is not spoken: set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf", protocol)
    else:
        try:
            return _On(service, console=exporter == "console")
        except ImportError as error:
            _log.error("no spans: %s is not installed: pip install 'triplane[tracing]'", error.name)
        except ValueError as error:
            _log.error("no spans: an OTEL_ variable can't be used: %s", error)
    return None


def _is_answered(record: logging.LogRecord) -> bool:
    return _state is not None and _state.answers is True


def _known(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def _ids_of(run_id: str) -> tuple[int, int]:
    """Trace and span id of a run. Digests, since samplers decide by the bits of a trace id."""
    digest = hashlib.sha256(run_id.encode()).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")
