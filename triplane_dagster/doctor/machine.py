"""Checks of Python and its packages, cores, memory, disk, open files and the clock."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from contracts.errors import StoreError
from contracts.store import DEFAULT_STORE, local_folder
from triplane_dagster.doctor.findings import Check, Finding, broken, ok

ROOT = Path(__file__).resolve().parents[2]
MEMORY_GIB, DISK_GIB = 2.0, 1.0
"""Minimum memory and disk for the quickstart, which has a model of 1.5 million parameters and writes some 100 MB."""
OPEN_FILES = 1024
CLOCK_S = 5.0


def checks() -> list[Check]:
    """Checks that run on every machine."""
    return [
        Check("Python", "everything", python),
        Check("packages", "everything", packages, required=True),
        Check("tested versions", "results to the bit", tested_versions),
        Check("cores", "speed", cores),
        Check("memory", "everything", memory, required=True),
        Check("disk", "the store, or its cache", disk, required=True),
        Check("open files", "hundreds of episodes at once", open_files),
        Check("clock", "S3, which refuses requests with a wrong time", clock),
    ]


def python() -> Finding:
    """Check the interpreter's version."""
    return ok(f"{sys.version.split()[0]}, {sys.executable}")


def packages() -> Finding:
    """Check that the dependencies of pyproject.toml are installed in allowed versions."""
    wrong = list(_unmet(metadata.requires("triplane") or []))
    if wrong:
        return broken("; ".join(wrong), "`make install`")
    return ok(f"triplane {metadata.version('triplane')} and what it requires")


def _unmet(requirements: list[str]) -> Iterator[str]:
    for line in requirements:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _installed(wanted.name)
        if found is None:
            yield f"{wanted.name} is not installed"
        elif not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted.name} {found} is not {wanted.specifier}"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tested_versions() -> Finding:
    """List the differences from constraints.txt."""
    place = ROOT / "constraints.txt"
    if not place.is_file():
        return ok("no constraints.txt beside the code: nothing to compare with")
    pinned = [Requirement(line) for line in place.read_text().splitlines() if line.strip() and not line.startswith("#")]
    present = [(each, found) for each in pinned if (found := _installed(each.name)) is not None]
    differing = [
        f"{canonicalize_name(each.name)} {found}, tested {each.specifier}"
        for each, found in present
        if not each.specifier.contains(found, prereleases=True)
    ]
    if differing:
        return broken("; ".join(differing), "`pip install --constraint constraints.txt --editable .`")
    return ok(f"{len(present)} packages as in constraints.txt")


def cores() -> Finding:
    """Count the cores this process may use."""
    mine, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if load > 2 * mine:
        return broken(f"{mine}, with a load of {load:.0f}", "wait for what else runs, or set OMP_NUM_THREADS=1")
    return ok(f"{mine}, load {load:.1f}")


def memory() -> Finding:
    """Measure the available memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(fields[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    said = f"{free:.1f} of {total:.1f} GiB available"
    if free < MEMORY_GIB:
        return broken(said, f"stop other programs: the quickstart needs {MEMORY_GIB:g} GiB")
    return ok(said)


def local_place() -> Path:
    """Nearest existing folder of the store on this machine, or of the cache of a store on S3."""
    from contracts.filecache import cache_base

    url = os.environ.get("TRIPLANE_STORE") or DEFAULT_STORE
    try:
        place = cache_base() if url.startswith("s3:") else local_folder(url).absolute()
    except StoreError:
        place = Path.cwd()  # the check of the store names the error
    return next(folder for folder in (place, *place.parents) if folder.is_dir())


def disk() -> Finding:
    """Measure the free space where artifacts are written."""
    place = local_place()
    about = os.statvfs(place)
    free, total = (blocks * about.f_frsize / 2**30 for blocks in (about.f_bavail, about.f_blocks))
    said = f"{free:,.1f} of {total:,.1f} GiB free in {place}"
    if free < DISK_GIB:
        return broken(said, f"free some space, or set TRIPLANE_STORE: the quickstart needs {DISK_GIB:g} GiB")
    return ok(said)


def open_files() -> Finding:
    """Read the limit of file descriptors and the machine's number of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, _, most = Path("/proc/sys/fs/file-nr").read_text().split()
    said = f"{soft} a process (at most {hard}); {used} open on this machine"
    if soft < OPEN_FILES:
        return broken(said, f"`ulimit -n {min(4096, hard) if hard > 0 else 4096}`")
    if int(used) > 0.9 * int(most):
        return broken(f"{said}, of {most}", "`sysctl -w fs.file-max=...`, or end what holds them")
    return ok(said)


def clock() -> Finding:
    """Check that the clock agrees with the file system's and is not at its epoch."""
    now = time.time()
    with tempfile.NamedTemporaryFile(dir=_writable(local_place())) as probe:
        apart = abs(Path(probe.name).stat().st_mtime - now)
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if apart > CLOCK_S or now < Path(__file__).stat().st_mtime - 86400:
        return broken(f"{said}, {apart:.0f} s from the disk's", "start a time service, e.g. `apt-get install chrony`")
    return ok(said)


def _writable(folder: Path) -> Path:
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
