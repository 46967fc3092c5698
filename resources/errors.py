"""Errors of assets and their resources; each message names the fix."""

from __future__ import annotations

from contracts.errors import ConfigError, TriplaneError


class ExperimentError(ConfigError):
    """An experiment file is malformed, or an override names no field."""


class NotMaterialized(TriplaneError):
    """A step needs an asset that does not exist in this store."""


class IterationRefused(TriplaneError):
    """A partition key names no iteration that may run, or an iteration can't be taken back."""


class ExperimentBusy(TriplaneError):
    """Another run of the experiment has not ended."""


class TargetRefused(TriplaneError):
    """Iterations can't be asked for, since others are under way or have begun from another policy."""


class LaunchFailed(TriplaneError):
    """A launched process ended without a result."""


class LaunchKilled(LaunchFailed):
    """A launched process was killed by a signal that its launcher did not send."""


class EvaluationIncomplete(TriplaneError):
    """An evaluation lost too many episodes to infrastructure faults to judge a policy."""


class NothingLeft(TriplaneError):
    """Every episode of a dataset is quarantined."""


class RegistryError(TriplaneError):
    """The registry has no such policy, or several that match."""


class AlreadyLive(RegistryError):
    """A rollback names the policy that is already live."""


class DeploymentFailed(TriplaneError):
    """A candidate could not be tried, for a reason outside the candidate."""


class ImpossibleCompletion(TriplaneError):
    """A server of a policy gave a completion that no healthy engine of it can give."""


class CheckFailed(TriplaneError):
    """A blocking check found that an asset can't be used by later steps."""


class StepFailed(TriplaneError):
    """A run in this process failed without one of our errors."""
