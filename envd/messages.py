"""Values of `envd.types` as messages of the protocol, and back: what clients and servicers share."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

from contracts.pb import envd_pb2 as pb
from envd.types import (
    Export,
    LeftOut,
    Limits,
    Observation,
    SandboxStatus,
    TestOutcome,
    TestStatus,
    ToolResult,
    VerifyExit,
    VerifyResult,
)

LIMITS = tuple(each.name for each in fields(Limits))
"""Names of limits, the same in a message."""


def limits_message(limits: Limits) -> pb.Limits:
    """Limits as a message."""
    return pb.Limits(**vars(limits))


def export_message(export: Export | None) -> pb.Export | None:
    """An export as a message."""
    if export is None:
        return None
    return pb.Export(**vars(export))


def left_out_of(reply: Any) -> LeftOut:
    """What a DeleteReply or a DiffReply says was left out."""
    return LeftOut(dict(reply.left_out_counts), tuple((each.path, each.reason) for each in reply.left_out))


def named_limits(message: pb.Limits) -> dict[str, Any]:
    """The numbers of a message by name; 0 where it names none."""
    return {name: getattr(message, name) for name in LIMITS}


def tool_result_message(result: ToolResult) -> pb.ToolResult:
    """A tool's result as a message."""
    return pb.ToolResult(**vars(result))


def tool_result_of(message: pb.ToolResult) -> ToolResult:
    """A tool's result as a value."""
    return ToolResult(
        message.ok, message.text, message.true_bytes, message.truncated, message.timed_out, message.seconds
    )


def verify_result_of(message: pb.VerifyReply) -> VerifyResult:
    """A verification's result as a value."""
    return VerifyResult(
        outcomes=tuple(
            TestOutcome(each.name, cast(TestStatus, each.status), each.message) for each in message.outcomes
        ),
        exit=cast(VerifyExit, message.exit),
        log=message.log,
        seconds=message.seconds,
        tampering=tuple(message.tampering),
        backend=message.backend,
        observations=tuple(Observation(each.test, each.key, each.value) for each in message.observations),
    )


def status_of(message: pb.SandboxState) -> SandboxStatus:
    """A sandbox's state as a value."""
    return SandboxStatus(
        id=message.sandbox_id,
        state=cast(Any, message.state),
        backend=message.backend,
        template=message.template,
        age_s=message.age_s,
        expires_in_s=message.expires_in_s,
        memory_bytes=message.memory_bytes,
        pids=message.pids,
        cpu_s=message.cpu_s,
        labels=dict(message.labels),
        host_name=message.host_name,
        lost=tuple(message.lost),
    )
