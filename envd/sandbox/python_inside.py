"""Paths inside sandboxes of the Python that runs envd and of its packages.

The paths are those of the host, unless a sandbox's own directories cover them, such as /tmp for a checkout below /tmp.
Then the directories are visible below /.python:

/.python/0 ...           the directories themselves, read-only
/.python/pyvenv.cfg      a virtual environment with the same packages
/.python/bin             its programs; scripts of the covered interpreter are copies that name the visible interpreter
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

from envd.tools.paths import WORKSPACE

ROOT = "/.python"
_COVERED = ("/tmp", "/var/tmp", "/dev", "/proc", "/sys", "/workspace", "/.template", "/.scratch", "/etc", "/run")
"""Directories that sandboxes have of their own, or lack."""
_MAX_SCRIPT = 1 << 20
_PACKAGES = (
    *(f"lib*/python3*/{name}" for name in ("site-packages", "dist-packages", "ensurepip/_bundled")),
    "share/python-wheels",
)
"""Directories below a prefix that hold packages, as patterns."""
_SOFTWARE, _DEPTH = ("lib", "share", "local/lib", "local/share"), 2
"""Directories below /usr whose own directories are software, and how deep these are searched for packages."""
_LIBRARY = re.compile(r"/usr/(local/)?lib\w*/python3[\w.]*")
"""Python's own modules, whichever Python's."""
_MOST = 250
"""Directories that are mounted over, at most (envd/native/spawn.h allows 256): of others, the deepest stay visible."""
_NAMES = frozenset({"site-packages", "dist-packages", "third_party", "_vendor"})


@functools.cache
def python_directories() -> tuple[str, ...]:
    """Host directories of the running interpreter and its packages, outermost only, outside /usr."""
    wanted = {sys.base_prefix, sys.base_exec_prefix, sys.prefix}
    wanted |= set(_package_directories())
    outside = sorted(path for path in wanted if Path(path).is_dir() and not path.startswith("/usr/"))
    return tuple(path for path in outside if not any(path.startswith(other + "/") for other in outside))


def _package_directories() -> list[str]:
    return [each for each in sys.path if each.endswith(("site-packages", "dist-packages"))]


@functools.cache
def package_places() -> tuple[str, ...]:
    """Directories inside sandboxes of this host's Python packages, that of the running environment first.

    A runtime takes the place of the first, and the others are empty then. They include what contains copies of other
    packages: pip and setuptools, which Python itself brings, and software with packages or modules of its own.
    """
    own = sysconfig.get_path("purelib")
    prefixes = {sys.prefix, sys.base_prefix, sys.base_exec_prefix, "/usr", "/usr/local"}
    found = {
        *_package_directories(),
        *(str(each) for at in prefixes for kind in _PACKAGES for each in Path(at).glob(kind)),
    }
    for place in (Path("/usr", name) for name in _SOFTWARE):
        for each in place.iterdir() if place.is_dir() else ():
            ours = any(f"{prefix}/".startswith(f"{each}/") for prefix in prefixes)
            if not ours and not each.name.startswith("python") and _has_packages(str(each), _DEPTH):
                found.add(str(each))
    library = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    modules = sorted(_with_modules("/usr", found | library), key=lambda each: each.count("/"))
    found.update(modules[: max(0, _MOST - len(found))])
    real = {os.path.realpath(each) for each in found if Path(each).is_dir()} - {os.path.realpath(own)}
    return (inside(own), *(inside(each) for each in sorted(real) if _is_visible(each)))


def _with_modules(directory: str, known: Collection[str]) -> Iterator[str]:
    """Topmost directories that hold Python modules, beside the known ones, Python's own and those of programs."""
    try:
        with os.scandir(directory) as entries:
            below = list(entries)
    except OSError:
        return
    if any(each.name.endswith(".py") for each in below):
        yield directory
        return
    for each in below:
        ours = each.name in ("bin", "sbin") or each.path in known or _LIBRARY.fullmatch(each.path)
        if not ours and each.is_dir(follow_symlinks=False):
            yield from _with_modules(each.path, known)


def _has_packages(directory: str, depth: int) -> bool:
    try:
        with os.scandir(directory) as entries:
            below = [each for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return False
    return any(each.name in _NAMES for each in below) or (
        depth > 0 and any(_has_packages(each.path, depth - 1) for each in below)
    )


def _is_visible(path: str) -> bool:
    return any(path.startswith(f"{each}/") for each in ("/usr", *python_directories()))


def system_directories() -> tuple[str, ...]:
    """Directories of Python's own code and of installed packages, as the host and as sandboxes see them.

    A root file system of a task's own may name further ones in PYTHONPATH.
    """
    named = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each.startswith("/")]
    named = [each for each in named if not f"{each}/".startswith((f"{WORKSPACE}/", "/tmp/"))]
    return (sys.prefix, sys.base_prefix, *python_directories(), *named, ROOT, "/usr")


def inside(path: str) -> str:
    """Path inside a sandbox with its own root of a path of Python on this host."""
    for number, directory in enumerate(python_directories()):
        if _covered(directory) and (path == directory or path.startswith(directory + "/")):
            return f"{ROOT}/{number}{path[len(directory) :]}"
    return path


@functools.cache
def bin_directory() -> str:
    """Directory of Python's programs inside sandboxes with their own root."""
    return f"{ROOT}/bin" if _moved() else str(Path(sys.prefix) / "bin")


def make_environment(base: Path) -> None:
    """Create the virtual environment in the directory of a sandbox's future root, if one is needed."""
    if not _moved():
        return
    root = base / ROOT.lstrip("/")
    (root / "bin").mkdir(parents=True)
    interpreter = inside(os.path.realpath(sys.executable))
    library = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    if sys.prefix != sys.base_prefix:
        text = f"home = {Path(interpreter).parent}\ninclude-system-site-packages = {_with_system_packages()}\n"
        (root / "pyvenv.cfg").write_text(text)
        packages = root / library / "site-packages"
        packages.mkdir(parents=True)
        (packages / "moved.pth").write_text("".join(map(_adding, _package_directories())))
    for entry in sorted(Path(sys.prefix, "bin").iterdir()):
        _make_program(entry, root / "bin" / entry.name, interpreter)


def adopt() -> None:
    """Change this process's import paths, and where its modules say they are, to those that sandboxes see."""
    sys.path[:] = [inside(each) for each in sys.path]
    if _moved():
        sys.executable = f"{bin_directory()}/{Path(sys.executable).name}"
    for module in list(sys.modules.values()):
        where = getattr(module, "__path__", None)
        if isinstance(where, list):
            where[:] = [inside(each) for each in where]
        if isinstance(file := getattr(module, "__file__", None), str):
            module.__file__ = inside(file)


def _make_program(entry: Path, target: Path, interpreter: str) -> None:
    if entry.name.startswith("python"):
        target.symlink_to(interpreter)
        return
    content = entry.read_bytes() if entry.is_file() and entry.stat().st_size <= _MAX_SCRIPT else b""
    if not (content.startswith(b"#!") and os.fsencode(sys.prefix) in content):
        target.symlink_to(inside(str(entry)))
        return
    first, _, rest = content.partition(b"\n")
    if first == b"#!/bin/sh":  # pip's form for interpreters with a long path or one with blanks
        rest = rest.partition(b"\n' '''\n")[2] or rest
    target.write_bytes(b"#!" + os.fsencode(f"{ROOT}/bin/python3") + b"\n" + rest)
    target.chmod(0o755)


def _adding(directory: str) -> str:
    """A line of a .pth file that adds a directory and the entries of the directory's own .pth files."""
    return f"import site; site.addsitedir({inside(directory)!a})\n"


def _moved() -> bool:
    return any(_covered(each) for each in (sys.prefix, sys.base_prefix))


def _covered(path: str) -> bool:
    return any(path == each or path.startswith(each + "/") for each in _COVERED)


def _with_system_packages() -> str:
    try:
        lines = Path(sys.prefix, "pyvenv.cfg").read_text().lower().split("\n")
    except OSError:
        return "false"
    return "true" if any(line.replace(" ", "") == "include-system-site-packages=true" for line in lines) else "false"
