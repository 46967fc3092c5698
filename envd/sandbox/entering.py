"""The way of a process that a zygote has forked into its sandbox: everything that it does before it serves anybody."""

from __future__ import annotations

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
from envd.sandbox.syscalls import filter_calls
from envd.tools.paths import WORKSPACE


def enter_namespaces(request: dict[str, Any], *, owner: int, supervised: bool, system: Iterable[str]) -> Place:
    """As process 1 of new namespaces whose users are mapped: see the template, keep no privilege. Raises OSError.

    owner: the host's user that its root is. supervised: go on as the sandbox's supervisor instead of its root. system:
    its system directories.
    """
    linux.unshare(linux.CLONE_NEWCGROUP)  # its groups' place on the host is nobody's business
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if owner == linux.SANDBOX_USER:
        os.setgroups([])
    socket.sethostname("sandbox")
    rootfs.enter(request["template"], request["disk"], system)
    linux.raise_loopback()
    if supervised:
        linux.become_supervisor()
    else:
        linux.drop_capabilities()
    linux.no_new_privileges()
    restrict_files()
    filter_calls()
    linux.hide_from_ptrace()
    prepare_process(sandbox_environment("/tmp"))
    scratch = Path("/tmp/.envd")
    scratch.mkdir(mode=0o700)
    os.chdir(WORKSPACE)
    return Place(Path(WORKSPACE), Path(rootfs.INSIDE_TEMPLATE), scratch)


def enter_copy(request: dict[str, Any], run_dir: Path) -> Place:
    """Without namespaces: a session of its own in a copy of the template. Raises OSError."""
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
    """Close every descriptor but the standard ones and this one: the others are the zygote's."""
    os.closerange(3, keep)
    os.closerange(keep + 1, 65536)
