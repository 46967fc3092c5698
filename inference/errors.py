"""Errors of the inference plane."""

from __future__ import annotations

from contracts.errors import TriplaneError


class InferenceError(TriplaneError):
    """Base of what the inference plane raises on purpose."""


class EngineError(InferenceError):
    """An engine can't load a policy, can't take a request, or has stopped."""


class RequestTooLong(EngineError):
    """A prompt, alone or with the tokens asked for, exceeds the policy's context."""


class EngineUnreachable(EngineError):
    """A remote engine did not answer within its deadline and retries."""


class StaleVersion(EngineError):
    """A remote engine serves another policy version than the caller expects."""
