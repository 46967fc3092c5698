"""Key files of HTTP services. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from contracts.errors import ConfigError

_MIN_KEY = 16
"""Fewest characters of a key."""


def read_keys(path: Path) -> tuple[str, ...]:
    """Keys of a file, one a line. Raises ConfigError."""
    try:
        keys = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(f"key file {path} can't be read ({error.strerror}): check its path and rights") from None
    if not keys or min(len(key) for key in keys) < _MIN_KEY:
        raise ConfigError(f"key file {path} must hold keys of at least {_MIN_KEY} characters, one a line")
    return keys
