"""The Verifier service: grade final states."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from contracts.visible import visible
from envd.server.admission import Wanted
from envd.server.calls import Context, Service, unary
from envd.server.sandboxes import Sandboxes
from envd.server.service_tools import checked_timeout
from envd.server.verifications import Verifications

_MOST_FOUND, _MAX_FOUND = 32, 300


class VerifierService(Service, rpc.VerifierServicer):
    """Servicer for verifications."""

    def __init__(self, sandboxes: Sandboxes, verifications: Verifications) -> None:
        super().__init__(sandboxes)
        self._verifications = verifications

    @unary
    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyReply:
        """Grade a final state and return its test outcomes."""
        self.sandboxes.require_admitting()
        started = time.monotonic()
        timeout_s = checked_timeout(request.timeout_s)
        left = context.time_remaining()
        request.limits.lifetime_s = 0  # a verification ends with its tests
        wanted = Wanted(request.template, backend=request.backend, rules_yaml=request.policy_yaml)
        backend, decisions = self.sandboxes.decide(wanted.with_limits(request.limits))
        result = await self._verifications.verify(
            backend,
            request.template,
            request.diff,
            request.hidden_files,
            request.tests,
            decisions.limits,
            timeout_s,
            None if left is None else max((left - timeout_s) / 2, 0),
            artifacts=request.artifacts,
            product=request.product,
            runtime=request.runtime,
            plugins=request.plugins,
            ini=request.ini,
            idle_s=request.idle_s,
        )
        if result["exit"] == "timed_out":
            self.sandboxes.audit.record("limit.time", "", what="verification", seconds=timeout_s)
        tampering = self._tampering(result)
        return pb.VerifyReply(
            outcomes=[
                pb.TestOutcome(**outcome | {"message": visible(outcome["message"])}) for outcome in result["outcomes"]
            ],
            exit=result["exit"],
            log=result["log"],
            seconds=time.monotonic() - started,
            tampering=tampering,
            backend=backend.name,
            observations=[pb.Observation(**each) for each in result.get("observations", ())],
        )

    @unary
    async def Found(self, request: pb.FoundRequest, context: Context) -> pb.FoundReply:
        """Record the grader's findings in the audit log."""
        self._record(request.findings, template=request.template[:_MAX_FOUND])
        return pb.FoundReply()

    def _tampering(self, result: dict[str, Any]) -> list[str]:
        """Signs of tampering in a result. Records them, except those found only by review of the diff (`review:`)."""
        found = [str(each) for each in result.get("tampering", ())]
        self._record([each for each in found if not each.startswith("review:")])
        return found

    def _record(self, found: Sequence[str], **about: str) -> None:
        """Record all findings as one audit event, so that they do not evict other events."""
        if found:
            self.sandboxes.audit.record(
                "verify.tampered", "", what=", ".join(each[:_MAX_FOUND] for each in found[:_MOST_FOUND]), **about
            )
