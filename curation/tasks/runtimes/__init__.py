"""Runtimes: the packages that a repository and its tests need, as an artifact that sandboxes see instead of envd's own.

    metadata.read_project(tree) -> Project -> resolving.resolve, or lock_installed -> Lock
        -> building.build_runtime -> artifact `runtime`, whose packages.tar is named in tasks by its SHA-256

Nothing of a repository is executed: metadata is parsed, and packages come as wheels. Needs `uv`, and an index or a
folder of wheels. May import: contracts, curation.errors.
"""

from curation.tasks.runtimes.building import build_runtime
from curation.tasks.runtimes.images import build_image
from curation.tasks.runtimes.metadata import Project, read_project
from curation.tasks.runtimes.resolving import Lock, lock_installed, resolve

__all__ = ["Lock", "Project", "build_image", "build_runtime", "lock_installed", "read_project", "resolve"]
