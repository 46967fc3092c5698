"""OCI bundle of a gVisor sandbox: the program that `runsc` runs, and its file system and limits.

/            the server's base (envd/sandbox/rootfs.py), or a runtime that is a whole root, read-only
packages     a runtime's in place of the server's, whose other directories are empty then
/.template   the pristine workspace, read-only
/workspace   overlay inside the sandbox: the template below, a size-limited tmpfs above
/tmp         on the same tmpfs
/dev, /proc  gVisor's own

The sandbox's root owns nothing on the host. Process 1 mounts the workspace, drops every capability and becomes the
agent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from envd.backends.base import BoxSpec
from envd.backends.gvisor.stage import AGENT_DIRECTORY
from envd.sandbox import linux, rootfs
from envd.sandbox.place import sandbox_environment
from envd.sandbox.python_inside import package_places
from envd.tools.paths import WORKSPACE

_SCRATCH = "/.scratch"
_MIB = 1024 * 1024
_FILES = 4096
"""Maximum number of open descriptors per process."""
_MOUNTING = ("CAP_SYS_ADMIN", "CAP_SETPCAP", "CAP_CHOWN")
_SUPERVISING = ("CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID")
"""Capabilities, over the sandbox's own kernel, by which a verifier becomes another user than the tests. Sandboxes of
agents do not get them.
"""
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount", "user")
AGENT = f"{AGENT_DIRECTORY}/envd-guest"
_PROCESS_1 = (
    *(AGENT, "--stdio", "--escaped", "--workspace", str(WORKSPACE), "--scratch", "/tmp/.envd"),
    *("--template", rootfs.INSIDE_TEMPLATE, "--disk", _SCRATCH),
)
"""Command line of process 1, which mounts the workspace first. Its capabilities until then apply to the sandbox's own
kernel only.
"""


def write_bundle(directory: Path, spec: BoxSpec, *, base: str, template: str, agent: str, runtime: str = "") -> None:
    """Write `config.json` into a fresh directory.

    base, template, agent, runtime: directories that gofers can reach: the root, the template, that of the program
    envd-guest, and the files of `spec.runtime`.
    """
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(_config(spec, base, template, agent, runtime)))


def _config(spec: BoxSpec, base: str, template: str, agent: str, runtime: str) -> dict[str, Any]:
    # The owner of the template's files. An unprivileged server's stage is root of a user namespace with one user.
    mapping = [{"containerID": 0, "hostID": linux.SANDBOX_USER if os.geteuid() == 0 else 0, "size": 1}]
    capabilities = (*_MOUNTING, *_SUPERVISING) if spec.supervised else _MOUNTING
    packages: list[dict[str, Any]] = []
    if spec.runtime is not None and spec.runtime.is_root:
        base = runtime
    elif spec.runtime is not None:
        place, *others = package_places()
        empty = {"type": "tmpfs", "options": ["ro", "nosuid", "nodev", "size=4k", "mode=755"]}
        packages = [_read_only(place, runtime), *({"destination": each, **empty} for each in others)]
    return {
        "ociVersion": "1.0.0",
        "hostname": spec.host_name,
        "root": {"path": base, "readonly": True},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [
                *_PROCESS_1,
                *(["--read-only"] if spec.read_only else []),
                *(["--two-users"] if spec.supervised else []),
            ],
            "env": [f"{key}={value}" for key, value in sandbox_environment("/tmp").items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": True,
            "rlimits": [
                _limit("NPROC", spec.limits.pids),
                _limit("NOFILE", _FILES),
                _limit("FSIZE", spec.limits.disk_mb * _MIB),
                _limit("CORE", 0),
            ],
        },
        "mounts": [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/dev", "type": "tmpfs"},
            _read_only(rootfs.INSIDE_TEMPLATE, template),
            _read_only(AGENT_DIRECTORY, agent),
            *packages,
            {
                "destination": _SCRATCH,
                "type": "tmpfs",
                "options": [f"size={spec.limits.disk_mb * _MIB}", "mode=755"],
            },
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in _NAMESPACES],
            "uidMappings": mapping,
            "gidMappings": mapping,
        },
    }


def _limit(name: str, value: int) -> dict[str, Any]:
    return {"type": f"RLIMIT_{name}", "soft": value, "hard": value}


def _read_only(destination: str, source: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": source, "options": ["bind", "ro", "nosuid", "nodev"]}
