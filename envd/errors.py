"""Errors of the environment plane."""

from contracts.errors import TriplaneError


class EnvdError(TriplaneError):
    """Any failure of the environment plane that is not a tool's own answer."""


class TemplateError(EnvdError):
    """A template that can't be stored, or that the server does not have."""


class SandboxGone(EnvdError):
    """The sandbox does not exist any more: finished, crashed, or past its lifetime."""


class SandboxStartError(EnvdError):
    """A sandbox could not be started."""


class ServerBusy(EnvdError):
    """Others' verifications had every slot for as long as this one could wait. Its place in the line costs nothing: ask again."""


class ServerUnavailable(EnvdError):
    """The envd server can't be reached, or did not answer in time."""


class BackendUnavailable(EnvdError):
    """A backend that was asked for does not work on this machine."""
