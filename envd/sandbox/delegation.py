"""Move the server into a subgroup on cgroup v2, where a group has either processes or groups with limits, not both.

    <the server's group> -> beside-sandboxes     the server and all that it starts, moved there by `make_room`
                         -> envd-...             sandboxes

Only three kinds of groups are changed: one where the server is alone, one that systemd delegated (`Delegate=yes`), and
a container's own root.
"""

from __future__ import annotations

import os
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
LEAF = "beside-sandboxes"
_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_DELEGATED = ("user.delegate", "trusted.delegate")
"""Extended attributes by which systemd marks a delegated group. Source: systemd, docs/CGROUP_DELEGATION.md."""
_ROUNDS = 5
"""Maximum number of rounds of moves: a process that starts another while it is moved needs one more round."""


def make_room() -> None:
    """Move this process's group into a subgroup, so that sibling groups can have limits. Call before starting anything.

    Does nothing if v2 lacks the controllers or the group is of another kind than those above.
    """
    own = own_group(raw=True)
    if own is None or own.name == LEAF or not os.access(own, os.W_OK):
        return
    if not {*CONTROLLERS} <= {*_words(own / "cgroup.controllers")} or enable(own):
        return
    if {*_words(own / "cgroup.procs")} != {str(os.getpid())} and not _is_delegated(own):
        return
    leaf = own / LEAF
    try:
        leaf.mkdir(exist_ok=True)
        for _ in range(_ROUNDS):
            _move(own, leaf)
            if enable(own):
                return
        _move(leaf, own)
        leaf.rmdir()
    except OSError:
        return  # `Info` reports which limits are enforced


def own_group(*, raw: bool = False) -> Path | None:
    """Directory of this process's v2 group, or unless `raw`, of the group that `make_room` moved the process from.

    None without v2.
    """
    mount = next((each for each in _MOUNTS if (each / "cgroup.controllers").exists()), None)
    path = _own_path()
    if mount is None or path is None:
        return None
    own = mount / path.lstrip("/")
    return own.parent if own.name == LEAF and not raw else own


def enable(group: Path) -> bool:
    """Enable limits for the subgroups of a group.

    Returns False if the kernel refuses: the group has processes, or lacks the controllers.
    """
    try:
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{each}" for each in CONTROLLERS))
    except OSError:
        return False
    return True


def _move(source: Path, target: Path) -> None:
    for pid in _words(source / "cgroup.procs"):
        try:
            (target / "cgroup.procs").write_text(pid)
        except ProcessLookupError:
            continue


def _is_delegated(group: Path) -> bool:
    for name in _DELEGATED:
        try:
            if os.getxattr(group, name) == b"1":
                return True
        except OSError:
            continue
    return _own_path() == "/"  # root of a cgroup namespace: the machine's own root has no such restriction


def _own_path() -> str | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), None)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
