"""Prints what pyproject.toml depends on, with the extras named on the command line: an image installs it before it
copies the code.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def dependencies(extras: list[str]) -> list[str]:
    """Requirements in pip's form. Raises KeyError for an extra that does not exist."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    print("\n".join(dependencies(sys.argv[1:])))
