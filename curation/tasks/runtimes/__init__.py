"""Runtimes: the packages that a repository and its tests need, as an artifact that sandboxes see instead of envd's own.

    metadata.read_project(tree) -> Project -> resolving.resolve -> Lock -> building.build_runtime -> artifact `runtime`
                                                                                 |
    packages.tar, its SHA-256 is the runtime's digest in tasks <-----------------'

Nothing of a repository is executed: metadata is parsed, and packages come as wheels. Needs `uv`, and an index or a
folder of wheels. May import: contracts, curation.errors.
"""

from curation.tasks.runtimes.building import build_runtime
from curation.tasks.runtimes.metadata import Project, read_project
from curation.tasks.runtimes.resolving import Lock, resolve

__all__ = ["Lock", "Project", "build_runtime", "read_project", "resolve"]
