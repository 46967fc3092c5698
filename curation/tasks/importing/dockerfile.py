"""The part of a Dockerfile that runs here without Docker: Python, files, git, pytest. Everything else is refused,
unless the task names a runtime: then only the files count.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from posixpath import normpath

from curation.errors import TaskError
from curation.tasks.importing.trees import Tree

_IGNORED = frozenset({"CMD", "EXPOSE", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL"})
_BUILT = frozenset({"ARG", "ENTRYPOINT", "ENV", "FROM", "HEALTHCHECK", "RUN", "USER", "VOLUME"})
"""Instructions whose result a task's runtime has."""
_VARIABLES = frozenset(
    {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTEST_ADDOPTS", "PIP_NO_CACHE_DIR"}
)
_NAME_IT = "name its image as the task's runtime (docs/tasks.md#images), or use Harbor"
_SYSTEM = frozenset({"git", "patch", "ca-certificates", "bash"})
"""System packages that every sandbox has, or that tests don't need."""
_GIT = frozenset({"init", "add", "commit", "config", "-c", "branch"})
_PYTHON = re.compile(r"(docker\.io/)?(library/)?python:3[\w.-]*")


@dataclass(frozen=True)
class Image:
    """What a Dockerfile makes."""

    workdir: str
    copies: tuple[tuple[tuple[str, ...], str], ...]
    """Sources, relative to the folder of the Dockerfile, and absolute destination of each COPY."""
    packages: tuple[str, ...]
    """Requirements that pip installs."""

    def tree(self, context: Tree) -> Tree:
        """Files below the working directory. context: the Dockerfile's folder. Raises TaskError."""
        found: Tree = {}
        for sources, destination in self.copies:
            for source in sources:
                copied = _copied(context, source, destination, several=len(sources) > 1)
                if not copied:
                    raise TaskError(f"its Dockerfile copies {source}, which is not there: add it to environment/")
                for path, data in copied.items():
                    if not path.startswith(f"{self.workdir}/"):
                        raise TaskError(
                            f"its Dockerfile copies {source} to {path}, outside its WORKDIR {self.workdir}: an agent"
                            " here gets the files of one folder only"
                        )
                    found[path.removeprefix(f"{self.workdir}/")] = data
        return found


def read_dockerfile(text: str, workdir: str | None = None, *, built: bool = False) -> Image:
    """Image of a Dockerfile. workdir: replaces its WORKDIR. built: the task names a runtime, such as this very image.

    Raises TaskError that names what can't be done here.
    """
    where, based = "/", built
    copies: list[tuple[tuple[str, ...], str]] = []
    packages: list[str] = []
    for instruction, rest in _instructions(text):
        match instruction:
            case _ if built and instruction in _BUILT:
                pass
            case "FROM" if not based and _PYTHON.fullmatch(rest.strip()):
                based = True
            case "WORKDIR":
                where = normpath(PurePosixPath(where, rest.strip().strip('"')))
            case "COPY" if not rest.lstrip().startswith(("--", "[")) and (words := _words(instruction, rest)):
                *sources, target = words
                slash = "/" if target.endswith(("/", ".")) else ""
                copies.append((tuple(sources), normpath(PurePosixPath(where, target)).rstrip("/") + slash))
            case "RUN":
                packages += _run(rest)
            case "ENV" if rest.replace("=", " ").split(" ", 1)[0] in _VARIABLES:
                pass
            case "USER" if rest.strip() == "root":
                pass
            case _ if instruction in _IGNORED:
                pass
            case _:
                raise TaskError(_refused(f"{instruction} {rest}"))
    if not based:
        raise TaskError(f"its Dockerfile has no FROM python:3...: {_NAME_IT}")
    return Image(normpath(workdir or where).rstrip("/"), tuple(copies), tuple(packages))


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").split("\n"):
        if line.strip():
            instruction, _, rest = line.strip().partition(" ")
            yield instruction.upper(), rest


def _run(command: str) -> Iterator[str]:
    """Requirements that a RUN installs; raises TaskError for commands without a counterpart here."""
    for part in re.split(r"&&|;|\n", command):
        words = _words("RUN", part)
        if words[:1] == ["python"] or words[:1] == ["python3"]:
            words = words[2:] if words[1:2] == ["-m"] else words
        plain = [word for word in words if not word.startswith("-")]
        match plain:
            case []:
                pass
            case ["apt-get", "update"] | ["apt-get", "clean"]:
                pass
            case ["apt-get", "install", *names] if set(names) <= _SYSTEM:
                pass
            case ["rm", path] if path.startswith("/var/lib/apt/lists"):
                pass
            case ["mkdir", *_]:
                pass
            case ["git", *_] if words[1:2] and words[1] in _GIT:
                pass
            case ["pip" | "pip3", "install", *names] if names and not {"-r", "-e", "--editable"} & set(words):
                yield from names
            case ["uv", "pip", "install", *names] if names and not {"-r", "-e", "--editable"} & set(words):
                yield from names
            case _:
                raise TaskError(_refused(f"RUN {part.strip()}"))


def _words(instruction: str, rest: str) -> list[str]:
    try:
        return shlex.split(rest)
    except ValueError:
        raise TaskError(_refused(f"{instruction} {rest}")) from None


def _refused(what: str) -> str:
    said = " ".join(what.split())
    return f"its Dockerfile says `{said:.120}`, a build step that has no counterpart here: {_NAME_IT}"


def _copied(context: Tree, source: str, destination: str, *, several: bool) -> Tree:
    """Copied files by absolute path, as COPY places them."""
    name = source.strip("/").removeprefix("./")
    if name in context:
        into = destination.endswith("/") or several
        place = f"{destination.rstrip('/')}/{name.rsplit('/', 1)[-1]}" if into else destination
        return {place: context[name]}
    prefix = "" if name in ("", ".") else f"{name}/"
    return {
        f"{destination.rstrip('/')}/{path.removeprefix(prefix)}": data
        for path, data in context.items()
        if path.startswith(prefix) and (prefix or path != "Dockerfile")
    }
