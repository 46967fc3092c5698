"""Run a bridge until it receives a signal.

    journal, engine -> sessions -> service -> address printed      SIGTERM -> drain -> turns stop -> exit 0

While it drains, no episode is started. With a journal it also begins no turn, and ends when none runs: episodes go on
at the next bridge with that journal. Without one it ends when no episode is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped, unused-ignore]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped, unused-ignore]

from contracts.errors import ConfigError, describe
from contracts.pb import bridge_pb2, bridge_pb2_grpc
from contracts.processes import allow_open_files
from contracts.rpc.connecting import MESSAGE_BYTES, prefer_short_round_trips
from contracts.rpc.keys import KeyCheck
from contracts.rpc.listening import LASTING_OPTIONS, Listening
from contracts.tracing import service
from inference.bridge.calls import Unreadable
from inference.bridge.checks import Limits
from inference.bridge.hosted.hosting import Hosting
from inference.bridge.journal import Journal
from inference.bridge.metrics import Metrics
from inference.bridge.policy_file import PolicyFile
from inference.bridge.service import BridgeService
from inference.bridge.sessions import Bounds, Sessions
from inference.engines import BuiltinConfig, EngineConfig, VllmConfig, open_engine
from inference.engines.base import Engine, watch
from inference.errors import StaleVersion

DRAIN_S = 30.0
"""Default of `--drain`."""
SOCKET = "bridge.sock"
"""File of the default socket."""
_GRACE_S = 0.5
_LOOK_S = 0.05
_SERVER_OPTIONS = (*LASTING_OPTIONS, ("grpc.max_receive_message_length", MESSAGE_BYTES))
_SERVICE = bridge_pb2.DESCRIPTOR.services_by_name["Bridge"].full_name
_ADVICE = "send `authorization: Bearer <key>` with one of --key-file, or with the key that the bridge printed"


@dataclass(frozen=True)
class Options:
    """Options of a bridge."""

    listening: Listening
    bounds: Bounds = field(default_factory=Bounds)
    journal: Path | None = None
    """Directory of the journal; None: episodes end with the process."""
    drain_s: float = DRAIN_S
    """Longest drain after SIGTERM, in seconds."""
    engine: EngineConfig = field(default_factory=BuiltinConfig)
    pinned: bool = True
    """Whether the engine must serve the bridge's version at its start; False: what a Triplane server serves."""
    policies: PolicyFile | None = None
    """Names the policies to serve after the first one."""
    hosting: Callable[[], contextlib.AbstractAsyncContextManager[Hosting]] | None = None
    """Opens what hosted episodes are played with; None: the bridge hosts none."""
    metrics: str | None = None
    """HOST:PORT of the metrics endpoint; None: no metrics."""


@dataclass(frozen=True)
class Bridge:
    """A bridge that serves."""

    sessions: Sessions
    address: str
    """For clients, with the port that was picked."""


@contextlib.asynccontextmanager
async def serving(engine: Engine, limits: Limits, options: Options) -> AsyncIterator[Bridge]:
    """Serve `engine` at the options' address while the context is open.

    Raises ConfigError for an address or key file that can't be used, JournalError for a journal.
    """
    listening = options.listening
    listening.check()
    made = listening.made_key()
    if made is not None and options.journal is not None:
        raise ConfigError(
            f"--journal at {listening.address} needs --key-file: a made key is another one after a restart, and each"
            " key sees its own episodes only"
        )
    keys = listening.keys() if made is None else (made.key.encode(),)
    async with contextlib.AsyncExitStack() as stack:
        journal = None if options.journal is None else Journal(options.journal)
        if journal is not None:
            stack.callback(journal.close)
        hosting = None if options.hosting is None else await stack.enter_async_context(options.hosting())
        sessions = Sessions(engine, limits, options.bounds, journal, hosting)
        stack.push_async_callback(sessions.close)
        if options.metrics is not None:
            metrics = Metrics(sessions.counts, sessions.phases)
            metrics.start(options.metrics)
            stack.push_async_callback(asyncio.to_thread, metrics.stop)
        checks: list[grpc.aio.ServerInterceptor] = [KeyCheck(keys, _ADVICE)] if keys else []
        server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=[*checks, Unreadable()])
        bridge_pb2_grpc.add_BridgeServicer_to_server(BridgeService(sessions), server)  # type: ignore[no-untyped-call]
        probe = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(probe, server)
        reflection.enable_server_reflection([_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        port = listening.listen(server)
        if made is not None:
            file = made.publish(port)
            stack.callback(made.withdraw, file)
            print(f"bridge: {listening.address} asks for this key: {made.key} (also in {file})", file=sys.stderr)
        await server.start()
        stack.push_async_callback(server.stop, _GRACE_S)
        for name in ("", _SERVICE):
            await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
        works = [sessions.sweeping()]
        if journal is not None:
            works.append(journal.sync())
        if options.policies is not None:
            works.append(options.policies.follow(engine))
        for work in works:
            stack.push_async_callback(_cancelled, asyncio.create_task(work))
        stack.push_async_callback(probe.enter_graceful_shutdown)
        yield Bridge(sessions, _address(listening.address, port))


def serve(directory: Path, version: str, options: Options) -> None:
    """Serve the policy in `directory` until a signal. Prints the address when it is ready.

    Raises TriplaneError, in one line, if it can't, and EngineError once the engine has failed for good.
    """
    limits = limits_of(directory)
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # read by gRPC when it is first used
    prefer_short_round_trips()
    with service("bridge"):
        _run(_serve(directory, version, limits, options))


def limits_of(directory: Path) -> Limits:
    """Vocabulary and context of a checkpoint, of any family. Raises ConfigError."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(f"--policy {directory} is no checkpoint: {describe(error)}") from error
    except ValueError as error:
        raise ConfigError(f"--policy {directory}: config.json is not JSON: {error}") from error
    shape = config.get("text_config", config)  # where a model has other parts beside its language model
    try:
        return Limits(int(shape["vocab_size"]), int(shape["max_position_embeddings"]))
    except KeyError as error:
        raise ConfigError(f"--policy {directory}: config.json has no {error}: is it a language model?") from error


async def _serve(directory: Path, version: str, limits: Limits, options: Options) -> None:
    allow_open_files()
    signals = _Signals()
    engine = open_engine(options.engine, directory, version, pinned=options.pinned)
    try:
        async with serving(engine, limits, options) as bridge:
            kept = f", {bridge.sessions.open} episodes from the journal" if bridge.sessions.open else ""
            served = await engine.version()
            if options.pinned and options.policies is None and served != version:
                raise StaleVersion(
                    f"the engine serves policy {served}, not {version}: load that, or name the other one"
                )
            print(f"policy {served} at {bridge.address}{kept}", flush=True)
            await _wait(signals, _check_of(engine, options.engine))
            await _drain(bridge.sessions, options.drain_s, signals)
    finally:
        await engine.close()
    if signals.interrupted:
        raise KeyboardInterrupt


class _Signals:
    """SIGTERM and SIGINT of this process, from now on."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        """Set by the first one."""
        self.hurry = False
        """Whether to wait for nothing: after SIGINT, or a second signal."""
        self.interrupted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._told, number)

    def _told(self, number: int) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        self.hurry = self.interrupted or self.first.is_set()
        self.first.set()


def _check_of(engine: Engine, config: EngineConfig) -> Callable[[], Awaitable[object]] | None:
    """Call that raises once the engine has failed for good; None: it uses a server, which may serve again."""
    if isinstance(config, BuiltinConfig):
        return engine.version
    if isinstance(config, VllmConfig) and not config.is_fleet:
        from inference.engines.vllm import VllmEngine  # loads httpx

        assert isinstance(engine, VllmEngine)
        return engine.check_failure
    return None


async def _wait(signals: _Signals, check: Callable[[], Awaitable[object]] | None) -> None:
    """Wait for the first signal. Raises what `check` raises."""
    works: list[asyncio.Task[Any]] = [asyncio.create_task(signals.first.wait())]
    if check is not None:
        works.append(asyncio.create_task(watch(check)))
    done, left = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        await _cancelled(task)
    for task in done:
        task.result()


async def _drain(sessions: Sessions, seconds: float, signals: _Signals) -> None:
    """Begin nothing new, and return when nothing is left to wait for, after `seconds` at the latest."""
    sessions.draining = True
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not signals.hurry:
        if not (sessions.running if sessions.durable else sessions.open):
            return
        await asyncio.sleep(_LOOK_S)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _address(listen: str, port: int) -> str:
    """The address with the port that was picked."""
    return listen if listen.startswith("unix") else f"{listen.rpartition(':')[0]}:{port}"


def _run(work: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it is installed: a tenth less of a call's time."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)
