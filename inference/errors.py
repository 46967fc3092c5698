"""Errors of the inference plane."""

from __future__ import annotations

from contracts.errors import InfraFault, TriplaneError


class InferenceError(TriplaneError):
    """Base of what the inference plane raises on purpose."""


class EngineError(InferenceError):
    """An engine can't load a policy, can't take a request, or has stopped."""


class RequestTooLong(EngineError):
    """A prompt, alone or with the tokens asked for, exceeds the policy's context."""


class EngineStopped(EngineError):
    """The engine was closed or has failed; open another one."""


class EngineUnreachable(EngineError):
    """A remote engine did not answer within its deadline and retries."""


class Withdrawn(EngineError):
    """A server was taken out of service: it can't serve the policy that is live."""


class StaleVersion(EngineError):
    """A remote engine serves another policy version than the caller expects."""


class WeightsDiffer(EngineError):
    """A server holds, or computes with, other weights than the checkpoint it was given."""


class RolloutError(InferenceError):
    """An iteration's episodes can't be sampled or merged."""


class PlanError(RolloutError):
    """A rollout plan asks for what does not exist: a shard, a task, a prompt."""


class GroupsMissing(RolloutError):
    """A merge was asked for before every expected group was committed."""


class SandboxBroken(InfraFault):
    """A sandbox failed while an agent used it.

    Whether the agent broke it, a control tells: see `inference.rollouts.blame`.
    """


class BadRequest(InferenceError):
    """A request to the server contradicts itself or asks for what the policy can't do."""
