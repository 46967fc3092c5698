"""Errors for users: one line with the thing and the fix."""

from __future__ import annotations

import errno
import os

REFUSALS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "make it writable, or use another place",
    errno.EACCES: "fix its permissions",
    errno.EPERM: "fix its permissions",
    errno.EIO: "check its disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "end some processes",
    errno.ENOMEM: "free some memory",
    errno.ENAMETOOLONG: "shorten it",
    errno.ELOOP: "remove a link of the loop",
}
"""Fixes for system errors that the program can't prevent, by errno."""


class TriplaneError(Exception):
    """Base class of the project's errors.

    Its message names the thing and, after a colon or a dash, the fix.
    """


class ConfigError(TriplaneError):
    """A configuration value is unknown, out of bounds or contradicts another."""


class StoreError(TriplaneError):
    """The artifact store can't be reached, is full, or refuses an operation."""


class StoreUnreachable(StoreError):
    """The artifact store does not reply, or replies that it is overloaded. A later attempt may succeed."""


class ArtifactMissing(StoreError):
    """No committed artifact has this key or digest."""


class ArtifactCorrupt(StoreError):
    """A committed artifact's bytes do not match its manifest."""


class SchemaError(TriplaneError):
    """A table, checkpoint or message does not follow its schema."""


class InfraFault(TriplaneError):
    """An engine, a sandbox, a judge or their server failed, not the policy. Retried, never scored."""


class NameUnresolved(InfraFault):
    """A DNS name of servers has no address at the moment."""


def first_error(error: BaseException) -> BaseException:
    """The first error of nested groups; another error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: OSError) -> str:
    """One line for an unexpected system error: the failure, the thing, and the fix."""
    said = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    what = f"{error.filename}: {said}" if error.filename else " ".join(str(error).split()) or said
    return f"{what}: {REFUSALS.get(error.errno or 0, 'check it')}, then run the same command again"
