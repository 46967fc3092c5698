"""File system of a sandbox: a read-only system, a workspace over a template, a private /tmp, /proc and a small /dev.

/            tmpfs prepared once, read-only, shared by all sandboxes of a server
/usr ...     the host's, read-only, like the Python that runs envd and its packages (python_inside.py). With a runtime,
             that is mounted in place of the packages, and their other directories are empty; or it is the whole root
             file system, but for /dev
/.template   the pristine workspace, read-only
/workspace   overlay: the template below, a size-limited tmpfs above
/tmp         on the same tmpfs
/dev/pts     private terminals (native spawner)
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from envd.sandbox import linux
from envd.sandbox.python_inside import inside, make_environment, package_places, python_directories

DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_FILES = ("ld.so.cache", "ld.so.conf", "mime.types", "inputrc")
_PASSWD = "root:x:0:0:root:/tmp:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
INSIDE_TEMPLATE = "/.template"
_SHARED = ("templates", "runtimes")
"""Directories of the server's run directory that sandboxes' file systems are mounted from."""


def prepare_base(run_dir: Path) -> list[str]:
    """Build the zygote's root, make it this process's root, and return the system directories that sandboxes see.

    Sandboxes see `/base` and `/system` through overlays. The two are separate, since a user namespace can't look below
    the mounts of another one. The root also has `/devices`, `/templates`, `/runtimes`, `/proc`, `/mnt` and
    `/none` (empty). Called once, in the zygote's fresh mount namespace.
    """
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    root = run_dir / "root"
    root.mkdir(exist_ok=True)
    linux.mount("tmpfs", str(root), "tmpfs", linux.MS_NOSUID, "mode=755,size=16m")
    for name in ("base", "system", "devices", "proc", "mnt", "none", "dev", "workspace"):
        (root / name).mkdir()
    system = fill_base(root / "base", root / "system")
    _share(run_dir, root)
    linux.mount("/proc", str(root / "proc"), flags=linux.MS_BIND | linux.MS_REC)
    for name in DEVICES:
        (root / "base/dev" / name).touch()
    fill_devices(root / "dev")
    linux.pivot_into(str(root))
    return system


def _share(run_dir: Path, root: Path) -> None:
    for name in _SHARED:
        (run_dir / name).mkdir(exist_ok=True)
        _bind_read_only(str(run_dir / name), root / name)


def make_devices() -> None:
    """Mount device files for the next sandbox, before its fork, since only the host's root can make device files."""
    linux.mount("tmpfs", "/devices", "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "mode=755,size=64k")
    fill_devices(Path("/devices"))


def forget_devices() -> None:
    """Unmount the device files of `make_devices`. The forked sandbox keeps its copy of the mount."""
    linux.unmount("/devices")


def prepare_shared_root(run_dir: Path) -> list[str]:
    """Build the native spawner's root, make it this process's root, and return its system directories.

    The spawner's sandboxes see this root through overlays. Directories that no sandbox may see are below /.scratch,
    which each sandbox unmounts: `templates`, `runtimes`, `proc` (the host's), `box`, `lower` and `view` (for mounts),
    `none` (empty). Called once, in the spawner's fresh mount namespace.
    """
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    root = run_dir / "root"
    root.mkdir(exist_ok=True)
    linux.mount("tmpfs", str(root), "tmpfs", linux.MS_NOSUID, "mode=755,size=16m")
    system = fill_base(root, root)
    fill_devices(root / "dev")
    (root / "dev/pts").mkdir()
    (root / "dev/ptmx").symlink_to("pts/ptmx")
    hidden = root / ".scratch"
    linux.mount("tmpfs", str(hidden), "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=700,size=64k")
    for name in ("proc", "box", "lower", "view", "none"):
        (hidden / name).mkdir()
    _share(run_dir, hidden)
    linux.mount("/proc", str(hidden / "proc"), flags=linux.MS_BIND | linux.MS_REC)
    linux.mount("", str(root), flags=linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID)
    linux.pivot_into(str(root))
    return system


def enter(template: str, disk_bytes: int, system: Iterable[str], runtime: str = "", *, own_root: bool = False) -> None:
    """Mount a sandbox's file system and make it the root. Called in the sandbox's fresh namespaces, with privileges.

    system: the sandbox's system directories. runtime: digest of packages or, with own_root, of a root file system in
    place of all of them. Sandboxes see shared directories through overlays, so that each sandbox has its own inodes:
    locks and notifications on system files stay within a sandbox (envd/native/spawn_root.c does the same).
    """
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_SLAVE)
    safe = linux.MS_NOSUID | linux.MS_NODEV
    if own_root:
        _see(f"/runtimes/{runtime}", "/mnt", safe)
        _see("/base/dev", "/mnt/dev", linux.MS_NOSUID)
    else:
        _see("/base", "/mnt", linux.MS_NOSUID)
        for path in system:
            _see(f"/system{path}", f"/mnt{path}", safe)
    if runtime and not own_root:
        packages, *others = package_places()
        _see(f"/runtimes/{runtime}", f"/mnt{packages}", safe)
        for path in others:  # each sandbox's own, since locks on a shared directory would reach neighbours
            linux.mount("tmpfs", f"/mnt{path}", "tmpfs", safe | linux.MS_RDONLY, "size=4k,mode=755")
    for name in DEVICES:
        linux.mount(f"/devices/{name}", f"/mnt/dev/{name}", flags=linux.MS_BIND)
    linux.mount("tmpfs", "/mnt/.scratch", "tmpfs", safe, f"size={disk_bytes},mode=755,nr_inodes=65536")
    for name in ("upper", "work", "tmp"):
        Path(f"/mnt/.scratch/{name}").mkdir()
    linux.mount(f"/templates/{template}", "/mnt" + INSIDE_TEMPLATE, flags=linux.MS_BIND)
    options = f"lowerdir=/templates/{template},upperdir=/mnt/.scratch/upper,workdir=/mnt/.scratch/work,userxattr"
    linux.mount("overlay", "/mnt/workspace", "overlay", safe, options)
    linux.mount("/mnt/.scratch/tmp", "/mnt/tmp", flags=linux.MS_BIND)
    linux.unmount("/mnt/.scratch")
    linux.mount("proc", "/mnt/proc", "proc", safe | linux.MS_NOEXEC)
    linux.pivot_into("/mnt")
    Path("/tmp").chmod(0o1777)


def _see(source: str, target: str, flags: int) -> None:
    lower = re.sub(r"([\\:,])", r"\\\1", source)
    linux.mount("overlay", target, "overlay", flags | linux.MS_RDONLY, f"lowerdir={lower}:/none,userxattr")


def fill_base(base: Path, mounts: Path) -> list[str]:
    """Fill a directory of a private mount namespace with a sandbox's system files, and return the system directories.

    Devices are not included. mounts: the directory below which the system directories are bound; base has empty
    directories of the same names.
    """
    _skeleton(base)
    system = {inside(path): path for path in python_directories()}
    for name in _SYSTEM:
        source = Path("/") / name
        if source.is_symlink():
            (base / name).symlink_to(source.readlink())
        elif source.is_dir():
            system[str(source)] = str(source)
    for path, source_path in system.items():
        (base / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        _bind_read_only(source_path, mounts / path.lstrip("/"))
    make_environment(base)
    return sorted(system)


def _skeleton(base: Path) -> None:
    for name in ("proc", "dev", "tmp", "etc", "workspace", ".template", ".scratch", "run", "var", "root"):
        (base / name).mkdir(parents=True)
    (base / "var/tmp").symlink_to("/tmp")
    (base / "dev/shm").symlink_to("/tmp")
    (base / "dev/fd").symlink_to("/proc/self/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (base / "dev" / name).symlink_to(f"/proc/self/fd/{number}")
    etc = base / "etc"
    (etc / "passwd").write_text(_PASSWD)
    (etc / "group").write_text(_GROUP)
    (etc / "hosts").write_text(_HOSTS)
    for name in _ETC_FILES:
        source = Path("/etc") / name
        if source.is_file():
            shutil.copyfile(source, etc / name)
    if Path("/etc/alternatives").is_dir():
        shutil.copytree("/etc/alternatives", etc / "alternatives", symlinks=True)


def fill_devices(dev: Path) -> None:
    """Make a sandbox's device files. Raises OSError."""
    for name, (major, minor) in DEVICES.items():
        try:
            os.mknod(dev / name, 0o20666, os.makedev(major, minor))
            (dev / name).chmod(0o666)
        except PermissionError:  # without privilege, bind the host's
            (dev / name).touch()
            linux.mount(f"/dev/{name}", str(dev / name), flags=linux.MS_BIND)


def _bind_read_only(source: str, target: Path) -> None:
    """Bind a directory read-only. Keeps the locked mount flags of the source.

    Raises OSError, with their names if file systems that are mounted below the source prevent it.
    """
    target.mkdir(parents=True, exist_ok=True)
    try:
        linux.mount(source, str(target), flags=linux.MS_BIND)
    except OSError as error:
        places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        below = [place for place in places if place.startswith(f"{source}/")]
        if error.errno != errno.EINVAL or not below:
            raise
        said = f"only root can leave out of {source} what is mounted below it ({', '.join(below)}): unmount that"
        raise OSError(error.errno, said) from error
    about = os.statvfs(target)
    kept = 0
    for flag, bit in ((os.ST_NODEV, linux.MS_NODEV), (os.ST_NOEXEC, linux.MS_NOEXEC)):
        kept |= bit if about.f_flag & flag else 0
    kept |= {os.ST_NOATIME: 0x400, os.ST_RELATIME: 0x200000}.get(about.f_flag & (os.ST_NOATIME | os.ST_RELATIME), 0)
    wanted = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | kept
    linux.mount("", str(target), flags=wanted)
