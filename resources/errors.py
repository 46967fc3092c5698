"""What can go wrong around a step, in words that name the fix."""

from __future__ import annotations

from contracts.errors import ConfigError, TriplaneError


class ExperimentError(ConfigError):
    """An experiment file is malformed, or an override names no field."""


class NotMaterialized(TriplaneError):
    """A step needs an asset that was never produced in this store."""


class LaunchFailed(TriplaneError):
    """A launched process ended without its result."""


class EvaluationIncomplete(TriplaneError):
    """An evaluation lost too many episodes to infrastructure to say anything about a policy."""


class RegistryError(TriplaneError):
    """The registry holds no such policy, or a name for several."""


class AlreadyLive(RegistryError):
    """A rollback was asked for to the policy that is live."""


class DeploymentFailed(TriplaneError):
    """A candidate could not be tried, for no fault of its own."""


class CheckFailed(TriplaneError):
    """A blocking check found an asset unfit for what comes after it."""


class StepFailed(TriplaneError):
    """A run in this process failed without an error of its own."""
