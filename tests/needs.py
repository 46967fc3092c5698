"""Programs outside Python that some tests need, and what installs them.

Each suite begins by naming those that this machine lacks (`report`); a test that needs one is skipped by `require`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

SUITES = ("test", "slow", "escape", "redteam", "browser")
"""Suites that need programs, by the name of their marker; `test` is the default suite."""


@dataclass(frozen=True)
class Need:
    """A program. One of `places`, each a name on the PATH or a pattern of paths, must exist; none means to be root."""

    places: tuple[str, ...]
    used_by: str
    install: str
    suites: tuple[str, ...]

    def present(self) -> bool:
        if not self.places:
            return os.geteuid() == 0
        path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path.home() / ".local/bin")))
        named = [each for each in self.places if not each.startswith("/")]
        found = (Path("/").glob(each[1:]) for each in self.places if each.startswith("/"))
        return any(shutil.which(each, path=path) for each in named) or any(any(paths) for paths in found)


def _debian(package: str) -> str:
    return f"apt-get install {package}"


NEEDS = {
    "qemu-system-x86_64": Need(
        ("qemu-system-x86_64",), "QEMU sandboxes", _debian("qemu-system-x86"), ("slow", "escape")
    ),
    "mksquashfs": Need(
        ("mksquashfs",), "QEMU and Firecracker sandboxes", _debian("squashfs-tools"), ("test", "slow", "escape")
    ),
    "unsquashfs": Need(("unsquashfs",), "the stand-in for Firecracker", _debian("squashfs-tools"), ("test", "slow")),
    "runsc": Need(("runsc",), "gVisor sandboxes", "deploy/install-runsc.sh", ("slow", "escape")),
    "apt-get": Need(("apt-get",), "the guest image of QEMU sandboxes", "Debian or Ubuntu", ("slow", "escape")),
    "unshare": Need(("unshare",), "namespaces of tests", _debian("util-linux"), SUITES),
    "setpriv": Need(("setpriv",), "tests as another user", _debian("util-linux"), ("test", "slow")),
    "C compiler": Need(("cc", "gcc", "clang"), "sanitizers, fortified calls", _debian("gcc"), ("test", "slow")),
    "bash-static": Need(("/bin/bash-static",), "the static shell of sandboxes", _debian("bash-static"), ("test",)),
    "initdb": Need(
        ("initdb", "/usr/lib/postgresql/*/bin/initdb"), "PostgreSQL", _debian("postgresql"), ("test", "slow")
    ),
    "redis-server": Need(("redis-server",), "routers that share a Redis server", _debian("redis-server"), ("test",)),
    "promtool": Need(("promtool",), "rules of Prometheus", _debian("prometheus"), ("test",)),
    # its guest changes users as that of a machine does, whose first process is root
    "root": Need((), "the stand-in for Firecracker", "run the tests as root", ("test", "slow")),
    "chromium": Need(("chromium",), "pages in a browser", _debian("chromium"), ("browser",)),
}


def lacks(*names: str) -> list[str]:
    """One line a missing program: what it is and what installs it."""
    return [f"{name} ({NEEDS[name].install})" for name in names if not NEEDS[name].present()]


def require(*names: str) -> None:
    """Skip the test where a program is missing. The reason names it and what installs it."""
    if missing := lacks(*names):
        pytest.skip(f"needs {', '.join(missing)}")


def report(suite: str) -> list[str]:
    """Lines for the start of a suite: each program that it needs and this machine lacks, for what, how to get it."""
    missing = {name: need for name, need in NEEDS.items() if suite in need.suites and not need.present()}
    if not missing:
        return []
    rows = [f"  {name}: for {need.used_by}; install: {need.install}" for name, need in missing.items()]
    return [f"Missing programs; tests that need them are skipped ({suite}):", *rows]
