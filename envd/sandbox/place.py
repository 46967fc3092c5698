"""Directories and initial state of processes in a sandbox."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from envd.sandbox.python_inside import bin_directory


@dataclass(frozen=True)
class Place:
    """Directories of one sandbox, as its processes see them."""

    workspace: Path
    template: Path
    scratch: Path
    """A directory outside the workspace for private pipes."""


def prepare_process(env: dict[str, str]) -> None:
    """Set this process to a sandbox's initial state: umask, environment, standard streams."""
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)


def sandbox_environment(home: str, python: str | None = None) -> dict[str, str]:
    """Environment of a sandbox's processes, without the server's own.

    python: directory of Python's programs; None: the directory that sandboxes see.
    """
    python = python or bin_directory()
    return {
        "PATH": f"{python}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TERM": "dumb",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
