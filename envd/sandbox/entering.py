"""Steps by which a process that a zygote has forked enters its sandbox, before it serves requests."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from envd.sandbox import linux, rootfs
from envd.sandbox.landlock import restrict_files
from envd.sandbox.place import Place, prepare_process, sandbox_environment
from envd.sandbox.python_inside import inside, package_places
from envd.sandbox.syscalls import filter_calls
from envd.tools.paths import WORKSPACE

PYTEST_MODULES = frozenset({"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"})


def enter_namespaces(request: dict[str, Any], *, owner: int, supervised: bool, system: Iterable[str]) -> Place:
    """Enter a sandbox with namespaces: mount its file system and drop all privileges. Raises OSError.

    Called in process 1 of the new namespaces, after its users are mapped. owner: host uid of the sandbox's root.
    supervised: continue as the sandbox's supervisor instead of its root. system: the sandbox's system directories.
    """
    linux.unshare(linux.CLONE_NEWCGROUP)  # hides the path of its groups on the host
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if owner == linux.SANDBOX_USER:
        os.setgroups([])
    socket.sethostname("sandbox")
    rootfs.enter(request["template"], request["disk"], system, request["runtime"], own_root=request["root"])
    linux.raise_loopback()
    if supervised:
        linux.become_supervisor(lasting=bool(request["cold"]))
    else:
        linux.drop_capabilities()
    linux.no_new_privileges()
    restrict_files()
    filter_calls()
    linux.hide_from_ptrace()
    prepare_process({**sandbox_environment("/tmp"), **request["env"]})
    scratch = Path("/tmp/.envd")
    scratch.mkdir(mode=0o700)
    os.chdir(WORKSPACE)
    if request["runtime"] and not request["root"]:
        _forget_packages()
    return Place(Path(WORKSPACE), Path(rootfs.INSIDE_TEMPLATE), scratch)


def _forget_packages() -> None:
    """Forget the modules of this host's packages, in whose place a runtime is, except pytest's, which it has too."""
    above = tuple(f"{each}/" for each in package_places())
    for name, module in list(sys.modules.items()):
        file = inside(getattr(module, "__file__", None) or "")
        if file.startswith(above) and name.partition(".")[0] not in PYTEST_MODULES:
            del sys.modules[name]
    importlib.invalidate_caches()


def enter_copy(request: dict[str, Any], run_dir: Path) -> Place:
    """Enter a sandbox without namespaces: a new session in a copy of the template. Raises OSError."""
    template = run_dir / "templates" / request["template"]
    if not template.is_dir():
        raise FileNotFoundError(f"no template {request['template']}")
    box = run_dir / "boxes" / request["id"]
    workspace, scratch = box / "workspace", box / "scratch"
    shutil.copytree(template, workspace, symlinks=True)
    scratch.mkdir()
    (box / "tmp").mkdir()
    os.setsid()
    linux.adopt_orphans()
    prepare_process(sandbox_environment(str(box / "tmp"), str(Path(sys.prefix) / "bin")))
    os.chdir(workspace)
    return Place(workspace, template, scratch)


def close_all_but(keep: int) -> None:
    """Close all descriptors, which are the zygote's, except the standard ones and `keep`."""
    os.closerange(3, keep)
    os.closerange(keep + 1, 65536)
