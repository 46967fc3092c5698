"""Run hidden tests in fresh sandboxes of envd servers, with retries if a server fails."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from contracts.errors import ArtifactMissing, InfraFault, TriplaneError
from contracts.retries import backoff_s
from contracts.runtimes import runtime_archive
from contracts.store import Store
from contracts.tasks import Task
from curation.paths import changed_paths
from envd.client import Limits, SandboxClient, ServerLost, VerifyResult

LIMITS = Limits()
"""Limits of every verifying sandbox, unless its task names its memory. Fixed, since memory and processes affect
outcomes; covered by VERIFIER_VERSION.
"""

ATTEMPTS = 4
BACKOFF_S = 0.25
"""Mean pause after the first infrastructure fault, in seconds; `backoff_s` gives later pauses."""
BLAMED_AFTER = 2
"""Faults of one final state after which a control state is run: if the control grades and the state faults again, the
state is the cause.
"""

log = logging.getLogger(__name__)


class Ungradable(Exception):
    """The verification of a final state fails repeatedly in fresh sandboxes; that of a control state succeeds."""


class Runs:
    """Runs of a task's hidden tests, or of variants, in sandboxes."""

    def __init__(
        self, client: SandboxClient, timeout_s: float, store: Store | None = None, *, idle_s: float = 0
    ) -> None:
        """timeout_s: of tasks that name none. store: has their runtimes. idle_s: as in `SandboxClient.verify`."""
        self._client, self._timeout_s, self._store, self._idle_s = client, timeout_s, store, idle_s
        self._archives: dict[str, Path] = {}
        self._sent: set[str] = set()
        """Runtimes that the server was sent."""
        self._templates: dict[str, str] = {}
        self.count = 0
        """Number of runs that envd completed."""

    async def run(
        self,
        task: Task,
        diff: bytes,
        hidden: Mapping[str, bytes] | None = None,
        tests: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> VerifyResult:
        """Run the named tests on a final state in a new sandbox. hidden, tests: replace the task's. timeout_s: for a
        task that names none, instead of that of all runs.

        Raises InfraFault if envd keeps failing, Ungradable if it fails on this state alone, ArtifactMissing without the
        task's runtime.
        """
        fault: TriplaneError | None = None
        for attempt in range(ATTEMPTS):
            if fault is not None:
                log.warning("verifying %s failed (attempt %d of %d): %s", task.task_id, attempt, ATTEMPTS, fault)
                await asyncio.sleep(backoff_s(attempt, BACKOFF_S))
            controlled = attempt >= BLAMED_AFTER and bool(diff) and await self._control(task)
            try:
                return await self._once(task, diff, hidden, tests, timeout_s)
            except ArtifactMissing:
                raise  # of the task's runtime
            except TriplaneError as error:
                self._sent.discard(task.environment.runtime)
                self._templates.pop(task.files_digest, None)  # a restarted server may have lost the template
                fault = error
                # of several servers one may be lost right after its control; twice in a row it is the state
                if controlled and (attempt + 1 == ATTEMPTS or not isinstance(error, ServerLost)):
                    raise Ungradable(f"{type(error).__name__}: {error}") from error
        raise InfraFault(
            f"task {task.task_id} could not be verified in {ATTEMPTS} attempts ({fault}): check the envd server, then"
            " run the same step again"
        ) from fault

    async def provide(self, task: Task) -> None:
        """Send the server the task's runtime, if it has one that was not sent yet. Raises ArtifactMissing."""
        runtime = task.environment.runtime
        if not runtime or runtime in self._sent:
            return
        if runtime not in self._archives:
            self._archives[runtime] = await asyncio.to_thread(runtime_archive, self._store, runtime)
        await self._client.put_runtime(runtime, self._archives[runtime])
        self._sent.add(runtime)

    async def tell(self, task: Task, findings: Sequence[str]) -> None:
        """Record findings in the server's audit log.

        If that fails, log it: the verdict stays valid.
        """
        log.warning("a final state of %s tampered with its verdict: %s", task.task_id, ", ".join(findings))
        try:
            await self._client.found(await self._template(task), findings)
        except TriplaneError as error:
            log.warning("could not record it in the envd server's audit log: %s", error)

    async def _control(self, task: Task) -> bool:
        """Whether grading the untouched repository works now, or the reference solution if the repository hangs."""
        try:
            for state in (b"", task.reference_diff):
                if (await self._once(task, state, None, None)).exit != "timed_out":
                    return True
        except TriplaneError:
            pass
        return False

    async def _once(
        self,
        task: Task,
        diff: bytes,
        hidden: Mapping[str, bytes] | None,
        tests: Sequence[str] | None,
        timeout_s: float | None = None,
    ) -> VerifyResult:
        template, environment = await self._template(task), task.environment
        await self.provide(task)
        self.count += 1
        return await self._client.verify(
            template,
            diff,
            task.hidden_files if hidden is None else hidden,
            task.tests if tests is None else tests,
            limits=dataclasses.replace(LIMITS, memory_mb=environment.memory_mb or LIMITS.memory_mb),
            timeout_s=environment.timeout_s or timeout_s or self._timeout_s,
            artifacts=task.deliverables,
            product=changed_paths(task.reference_diff),
            runtime=environment.runtime,
            plugins=environment.plugins,
            ini=dict(environment.ini),
            idle_s=self._idle_s,
        )

    async def _template(self, task: Task) -> str:
        files = task.files_digest
        if files not in self._templates:
            self._templates[files] = await self._client.put_template(task.files, task.base)
        return self._templates[files]
