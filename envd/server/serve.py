"""Run a server until it receives a signal, its parent dies, or a process dies that its backends or checks need."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped, unused-ignore]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped, unused-ignore]

from contracts.errors import describe
from contracts.owned import fate_of_owner, owned_name, remove, sweep_abandoned
from contracts.pb import envd_operations_pb2, envd_operations_pb2_grpc, envd_pb2, envd_pb2_grpc
from contracts.processes import allow_open_files
from contracts.rpc.connecting import read_key, read_secret
from contracts.rpc.keys import KeyCheck
from contracts.rpc.listening import LASTING_OPTIONS, Listening
from contracts.rpc.meeting import MadeKey
from envd.backends.base import Backend, IsolationLevel
from envd.connection import Access
from envd.errors import BackendUnavailable, EnvdError
from envd.meeting import default_address
from envd.sandbox import linux
from envd.sandbox.cgroups import OWNED, remove_groups
from envd.sandbox.delegation import make_room
from envd.server.audit import AuditLog
from envd.server.backends import start_backends, stop_backends
from envd.server.draining import drain
from envd.server.malformed import ACCEPTED_BYTES, Unknown, Watched
from envd.server.observing import Observer, Observing
from envd.server.operations.metrics import Metrics
from envd.server.operations.migration import Migration
from envd.server.operations.service_files import FilesService
from envd.server.operations.service_operations import OperationsService
from envd.server.operations.service_processes import ProcessesService
from envd.server.operations.states import States
from envd.server.operations.tracing import start_tracing
from envd.server.operations.trail import Trail
from envd.server.quotas import Quotas
from envd.server.rules import load_rules
from envd.server.runtimes import Runtimes
from envd.server.sandboxes import Sandboxes
from envd.server.service_sandboxes import SandboxesService
from envd.server.service_tools import ToolsService
from envd.server.service_verifier import VerifierService
from envd.server.snapshots import Snapshots
from envd.server.templates import Templates
from envd.server.verifications import Starting, Verifications

_GRACE_S = 0.5
_SERVER_OPTIONS = [
    *LASTING_OPTIONS,
    ("grpc.max_receive_message_length", ACCEPTED_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
]
_GARBAGE = (50_000, 20, 20)
"""Garbage collection thresholds. With thousands of sandboxes each collection takes milliseconds, in which the server
answers no call.
"""
_SERVICES = tuple(
    service.full_name
    for protocol in (envd_pb2, envd_operations_pb2)
    for service in protocol.DESCRIPTOR.services_by_name.values()
)
_log = logging.getLogger("envd")


@dataclass(frozen=True)
class Options:
    """Options of a server."""

    listening: Listening = field(default_factory=lambda: Listening(default_address()))
    backends: tuple[str, ...] = ("auto",)
    """The first is the default."""
    state_dir: Path | None = None
    """Parent of the server's own directory, which is removed when the server ends; None: the temporary directory."""
    snapshot_dir: Path | None = None
    """Directory of the snapshots; None: in the state directory, until the server ends."""
    pool: int = 0
    """Number of sandboxes kept ready for each template that is in use."""
    rules: Path | None = None
    audit_log: Path | None = None
    audit_calls: bool = False
    """Whether calls are recorded as audit events."""
    audit_key: Path | None = None
    """Key that signs the lines of `audit_log`."""
    peer_ca: Path | None = None
    """CA certificates of the servers that sandboxes are moved to. This server presents its own certificate to them.
    None: no TLS.
    """
    metrics: str | None = None
    """HOST:PORT of the metrics endpoint; None: no metrics."""
    drain_s: float = 0.0
    """Seconds in which sandboxes and verifications may end after SIGTERM; meanwhile nothing new is taken."""
    with_parent: int | None = None
    """Process id of the parent; the server stops when it dies."""

    def peers(self) -> Access:
        """Access to the servers that sandboxes are moved to.

        Raises ConfigError for certificates that can't be read.
        """
        if self.peer_ca is None:
            return Access()
        read_secret(self.peer_ca)
        return Access(tls_ca=self.peer_ca, tls_cert=self.listening.tls_cert, tls_key=self.listening.tls_key)


async def serve(options: Options, *, on_death: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT, and drain if the options say so.

    on_death: called when a process that the server needs has died, before the server stops for that reason.

    Raises EnvdError or ConfigError, in one line, if the server can't run with these options.
    """
    options.listening.check()
    made = options.listening.made_key()
    keys = options.listening.keys() if made is None else (made.key.encode(),)
    rules = load_rules(_rules_text(options.rules))
    peers = options.peers()
    if options.audit_key and not options.audit_log:
        raise EnvdError("--audit-key signs the lines of --audit-log: give that, too")
    audit_key = read_key(options.audit_key).encode() if options.audit_key else None
    stop = _told_to_stop()
    if options.with_parent is not None:
        linux.die_with_parent(signal.SIGTERM)
        if os.getppid() != options.with_parent:
            return  # the parent died before die_with_parent took effect
    make_room()  # before any process is started
    allow_open_files()
    async with contextlib.AsyncExitStack() as stack:
        audit = AuditLog(options.audit_log, calls=options.audit_calls, key=audit_key)
        stack.callback(audit.close)
        if os.geteuid() == 0:
            os.umask(0o022)  # sandboxes run as another user, who must read templates; the log is open already
        run_dir = await stack.enter_async_context(_run_directory(options.state_dir))
        quotas = Quotas(rules.quotas, audit)
        templates = Templates(run_dir / "templates", linux.sandbox_owner(), quotas)
        stack.push_async_callback(templates.settled)
        runtimes = Runtimes(run_dir / "runtimes")
        snapshots = Snapshots(options.snapshot_dir or run_dir / "snapshots", quotas)
        stack.push_async_callback(snapshots.stop)
        backends, verifications = await _started(stack, options, run_dir, templates, runtimes)
        sandboxes = Sandboxes(backends, templates, snapshots, runtimes, rules=rules, audit=audit, quotas=quotas)
        stack.push_async_callback(sandboxes.stop)
        stack.callback(asyncio.ensure_future(sandboxes.limits.rounds(lambda: sandboxes.all({}))).cancel)
        interceptors: list[grpc.aio.ServerInterceptor] = [key_check(keys, audit)] if keys else []
        if observers := _observers(options, sandboxes, stack):
            interceptors.insert(0, Observing(observers))
        server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=interceptors)
        watched = Watched(server, sandboxes)
        probe = _add_services(server, watched, sandboxes, verifications, peers)
        port = options.listening.listen(server)
        if made is not None:
            stack.callback(made.withdraw, _tell_key(made, options.listening.address, port))
        await server.start()
        audit.record("server.started", "", address=options.listening.address, backends=list(backends))
        for name, backend in backends.items():
            if backend.features.isolation is IsolationLevel.NONE:
                audit.record("isolation.none", "", backend=name)
        stack.push_async_callback(server.stop, _GRACE_S)
        for name in ("", *_SERVICES):
            await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
        gc.freeze()  # objects that exist now live as long as the server: exclude them from collections
        gc.set_threshold(*_GARBAGE)
        _log.info("listening on %s, backends %s", options.listening.address, ", ".join(backends))
        try:
            await _until(stop, [*(each.died() for each in backends.values()), verifications.died()])
        except BackendUnavailable:
            on_death()
            raise
        if options.drain_s:
            for name in ("", *_SERVICES):
                await probe.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
            await drain(sandboxes, verifications, options.drain_s, stop)
        watched.stopping = True
        await probe.enter_graceful_shutdown()


async def _started(
    stack: contextlib.AsyncExitStack, options: Options, run_dir: Path, templates: Templates, runtimes: Runtimes
) -> tuple[dict[str, Backend], Verifications]:
    """Start the backends and the verifications concurrently, since both are slow to start."""
    starting = Starting(options.backends, run_dir)
    try:
        backends = await start_backends(options.backends, run_dir, pool=options.pool)
        stack.push_async_callback(stop_backends, backends)
    except BaseException:
        await starting.abandon()
        raise
    verifications = await starting.finished(backends, templates, runtimes)
    stack.push_async_callback(verifications.stop)
    return backends, verifications


def key_check(keys: tuple[bytes, ...], audit: AuditLog) -> KeyCheck:
    """Interceptor that asks for one of the keys and records refusals."""
    advice = "give --key-file or $TRIPLANE_ENVD_KEY_FILE, which sends `authorization: Bearer <key>`"
    return KeyCheck(keys, advice, lambda method: audit.record("auth.denied", "", what="key", method=method))


def _tell_key(made: MadeKey, address: str, port: int) -> Path:
    """Publish a key that the server made where this user's clients find it, print it once, and return its file."""
    file = made.publish(port)
    print(
        f"envd: nobody gave --key-file, so {address} (port {port}) asks for this key: {made.key}\n"
        f"envd: it lies in {file} until the server stops; this user's clients find it there, others are given it",
        file=sys.stderr,
        flush=True,
    )
    return file


def _observers(options: Options, sandboxes: Sandboxes, stack: contextlib.AsyncExitStack) -> list[Observer]:
    """Observers of calls: the trail and the metrics if the options ask for them, spans if the environment names a
    receiver.
    """
    observers: list[Observer] = []
    if options.audit_calls:
        observers.append(Trail(sandboxes.audit))
    if options.metrics is not None:
        metrics = Metrics(sandboxes, sandboxes.audit)
        metrics.start(options.metrics)
        stack.push_async_callback(asyncio.to_thread, metrics.stop)
        observers.append(metrics)
    tracing = start_tracing()
    if tracing is not None:
        stack.push_async_callback(asyncio.to_thread, tracing.stop)
        observers.append(tracing)
    return observers


def _add_services(
    server: grpc.aio.Server, watched: Watched, sandboxes: Sandboxes, verifications: Verifications, access: Access
) -> health.aio.HealthServicer:
    states = States(sandboxes)
    episode = {
        "Sandboxes": SandboxesService(sandboxes),
        "Tools": ToolsService(sandboxes),
        "Verifier": VerifierService(sandboxes, verifications),
    }
    operations = {
        "Operations": OperationsService(sandboxes, Migration(sandboxes, states, access), states),
        "Files": FilesService(sandboxes),
        "Processes": ProcessesService(sandboxes),
    }
    for generated, services in ((envd_pb2_grpc, episode), (envd_operations_pb2_grpc, operations)):
        for name, service in services.items():
            getattr(generated, f"add_{name}Servicer_to_server")(service, watched)
    probe = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    reflection.enable_server_reflection([*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    server.add_generic_rpc_handlers((Unknown(sandboxes.audit),))
    return probe


async def _until(stop: asyncio.Event, deaths: list[Coroutine[Any, Any, str]]) -> None:
    """Wait for the stop event. Raises BackendUnavailable if a process that the server needs has died."""
    told = asyncio.ensure_future(stop.wait())
    waiting = [asyncio.ensure_future(death) for death in deaths]
    await asyncio.wait([told, *waiting], return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    for each in waiting:
        each.cancel()
    died = [each for each in waiting if each.done() and not each.cancelled()]
    if died and not stop.is_set():
        reason = died[0].result()
        fix = "" if "restart envd" in reason else ": restart envd; the kernel's log tells whether memory ran out"
        raise BackendUnavailable(reason + fix)


def _told_to_stop() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@contextlib.asynccontextmanager
async def _run_directory(state_dir: Path | None) -> AsyncIterator[Path]:
    """Make this server's own directory, after removing those of killed servers, and remove it at the end.

    Its name is never reused: processes of a killed server may still be cleaning up by that name when the next server
    starts.
    """
    above = Path(tempfile.gettempdir()) if state_dir is None else state_dir
    await asyncio.to_thread(sweep_abandoned, Path(tempfile.gettempdir()), OWNED)
    # the process that started this server may have made a directory for it: use that one
    given = state_dir is not None and fate_of_owner(above.name, OWNED) == "alive"
    run_dir = above if given else above / f"{OWNED}{owned_name()}"
    held = None
    try:
        above.mkdir(parents=True, exist_ok=True)
        if state_dir is not None:
            held = _held(above)
            await asyncio.to_thread(sweep_abandoned, above, OWNED)
        run_dir.mkdir(exist_ok=given)
        run_dir.chmod(0o711)
        for name in ("templates", "runtimes", "boxes"):
            (run_dir / name).mkdir()
    except OSError as error:
        raise EnvdError(f"the server can't create its directory: {describe(error)}") from error
    try:
        yield run_dir
    finally:
        await asyncio.to_thread(remove, run_dir)
        await asyncio.to_thread(remove_groups, run_dir.name)
        if held is not None:
            with contextlib.suppress(OSError):
                above.rmdir()  # fails, as intended, if it holds other files
            os.close(held)


def _held(state_dir: Path) -> int:
    """Lock a directory against other servers and return the descriptor. Raises EnvdError if another server has it."""
    mode = stat.S_IMODE(state_dir.stat().st_mode)
    if mode & 0o111 != 0o111:  # the sandboxes' users need to traverse it
        state_dir.chmod(mode | 0o111)
    held = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise EnvdError(f"another server uses {state_dir}: name another --state-dir") from error
    return held


def _rules_text(path: Path | None) -> str:
    try:
        return "" if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = describe(error) if isinstance(error, OSError) else str(error)
        raise EnvdError(f"the sandbox rules can't be read: {reason}") from error
