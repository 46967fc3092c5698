"""Resolve a repository's requirements to packages locked by hash, with uv."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from pydantic import Field

from contracts.artifacts import Frozen
from contracts.digests import action_key, sha256
from curation.errors import TaskError
from curation.tasks.runtimes.metadata import Project, read_project

RUNTIME_VERSION = "1"
_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
"""Packages of pytest, in the versions installed here if the requirements allow: tests with these start faster."""
_LEAST_PYTEST = "pytest>=7.4"
"""Oldest pytest that verdicts work with."""
_PATIENCE_S = 900.0


class Lock(Frozen):
    """Packages of a runtime, each locked by the hashes of its distributions."""

    name: str
    """The repository's own distribution, of which the runtime has the metadata only; empty: it has none."""
    version: str
    python: str
    platform: str
    packages: tuple[str, ...]
    """`name==version --hash=sha256:... `, sorted."""
    entry_points: dict[str, dict[str, str]] = Field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Requirements that can't be locked by hash."""
    installed: bool = False
    """Whether the packages are copied from this Python environment; each hash is then that of the distribution's RECORD
    file.
    """

    @property
    def key(self) -> str:
        """Action key of the runtime."""
        return action_key("runtime", {}, self.settings, RUNTIME_VERSION)

    @property
    def settings(self) -> dict[str, Any]:
        """What makes the runtime."""
        return self.model_dump(mode="json", exclude=None if self.installed else {"installed"})


def resolve(
    source: Mapping[str, bytes] | Project,
    *,
    index: str | None = None,
    wheelhouse: Path | None = None,
    requirements: Sequence[str] = (),
) -> Lock:
    """Lock the packages that a repository and its tests need, always with a pytest.

    source: the repository's files by path, or what was read of them. index: URL of a package index; None: uv's.
    wheelhouse: folder of wheels, used instead. requirements: further ones. Raises TaskError, in one line, naming what
    is missing.
    """
    project = source if isinstance(source, Project) else read_project(source)
    if canonicalize_name(project.name) in _PYTEST:
        raise TaskError(f"it is {project.name}, which pytest itself needs: its tests can't be judged by pytest")
    with tempfile.TemporaryDirectory(prefix="runtime-") as scratch:
        wanted, locked = Path(scratch, "requirements.in"), Path(scratch, "requirements.txt")
        lines = [*project.requirements, *requirements, _LEAST_PYTEST]
        wanted.write_text("".join(f"{each}\n" for each in lines), encoding="utf-8")
        locked.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in _PYTEST))  # preferred versions
        own = ["--no-emit-package", project.name] if project.name else []
        flags = ["--generate-hashes", "--no-header", "--no-annotate", "--no-sources", *own]
        command = ["pip", "compile", str(wanted), "-o", str(locked), *flags]
        uv(command, scratch, index, wheelhouse, "its packages can't be resolved")
        lines = locked.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    packages = tuple(sorted(" ".join(line.split()) for line in lines if line and not line.startswith("#")))
    return Lock(**_about(project), packages=packages, left_out=tuple(project.left_out))


def lock_installed(project: Project) -> Lock:
    """Lock pytest and coverage as they are installed here, for a repository that needs nothing else.

    No index is asked.
    """
    packages = []
    for name in (*_PYTEST, "coverage"):
        found = metadata.distribution(name)
        record = sha256((found.read_text("RECORD") or "").encode())
        packages.append(f"{name}=={found.version} --hash=sha256:{record}")
    return Lock(**_about(project), packages=tuple(sorted(packages)), installed=True)


def _about(project: Project) -> dict[str, Any]:
    return {
        "name": project.name,
        "version": project.version,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": sysconfig.get_platform(),
        "entry_points": project.entry_points,
    }


def uv(
    command: Iterable[str | Path], directory: str | Path, index: str | None, wheelhouse: Path | None, what: str
) -> None:
    """Run uv, on wheels only, outside of any project. Raises TaskError, `what` with uv's reason in one line."""
    from uv import find_uv_bin

    where: list[str | Path] = [] if index is None else ["--default-index", index]
    if wheelhouse is not None:
        where = ["--no-index", "--offline", "--find-links", wheelhouse.resolve()]
    if wheelhouse is not None and not wheelhouse.is_dir():
        raise TaskError(
            f"the wheelhouse {wheelhouse} is not a folder: fill one with `pip download -d {wheelhouse} ...`"
        )
    flags = ["--only-binary", ":all:", "--python", sys.executable, "--quiet", "--no-progress", "--color", "never"]
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(
            [find_uv_bin(), *command, *flags, *where],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TaskError(f"{what}: uv did not end within {_PATIENCE_S:g} s; check the package index") from None
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("error: ")
        raise TaskError(f"{what}: {said[:600]} {_fix(said, wheelhouse)}")


def _fix(said: str, wheelhouse: Path | None) -> str:
    if "wheels" in said and "not found" not in said:
        return (
            "(packages are not built from source, and a C extension needs a compiler: build a wheel with `pip wheel`,"
            " and give its folder as --wheelhouse)"
        )
    if "Hash mismatch" in said:
        return "(that is not the package that was locked: find out why, or lock the packages anew)"
    if wheelhouse is not None:
        return f"(put the wheel into {wheelhouse}, or leave --wheelhouse out to use an index)"
    return (
        "(check the requirement and the index, which uv takes from UV_INDEX_URL or uv.toml; offline give --wheelhouse)"
    )
