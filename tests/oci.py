"""OCI image layouts made here, of given layers or of this machine's Python and bash."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_PROGRAMS = ("bash", "cat", "ls", "touch", "rm", "base64", "git")
_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "tkinter", "site-packages", "dist-packages", "__pycache__"}


def layer(**entries: bytes | str | None) -> bytes:
    """A tar. Content by path: bytes of a file, `->TARGET` of a link, `=TARGET` of a hard link; None: a directory."""
    return layer_of(entries)


def layer_of(entries: Mapping[str, bytes | str | None]) -> bytes:
    """As `layer`, for paths that are no names."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in entries.items():
            about = tarfile.TarInfo(path)
            about.mode, about.uid, about.mtime = 0o4755, 1000, 12345
            if content is None:
                about.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                about.type = tarfile.SYMTYPE if content.startswith("->") else tarfile.LNKTYPE
                about.linkname = content.removeprefix("->").removeprefix("=")
            else:
                about.size = len(content)
            tar.addfile(about, io.BytesIO(content) if isinstance(content, bytes) else None)
    return data.getvalue()


class Layout:
    """An OCI layout in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.manifests: list[dict[str, Any]] = []

    def blob(self, data: bytes) -> dict[str, Any]:
        """Store a blob and return its descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data), "mediaType": "application/octet-stream"}

    def add(
        self,
        layers: Sequence[bytes],
        *,
        env: Sequence[str] = ("PATH=/usr/bin:/bin",),
        packed: str = "gzip",
        name: str = "",
        architecture: str = ARCHITECTURE,
    ) -> None:
        """Add an image. packed: gzip, zstd, or nothing."""
        pack = {
            "gzip": lambda data: gzip.compress(data, 1, mtime=0),
            "zstd": lambda data: pa.compress(data, codec="zstd", asbytes=True),
            "": lambda data: data,
        }[packed]
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": list(env)},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in layers]},
        }
        manifest = {
            "config": self.blob(json.dumps(config).encode()),
            "layers": [self.blob(pack(each)) for each in layers],
        }
        descriptor = self.blob(json.dumps(manifest).encode())
        descriptor["platform"] = {"os": "linux", "architecture": architecture}
        if name:
            descriptor["annotations"] = {"org.opencontainers.image.ref.name": name}
        self.manifests.append(descriptor)
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.manifests}))

    def tar(self, path: Path) -> Path:
        """Write the layout as an archive."""
        with tarfile.open(path, "w") as out:
            out.add(self.folder, ".")
        return path


def host_layers(packages: Mapping[str, bytes]) -> list[bytes]:
    """Layers of an image with this machine's Python (as /opt/bin/python3), bash, a few programs, and, in /opt/packages,
    pytest and `packages`.
    """
    python = os.path.realpath(sys.executable)
    programs = [
        python,
        *filter(None, (shutil.which(name) for name in _PROGRAMS)),
    ]
    stdlib = Path(sysconfig.get_path("stdlib"))
    modules = [
        each
        for each in stdlib.rglob("*")
        if each.is_file() and not _LEFT_OUT.intersection(each.relative_to(stdlib).parts)
    ]
    libraries = {each for path in [*programs, *(str(m) for m in modules if m.suffix == ".so")] for each in _needs(path)}
    system: dict[str, bytes | str | None] = {"opt/bin/python3": f"->{python}", "etc/made-of": b"layers\n"}
    for each in [*map(Path, programs), *modules, *map(Path, sorted(libraries))]:
        system[str(each).lstrip("/")] = each.read_bytes()
    system.setdefault("bin/bash", f"->{shutil.which('bash')}")
    installed = {
        f"opt/packages/{file}": Path(str(file.locate())).read_bytes()
        for name in _PYTEST
        for file in metadata.distribution(name).files or ()
        if ".." not in file.parts and "__pycache__" not in file.parts
    }
    own = {f"opt/packages/{path}": data for path, data in packages.items()}
    return [layer_of(system), layer_of(installed), layer_of(own)]


def _needs(program: str) -> list[str]:
    """Shared libraries of a program, and its loader."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/\S+) \(0x", said)
