"""Run a training as a Job or JobSet: create or adopt it, watch it, restart it if the cluster took a pod, keep logs.

    attempt: open messages -> create or adopt Job -> watch -> close messages -> keep logs -> delete Job
        restart: the cluster's doing, at most `restarts` times                 the trainer continues from its snapshot
        failed:  the training's own reason, or its pods can't start            LaunchFailed with the cluster's words

A driver that dies leaves the Job or JobSet, and the next launch of the same key adopts it. Ctrl-C and Dagster's
Terminate delete it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlparse

import dagster as dg
from pydantic import Field

from contracts import tracing
from resources.channel import PIPES_BUCKET
from resources.errors import LaunchFailed
from resources.kubernetes.client import Api, ApiFault, ApiUnreachable, Object, connect
from resources.kubernetes.faults import DONE, Ending, ending_of
from resources.kubernetes.jobs import ensure_service, existing_training, is_owned, remove_training, restarts_of
from resources.kubernetes.logs import PodLogs
from resources.kubernetes.manifests import MESSAGES, Attempt, is_set, job_name, pods_job_name, training_manifest
from resources.kubernetes.settings import read_settings
from resources.kubernetes.waiting import HOPELESS, why_waiting
from resources.kubernetes.watching import Watched
from resources.launch import Context, Launch, OnMessage
from resources.pipes_s3 import PREFIX, bucket_channel, remove_folder

_ASK_S = 5.0
"""Seconds between two questions why pods have not started."""
_YOUNG_S, _RARE = 60.0, 3
"""Seconds after which the Job is asked for only every third interval."""
_NOW_S = 1.0
"""Patience of a request in the loop, which repeats it anyway."""
_SETTLE_S = 20.0
"""Seconds to wait for the reason of a rank that others lost."""
_LAST_READ_S = 10.0
"""Longest time for reading logs when somebody ends the run."""


class KubernetesLauncher(dg.ConfigurableResource[Any]):
    """Runs a command as an Indexed Job, one pod for each machine; or as a JobSet of that Job."""

    restarts: int = Field(default=3, ge=0, description="Restarts of a training whose pods the cluster took away")
    poll_s: float = Field(default=1.0, gt=0, description="Polling interval for the Job's state, in seconds")
    patience_s: float = Field(default=900.0, gt=0, description="Longest absence of the API server, in seconds")
    port: int = Field(default=29400, ge=1, le=65535, description="Port of a pod at which rank 0 listens")

    def run(self, context: Context, launch: Launch, on_message: OnMessage) -> list[Mapping[str, Any]]:
        """See Launcher.run."""
        bucket, settings, api = messages_bucket(launch), read_settings(), connect()
        restarts = 0
        while True:
            job = existing_training(api, launch.key, self.poll_s, sets=launch.placement.workload == "jobset")
            restarts = restarts_of(job) if job else restarts
            folder = job["metadata"]["annotations"][MESSAGES] if job else f"{PREFIX}/{launch.key}/{uuid.uuid4().hex}"
            with (
                bucket_channel(bucket, folder) as channel,
                dg.open_pipes_session(
                    context=context, context_injector=channel.injector, message_reader=channel.reader
                ) as session,
            ):
                created, training = False, None
                try:
                    if job is None:
                        variables = {**session.get_bootstrap_env_vars(), **tracing.environment()}
                        attempt = Attempt(restarts, folder, context.run_id, variables, self.port)
                        job = api.create_training(training_manifest(launch, settings, api.namespace, attempt))
                        created = job is not None
                    if job is not None:
                        training = _Training(self, context, api, job, launch, session, on_message)
                        ending = training.watch(adopted=not created)
                finally:
                    channel.ended()
                    if job is None or (training is not None and training.deleted):
                        remove_folder(bucket, folder)  # no Job uses it: refused, ended, or another driver was first
            if training is None:
                continue
            training.deliver()
            where = training.finish()
            remove_folder(bucket, folder)
            if ending == DONE:
                return training.messages
            if not ending.restart or restarts >= self.restarts:
                tries = f" after {restarts} restart(s)" if restarts else ""
                raise LaunchFailed(f"training {job_name(launch.key)}{tries}: {ending.words}; {where}")
            restarts += 1
            context.log.warning(
                f"{ending.words}; {where}; restart {restarts} of {self.restarts}: it continues from its last snapshot"
            )
            remove_training(api, training.watched.training, self.poll_s)


class _Training:
    """One Job or JobSet, watched to its end."""

    def __init__(
        self,
        launcher: KubernetesLauncher,
        context: Context,
        api: Api,
        job: Object,
        launch: Launch,
        session: dg.PipesSession,
        on_message: OnMessage,
    ) -> None:
        self._launcher, self._context, self._api, self._launch = launcher, context, api, launch
        self._session, self._on_message = session, on_message
        self.watched, self._logs = Watched(job), PodLogs(api)
        self.messages: list[Mapping[str, Any]] = []
        self.deleted = False
        """Whether the Job was deleted because somebody ended the run."""
        self._told: set[str] = set()
        self._asked = float("-inf")

    def watch(self, *, adopted: bool) -> Ending:
        """Watch the training to its end. Raises LaunchFailed; if somebody ends the run, the training is deleted."""
        self._context.log.info(f"{'adopted' if adopted else 'created'} {self._name} in {self._api.namespace}")
        try:
            return self._watch()
        except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
            if _is_wanted(self._context):
                raise
            try:
                self._logs.read(self.watched.records, _LAST_READ_S)
                self._logs.keep(self.watched, self._launch.store, self._launch.key)
            finally:
                self._api.delete_training(self.watched.training, patience_s=_LAST_READ_S)
                self.deleted = True
            raise

    def deliver(self) -> None:
        """Pass on messages that have arrived."""
        arrived = self._session.get_custom_messages()
        for message in arrived[len(self.messages) :]:
            self.messages.append(message)
            self._on_message(message)

    def finish(self) -> str:
        """Keep the logs and delete the training. Returns where the logs are."""
        self._logs.read(self.watched.records, _LAST_READ_S)
        where = self._logs.keep(self.watched, self._launch.store, self._launch.key)
        try:
            self._api.delete_training(self.watched.training)
        except ApiFault as fault:  # the cluster deletes it after a while
            self._context.log.warning(f"{self._name} stays for now: {fault}")
        return where

    def _watch(self) -> Ending:
        ensure_service(self._api, self.watched.training)
        begun = seen = time.monotonic()
        started: float | None = None
        failing: float | None = None
        while True:
            self.deliver()
            now = time.monotonic()
            try:
                if not self._look():
                    return DONE if self._launch.is_done() else Ending(f"{self._name} was deleted", restart=True)
                seen = now
            except ApiUnreachable as error:
                self._warn(str(error))
                if now - seen > self._launcher.patience_s:
                    raise
                time.sleep(self._launcher.poll_s)
                continue
            if failing is None and (self.watched.signs or self.watched.failed):
                failing = now
                self._logs.read(self.watched.records, _LAST_READ_S)  # before the others' pods are gone, too
            patient = failing is None or now - failing < _SETTLE_S
            ending = ending_of(self.watched, self._launch, patient=patient)
            if ending is not None:
                return ending
            if started is None and self.watched.all_started:
                started = now
            late = self._late(started, now, begun) if failing is None else None
            if late is not None:
                return late
            time.sleep(self._launcher.poll_s * (1 if failing or now - begun < _YOUNG_S else _RARE))

    def _look(self) -> bool:
        """Update what is known of the training. Returns False if it is gone."""
        kind, meta = self.watched.training["kind"], self.watched.training["metadata"]
        training = job = self._api.training(kind, meta["name"], _NOW_S)
        if training is None or training["metadata"]["uid"] != meta["uid"]:
            return False
        if is_set(training):
            job = self._api.training("Job", pods_job_name(training), _NOW_S)
            job = job if job and is_owned(job, meta["uid"]) else None
        pods = f"batch.kubernetes.io/controller-uid={job['metadata']['uid']}" if job else ""
        self.watched.update(training, job, self._api.pods(pods, _NOW_S) if job else [])
        return True

    @property
    def _name(self) -> str:
        return f"{self.watched.training['kind']} {self.watched.training['metadata']['name']}"

    def _late(self, started: float | None, now: float, begun: float) -> Ending | None:
        """The failure of a Job that does not start, or that takes too long."""
        if started is not None:
            if now - started > self._launch.timeout_s:
                return Ending(
                    f"it took longer than {self._launch.timeout_s:g} s: raise trainer.launcher.timeout_s; the next run"
                    " continues from the last snapshot"
                )
            return None
        limit = self._launch.placement.start_timeout_s
        if now - self._asked < min(_ASK_S, limit / 4) and now - begun <= limit:
            return None
        self._asked = now
        try:
            reason, words = why_waiting(self.watched, self._api)
        except ApiUnreachable as error:  # events may have a store of their own, which is away alone
            reason, words = "Pending", f"unknown, {error}"
        if reason in HOPELESS:
            return Ending(words)
        if now - begun > limit:
            return Ending(f"not all pods started within placement.trainer.start_timeout_s = {limit:g} s: {words}")
        if reason != "Pending":
            self._warn(f"{words}; waiting for up to {limit:g} s", reason)
        return None

    def _warn(self, words: str, once: str = "api") -> None:
        if once not in self._told:
            self._told.add(once)
            self._context.log.warning(words)


def messages_bucket(launch: Launch) -> str:
    """Bucket of the messages: $TRIPLANE_PIPES_BUCKET, else the store's. Raises LaunchFailed."""
    named = os.environ.get(PIPES_BUCKET, "")
    parsed = urlparse(launch.store.url if launch.store else "")
    if named or parsed.scheme == "s3":
        return named or parsed.netloc
    raise LaunchFailed(
        f"trainer.launcher on kubernetes needs a bucket that pods can reach: set TRIPLANE_STORE to s3://BUCKET/PREFIX,"
        f" or {PIPES_BUCKET} if pods see {launch.store.url if launch.store else 'the store'} otherwise"
    )


def _is_wanted(context: Context) -> bool:
    """Whether an interrupted run goes on elsewhere: a pod of a run that nobody terminates is moved, not ended."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return False
    run = context.instance.get_run_by_id(context.run_id)
    return run is not None and run.status not in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
