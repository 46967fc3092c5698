"""A pod of the step pool: executes steps, one at a time, each in a process forked from one that has the definitions.

    python -m triplane_dagster.step_worker --listen 0.0.0.0:4100

SIGTERM: takes no further step, ends the running one by SIGTERM, and waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import multiprocessing
import multiprocessing.forkserver
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped, unused-ignore]

from contracts.errors import TriplaneError
from contracts.pb import steps_pb2, steps_pb2_grpc
from contracts.rpc.keys import KeyCheck
from contracts.rpc.listening import OPTIONS, Listening
from envd.sandbox.linux import adopt_orphans
from envd.sandbox.proctree import descendants, kill_since
from triplane_dagster.experiment_files import experiments_digest, experiments_folder
from triplane_dagster.step_pool import ALIVE, PASSWORD, pool_key

IMAGE = "DAGSTER_CURRENT_IMAGE"
"""Variable with the image of this pod. Runs with another one are refused."""
CLAIM_S = 10.0
"""Seconds in which Run must follow Claim."""
GRACE_S = 50.0
"""Seconds between SIGTERM and SIGKILL of a step's process."""
_PRELOADED = ["triplane_dagster.preloaded", "dagster._cli", "dagster_postgres", "dagster_aws.s3"]
_SERVICE = steps_pb2.DESCRIPTOR.services_by_name["StepPool"].full_name
Target = Callable[[Sequence[str], Mapping[str, str]], None]


def execute_step(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Execute a step in this process, which ends with it. arguments: `dagster` and its arguments."""
    os.setsid()
    os.environ.update(environment)
    sys.argv = list(arguments)
    (script,) = importlib.metadata.entry_points(group="console_scripts", name=arguments[0])
    script.load()()


def nothing(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Target of the process that shows that the definitions are loaded."""


class StepPool(steps_pb2_grpc.StepPoolServicer):
    """The service of one pod."""

    def __init__(self, folder: Path, image: str, target: Target = execute_step) -> None:
        """folder: experiment files. target: what the process of a step calls."""
        self._folder, self._image, self._target = folder, image, target
        self._loaded = experiments_digest(folder)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._claim: tuple[str, float] | None = None
        self._step: asyncio.Task[int] | None = None
        self._process: Any = None
        self._ending: asyncio.Task[None] | None = None
        self.stop = asyncio.Event()
        """Set when the pod takes no further step."""

    async def load(self) -> None:
        """Return once the process that steps are forked from has loaded the definitions."""
        await self._executed(nothing, [], {})

    async def Claim(self, request: steps_pb2.ClaimRequest, context: Any) -> steps_pb2.ClaimReply:
        """See the proto."""
        if request.image != self._image:
            words = f"this pod has image {self._image or '(none)'}, the run {request.image or '(none)'}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, words)
        if self.stop.is_set() or self._step is not None or (self._claim and self._claim[1] > time.monotonic()):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "executes another step, or ends")
        if request.experiments != self._loaded:
            if experiments_digest(self._folder) != self._loaded:
                self.stop.set()  # the container starts again, with the present files
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "has loaded other experiment files than the run")
        self._claim = (secrets.token_hex(16), time.monotonic() + CLAIM_S)
        return steps_pb2.ClaimReply(claim=self._claim[0], pod=socket.gethostname())

    async def Run(self, request: steps_pb2.RunRequest, context: Any) -> steps_pb2.RunReply:
        """See the proto."""
        if self.stop.is_set() or self._claim is None or self._claim[0] != request.claim or self._step is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the claim has expired")
        self._claim = None
        self._step = asyncio.create_task(self._executed(self._target, request.arguments, request.environment))
        self._step.add_done_callback(self._forget)
        try:
            return steps_pb2.RunReply(exit_code=await asyncio.shield(self._step))
        except asyncio.CancelledError:
            self._ending = asyncio.create_task(self.end_step())
            raise

    async def end_step(self) -> None:
        """End the running step, if there is one: SIGTERM, and SIGKILL after the grace period."""
        step = self._step
        while self._process is None and step is not None and not step.done():
            await asyncio.sleep(0.05)  # it is being started
        process = self._process
        if step is None or process is None:
            return
        process.terminate()
        done, _ = await asyncio.wait({step}, timeout=GRACE_S)
        if not done:
            kill_since(process.pid, set(), lambda: None)
            process.kill()
            await asyncio.wait({step})

    def _forget(self, _: asyncio.Task[int]) -> None:
        self._step = None

    async def _executed(self, target: Target, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Exit code of a process that calls `target`. What it leaves running is killed."""
        multiprocessing.forkserver.ensure_running()
        before = descendants(os.getpid()).keys()
        process = self._context.Process(target=target, args=(list(arguments), dict(environment)))
        await asyncio.to_thread(process.start)  # waits until the definitions are loaded
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(process.sentinel, over.set)
        self._process = process
        try:
            await over.wait()
        finally:
            self._process = None
            loop.remove_reader(process.sentinel)
        process.join()
        kill_since(os.getpid(), before, lambda: _collect(before))
        assert process.exitcode is not None, "it was joined"
        return process.exitcode


def _collect(kept: AbstractSet[int]) -> None:
    """Collect ended children, but none of `kept`: multiprocessing waits for its own."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in kept:
            os.waitpid(ended.si_pid, 0)


async def serve(listening: Listening, pool: StepPool) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError."""
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, pool.stop.set)
    key = pool_key().encode()
    server = grpc.aio.server(
        options=[*ALIVE, *OPTIONS, ("grpc.keepalive_permit_without_calls", 1)],
        interceptors=[KeyCheck((key,), f"the pool's key is made of ${PASSWORD}")],
    )
    steps_pb2_grpc.add_StepPoolServicer_to_server(pool, server)  # type: ignore[no-untyped-call]
    probe = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    port = listening.listen(server)
    await pool.load()
    await server.start()
    for name in ("", _SERVICE):
        await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
    print(f"step pool: ready on port {port}", flush=True)
    await pool.stop.wait()
    await probe.enter_graceful_shutdown()
    await pool.end_step()
    await server.stop(1.0)


def main(
    listen: Annotated[str, typer.Option(help="Address, host:port. Let only runs connect to it.")] = "127.0.0.1:4100",
) -> None:
    """A pod of the step pool: executes steps of runs, one at a time, without starting Python for each."""
    listening = Listening(listen, insecure=True)
    try:
        listening.check()
        asyncio.run(_serve(listening))
    except TriplaneError as error:
        sys.exit(f"step pool: {error}")


async def _serve(listening: Listening) -> None:
    await serve(listening, StepPool(experiments_folder(), os.environ.get(IMAGE, "")))


if __name__ == "__main__":
    typer.run(main)
