"""Convert errors, also those of Dagster, its database and the system, to one line with the fix."""

from __future__ import annotations

import os
from collections.abc import Iterator

from contracts.errors import REFUSALS, TriplaneError, describe

_HOME = "DAGSTER_HOME"


def line_of(error: BaseException) -> str | None:
    """One-line message for `error` or its causes; None for an internal fault, which is shown with its traceback."""
    chain = list(_causes(error))
    ours = next((each for each in chain if isinstance(each, TriplaneError)), None)
    if ours is not None:
        return " ".join(str(ours).split())
    for each in chain:
        line = describe(each) if isinstance(each, OSError) and each.errno in REFUSALS else _of_dagster(each)
        if line is not None:
            return line
        if isinstance(each, UnicodeEncodeError) and "surrogates" in each.reason:  # of bytes that are not UTF-8
            return f"{each.object!r:.200} is not UTF-8: write it so, or rename the file"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Iterate over `error` and the errors it was raised from, since Dagster wraps errors of steps."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _of_dagster(error: BaseException) -> str | None:
    """Message for errors of Dagster's records, with their location."""
    module, name = type(error).__module__.partition(".")[0], type(error).__name__
    said = " ".join(str(getattr(error, "orig", None) or error).split())[:300]
    if module == "sqlalchemy":
        where = f"{_HOME}={os.environ[_HOME]}" if os.environ.get(_HOME) else "the dagster.yaml here"
        scratch = os.environ.get("TMPDIR") or "/tmp"
        return (
            f"Dagster's records, located by {where}, can't be used ({said}): free some space there and in {scratch},"
            f" make them writable, or point {_HOME} elsewhere, then run the same command again"
        )
    if name == "DagsterInvariantViolationError" and _HOME in said:
        return f"{said.rstrip('.')}. Or unset {_HOME}: the records are then kept in .triplane/dagster"
    if name in ("DagsterInvalidConfigError", "ParserError", "ScannerError") and module in ("dagster", "yaml"):
        return f"dagster.yaml is not valid ({said}): correct it, or set {_HOME} to another folder"
    return None
