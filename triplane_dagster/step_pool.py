"""Steps in a pool of pods that have imported the definitions already; a pod that starts takes seconds for that.

    launch a step  ->  Claim a pod of $TRIPLANE_STEP_POOL  ->  Run the step in it
                         none is free, or the step asks for more than they have  ->  a Job, as without a pool

The connection of Run is the step's lease: when it breaks, the pod ends the step's process, and the health check here
fails, so that the op's RetryPolicy launches the step again.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import grpc
from kubernetes.utils.quantity import parse_quantity

from contracts.addresses import parse_addresses, resolve
from contracts.digests import sha256
from contracts.errors import ConfigError, NameUnresolved
from contracts.pb import steps_pb2, steps_pb2_grpc
from ops.pod_tags import CONFIG_TAG
from triplane_dagster.experiment_files import experiments_digest
from triplane_dagster.private_dagster import CheckStepHealthResult, EngineEventData, StepHandler, StepHandlerContext

VARIABLE = "TRIPLANE_STEP_POOL"
"""Addresses of the pool's pods, see `contracts.addresses`: dns:NAME:PORT stands for all pods of a headless Service."""
RESOURCES = "TRIPLANE_STEP_POOL_RESOURCES"
"""Variable with requests and limits of the pool's pods, as JSON. Steps that ask for more get pods of their own."""
PASSWORD = "DAGSTER_POSTGRES_PASSWORD"
"""Variable with the password of Dagster's records. Whoever has it may launch anything: the pool's key is made of it."""
ALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
"""Options of both ends: a pod or a run whose node is gone is noticed within 25 s."""
_CLAIM_S = 3.0
"""Seconds in which a pod must reply to Claim, and the name service tell which pods there are."""


def pool_key() -> str:
    """Bearer key of the pool. Raises ConfigError without the password of Dagster's records."""
    password = os.environ.get(PASSWORD)
    if not password:
        raise ConfigError(f"${VARIABLE} needs ${PASSWORD}: the key of the pool is made of it")
    return sha256(b"step pool:" + password.encode())


@dataclass(frozen=True)
class _Running:
    """A step in a pod of the pool."""

    pod: str
    call: Any
    """grpc.Future of a RunReply."""


class PooledSteps(StepHandler):
    """Step handler that executes steps in the pool, and leaves to `inner` those that the pool does not take."""

    def __init__(self, inner: StepHandler, addresses: str, folder: Path) -> None:
        """addresses: see VARIABLE. folder: the experiment files that this run has loaded. Raises ConfigError."""
        super().__init__()
        self._inner = inner
        self._addresses = parse_addresses(addresses, VARIABLE)
        self._resources = json.loads(os.environ.get(RESOURCES, "{}"))
        self._experiments = experiments_digest(folder)
        self._credentials = (("authorization", f"Bearer {pool_key()}"),)
        self._pods: dict[str, steps_pb2_grpc.StepPoolStub] = {}
        self._running: dict[str, _Running] = {}
        """By step; those that have ended stay until they are launched again."""

    @property
    def name(self) -> str:
        """See StepHandler.name."""
        return f"step pool, else {self._inner.name}"

    def launch_step(self, step_handler_context: StepHandlerContext) -> Iterator[dg.DagsterEvent]:
        """Run the step in a pod of the pool, else as `inner` does."""
        key = _step(step_handler_context)
        self._running.pop(key, None)
        step = step_handler_context.get_step_context(key)
        if not fits(step_handler_context.step_tags[key], self._resources):
            yield from self._inner.launch_step(step_handler_context)
            return
        claimed, refusals = self._claim(step_handler_context)
        if claimed is None:
            said = f"No pod of the step pool takes {key} ({refusals}): it gets its own."
            yield dg.DagsterEvent.engine_event(step, said, EngineEventData())
            yield from self._inner.launch_step(step_handler_context)
            return
        stub, claim = claimed
        message = f'Executing step "{key}" in pod {claim.pod} of the step pool.'
        yield dg.DagsterEvent.step_worker_starting(step, message, {"Kubernetes pod": dg.MetadataValue.text(claim.pod)})
        call = stub.Run.future(_request(claim.claim, step_handler_context, key), metadata=self._credentials)
        self._running[key] = _Running(claim.pod, call)

    def check_step_health(self, step_handler_context: StepHandlerContext) -> CheckStepHealthResult:
        """Unhealthy if the step's process has failed or its pod is lost."""
        key = _step(step_handler_context)
        running = self._running.get(key)
        if running is None:
            return self._inner.check_step_health(step_handler_context)
        if not running.call.done():
            return CheckStepHealthResult.healthy()
        if running.call.cancelled():
            return CheckStepHealthResult.unhealthy("The step was told to end.")
        if (error := running.call.exception()) is not None:
            why = f"{error.code().name.lower()}: {error.details()}"
            return CheckStepHealthResult.unhealthy(f"Pod {running.pod} of the step pool is lost ({why}).")
        code = running.call.result().exit_code
        if code == 0:
            return CheckStepHealthResult.healthy()
        said = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        return CheckStepHealthResult.unhealthy(f"The step's process in pod {running.pod} of the step pool {said}.")

    def terminate_step(self, step_handler_context: StepHandlerContext) -> Iterator[dg.DagsterEvent]:
        """End the step's process, by SIGTERM first."""
        key = _step(step_handler_context)
        running = self._running.get(key)
        if running is None:
            yield from self._inner.terminate_step(step_handler_context)
            return
        running.call.cancel()
        step = step_handler_context.get_step_context(key)
        said = f"Ending the step's process in pod {running.pod} of the step pool."
        yield dg.DagsterEvent.engine_event(step, said, EngineEventData())

    def _claim(
        self, context: StepHandlerContext
    ) -> tuple[tuple[steps_pb2_grpc.StepPoolStub, steps_pb2.ClaimReply] | None, str]:
        """A pod that is reserved for one step, and why others refused."""
        origin = context.execute_step_args.job_origin.repository_origin
        request = steps_pb2.ClaimRequest(image=origin.container_image or "", experiments=self._experiments)
        refusals = []
        try:
            found = [each.target for each in resolve(self._addresses, timeout_s=_CLAIM_S)]
        except NameUnresolved as error:  # no pod is ready
            return None, str(error)
        for address in random.sample(found, len(found)):
            if address not in self._pods:
                self._pods[address] = steps_pb2_grpc.StepPoolStub(grpc.insecure_channel(address, options=ALIVE))  # type: ignore[no-untyped-call]
            stub = self._pods[address]
            try:
                return (stub, stub.Claim(request, timeout=_CLAIM_S, metadata=self._credentials)), ""
            except grpc.RpcError as error:
                refusals.append(f"{address}: {error.details()}")
        return None, "; ".join(refusals)


def _step(context: StepHandlerContext) -> str:
    """Key of the step that the executor asks about; it asks about one at a time."""
    (key,) = context.execute_step_args.step_keys_to_execute or ()
    return key


def _request(claim: str, context: StepHandlerContext, key: str) -> steps_pb2.RunRequest:
    """What dagster-k8s would put into the step's pod."""
    args = context.execute_step_args
    environment = {each["name"]: each["value"] for each in args.get_command_env()}
    environment |= {"DAGSTER_RUN_JOB_NAME": context.dagster_run.job_name, "DAGSTER_RUN_STEP_KEY": key}
    arguments = args.get_command_args(skip_serialized_namedtuple=True)
    return steps_pb2.RunRequest(claim=claim, arguments=arguments, environment=environment)


def fits(tags: Mapping[str, str], pool: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether a step with these tags names no nodes, and asks for no more than pods with the resources `pool` have."""
    config = json.loads(tags.get(CONFIG_TAG, "{}"))
    asked = config.get("container_config", {}).get("resources")
    if not asked or config.get("pod_spec_config"):
        return False
    return all(
        name in pool.get(kind, {}) and parse_quantity(amount) <= parse_quantity(pool[kind][name])
        for kind, amounts in asked.items()
        for name, amount in amounts.items()
    )
