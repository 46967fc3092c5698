"""Prepare the machine for the native spawner, then replace this process by the program `envd-spawn`.

python -m envd.sandbox.spawner CONTROL_FD RUN_DIR NAME PROGRAM KEEP
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from envd.sandbox import linux, rootfs
from envd.sandbox.cgroups import Cgroups
from envd.sandbox.place import sandbox_environment
from envd.sandbox.python_inside import package_places


def main(arguments: list[str]) -> None:
    """Prepare the machine and execute the spawner. Never returns."""
    control, run_dir, name, program, keep = int(arguments[0]), Path(arguments[1]), *arguments[2:5]
    # Opened now because the paths are not visible after this process changes its root.
    binary = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
    above = os.open(run_dir.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    groups = Cgroups(name, freezer=True)
    owner = linux.sandbox_owner()
    inside = owner if owner == linux.SANDBOX_USER else 0
    packages = package_places()  # while the host's paths are visible
    linux.own_mounts()
    system = rootfs.prepare_shared_root(run_dir)
    command = ["envd-spawn", "--owner", str(inside), "--run-dir", f"{above}:{run_dir.name}", "--keep", keep]
    command += [f"--system={path}" for path in system]
    command += [f"--packages={path}" for path in packages]
    kept = [control, above]
    for controller, (base, parent) in groups.descriptors.items():
        command += [f"--{controller}", str(base), "--group", f"{parent}:{name}"]
        kept += [base, parent]
    if groups.unified:
        command.append("--unified-limits")
    for fd in kept:
        os.set_inheritable(fd, True)
    os.execve(binary, [*command, str(control)], sandbox_environment("/tmp"))


if __name__ == "__main__":
    main(sys.argv[1:])
