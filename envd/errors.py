"""Errors of the environment plane. A server names the class beside the gRPC status, so that its client raises the same
one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from contracts.errors import ConfigError, TriplaneError


class EnvdError(TriplaneError):
    """Any failure of the environment plane that is not a tool's own answer."""


class TemplateError(EnvdError):
    """A template that can't be stored, or that the server does not have."""


class RuntimeMissing(TemplateError):
    """A runtime that the server does not have."""


class BaseMissing(TemplateError):
    """A template to derive from that the server does not have."""


class SandboxGone(EnvdError):
    """The sandbox does not exist any more: finished, crashed, or past its lifetime."""


class SandboxUnknown(SandboxGone):
    """This server does not know the sandbox: it was restarted since, ended long ago, or the id is wrong."""


class SandboxStartError(EnvdError):
    """A sandbox could not be started."""


class QuotaExceeded(EnvdError):
    """The clients of this key hold as much as they may: templates, sandboxes or memory."""


class WrongState(EnvdError):
    """The sandbox is paused, hibernated or just being moved, so the call has to wait for another one."""


class Unsupported(EnvdError):
    """The sandbox's backend can't do this."""


class RulesDenied(EnvdError):
    """The sandbox rules do not allow it."""


class AccessDenied(EnvdError):
    """The server asks for a key, and got none or another."""


class IdempotencyError(EnvdError):
    """An idempotency key that was used for another request, or whose answer is too large to be kept."""


class FileError(EnvdError):
    """A file operation failed as the system call would. `errno` is the system's number."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.errno = number

    @classmethod
    def of(cls, number: int, path: str) -> FileError:
        """The error that a system call gave for a path."""
        name = errno.errorcode.get(number, str(number))
        return cls(f"{path[:200]}: {os.strerror(number).lower()} ({name})", number)


class MigrationError(EnvdError):
    """A sandbox could not be moved. It runs on where it was."""


class ServerBusy(EnvdError):
    """Others' verifications, or moves, have every place for as long as this one could wait.

    Nothing came of it: ask again.
    """


class ServerUnavailable(EnvdError):
    """The envd server can't be reached, or did not answer in time."""


class ServerLost(ServerUnavailable):
    """The connection to a server broke, or one server of several was lost. Never the fault of what ran in its
    sandboxes.
    """


class ServerDraining(EnvdError):
    """The server ends soon and takes nothing new."""


class BackendUnavailable(EnvdError):
    """A backend that was asked for does not work on this machine."""


@contextmanager
def as_envd_error() -> Iterator[None]:
    """Turn a ConfigError of `contracts.rpc` into an EnvdError with the same words; also a decorator."""
    try:
        yield
    except ConfigError as error:
        raise EnvdError(str(error)) from error
