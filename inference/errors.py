"""Errors of the inference plane."""

from __future__ import annotations

from contracts.errors import InfraFault, TriplaneError


class InferenceError(TriplaneError):
    """Base class of errors of the inference plane."""


class EngineError(InferenceError):
    """An engine can't load a policy, can't accept a request, or has stopped."""


class OtherArchitecture(EngineError):
    """A policy's weights have other shapes than the served policy's; open another engine for it."""


class RequestTooLong(EngineError):
    """A prompt, alone or with the requested tokens, exceeds the policy's context."""


class EngineStopped(EngineError):
    """The engine was closed or has failed; open another one."""


class EngineUnreachable(EngineError):
    """A remote engine did not answer within its deadline and retries."""


class Withdrawn(EngineError):
    """A server was taken out of service because it can't serve the live policy."""


class NoPolicyYet(EngineError):
    """A server has no policy yet: no policy of its experiment is live."""


class StaleVersion(EngineError):
    """A remote engine serves a policy version other than the expected one."""


class WeightsDiffer(EngineError):
    """A server's weights or results differ from the given checkpoint."""


class RolloutError(InferenceError):
    """An iteration's episodes can't be sampled or merged."""


class PlanError(RolloutError):
    """A rollout plan names a shard, a task or a prompt that does not exist."""


class GroupsMissing(RolloutError):
    """A merge was requested before every expected group was committed."""


class ReplayDiffers(InfraFault):
    """The calls of an unfinished episode are not answered as they were, so it can't be continued."""


class SandboxBroken(InfraFault):
    """A sandbox failed while an agent used it.

    A control shows whether the agent broke it; see `inference.rollouts.blame`.
    """


class BadRequest(InferenceError):
    """A request to the server is contradictory, or the policy does not support it."""


class BodyTooLong(BadRequest):
    """The body of a request is longer than the server reads."""


class NotJson(BadRequest):
    """The body of a request is not declared as JSON."""


class RouterError(InferenceError):
    """A router's settings, an engine's cache event or a request contradict what the router knows."""


class FleetError(InferenceError):
    """A fleet refuses a join, a drain or an update, or has no replica for a request."""
