"""Root file systems of OCI images, as `runtime` artifacts that sandboxes see instead of this host's system.

    archive -> index.json -> manifest of this platform -> layers, one over the other -> root.tar and image.json

No layer is unpacked to disk: the layers' trees are merged by path, then each file is copied from its layer to the tar.
Formats: image-layout.md, layer.md and config.md of the OCI image specification 1.1.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import posixpath
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import action_key, canonical_json, file_sha256
from contracts.runtimes import KIND, ROOT
from contracts.store import Store
from curation.errors import DAMAGED, TaskError

IMAGE_VERSION = "1"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_HELP = (
    "write one by `skopeo copy docker://NAME oci-archive:FILE` or, with Docker 25 or newer, `docker save -o FILE NAME`"
)
_MOST_JSON = 4 << 20
_PIECE = 1 << 20
_MOST_LINKS = 40
_GONE, _ALL_GONE = ".wh.", ".wh..wh..opq"
"""Prefix of a name that a layer removes, and the name that removes all that was in a directory."""
_OWN = ("proc", "sys", "dev", "tmp", "run", "workspace", ".template", ".scratch", ".envd", ".agent")
"""Directories that every sandbox has of its own; an image's are left out."""
_REPLACED: Mapping[str, str | bytes] = {
    "var/tmp": "/tmp",
    "etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": b"sandbox\n",
    "etc/resolv.conf": b"",
}
"""Paths that replace an image's: a text is the target of a link, bytes are the content of a file."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/]+)-([^-/]+)\.dist-info/METADATA$")
_OLDEST = (3, 11)
"""Oldest Python that runs the verifier (envd/sandbox/in_guest.py)."""


@dataclass
class _Node:
    """A file, directory or symbolic link of the tree. Hard links of a file are the same object."""

    kind: Literal["file", "directory", "link"]
    executable: bool = False
    target: str = ""
    """Of a link."""
    layer: int = 0
    member: tarfile.TarInfo | None = None
    """Where a file's content is."""
    data: bytes = b""
    """Content of a file that is added here instead of read from a layer."""
    written: str = ""
    """Path under which the content is in the tar already."""


@dataclass
class _Image:
    """What an image's manifest names."""

    manifest: str
    """Digest of the manifest, `sha256:...`."""
    config: dict[str, Any]
    layers: list[dict[str, Any]]

    @property
    def env(self) -> dict[str, str]:
        """Environment variables, always with a PATH."""
        pairs = (each.partition("=") for each in self.config.get("config", {}).get("Env") or ())
        return {"PATH": _PATH} | {name: value for name, _, value in pairs}


def build_image(store: Store, archive: Path, *, leave_out: Sequence[str] = (), name: str | None = None) -> Artifact:
    """Publish the root file system of an OCI image, or return the existing artifact.

    `meta["digest"]` is what tasks name as their runtime; packages.json lists its Python packages, image.json its
    digests and environment. Directories named .git are left out.

    archive: an OCI layout, as a tar or a folder. leave_out: absolute paths that are left out, such as a copy of the
    repository. name: of the image, if the archive holds several. Raises TaskError, in one line.
    """
    dropped = tuple(sorted(posixpath.normpath(each).lstrip("/") for each in leave_out))
    if "" in dropped or "." in dropped:
        raise TaskError("--leave-out / would leave nothing: name a directory below it")
    with ExitStack() as held:
        read = _reader(archive, held)
        image = _chosen(archive, read, name)
        settings = {"image": image.manifest, "left_out": list(dropped)}
        key = action_key(KIND, {}, settings, IMAGE_VERSION)
        found = find_artifact(store, KIND, key)
        if found is not None:
            return found
        with ArtifactWriter(store, KIND, key, parents={}, config=settings, code_version=IMAGE_VERSION) as out:
            layers: list[tarfile.TarFile] = []
            tree = _Tree(dropped)
            for number in range(len(image.layers)):
                file = held.enter_context(tempfile.TemporaryFile(dir=out.directory))
                layers.append(held.enter_context(_layer(read, image, number, file)))
                tree.add(layers[-1], number)
            tree.finish(image.env)
            packages = sorted({each.groups() for path in tree.nodes if (each := _INSTALLED.search(path))})
            size = _write(tree.nodes, layers, out.directory / ROOT)
            digest = file_sha256(out.directory / ROOT)
            out.add_file(ROOT, sha256=digest)
            out.add_json("packages.json", [{"name": name, "version": version} for name, version in packages])
            out.add_json(
                "image.json", {**settings, "layers": [each["digest"] for each in image.layers], "env": image.env}
            )
            return out.commit(meta={"digest": digest, "packages": len(packages), "bytes": size})


def _reader(archive: Path, held: ExitStack) -> Callable[[str], IO[bytes]]:
    """A function that opens a file of the layout by its path, and raises KeyError or OSError."""
    if archive.is_dir():
        return lambda path: (archive / path).open("rb")
    try:
        tar = held.enter_context(tarfile.open(archive))  # noqa: SIM115 - `held` closes it
        files = {posixpath.normpath(each.name): each for each in tar if each.isreg()}
    except DAMAGED as error:
        why = " ".join(str(error).split())
        raise TaskError(f"{archive} can't be read as an OCI image archive ({why}): {_HELP}") from error

    def read(path: str) -> IO[bytes]:
        file = tar.extractfile(files[path])
        assert file is not None, "only regular files are listed"
        return file

    return read


def _chosen(archive: Path, read: Callable[[str], IO[bytes]], name: str | None) -> _Image:
    try:
        with read("oci-layout") as file:
            version = json.loads(file.read(_MOST_JSON))["imageLayoutVersion"]
        with read("index.json") as file:
            index = json.loads(file.read(_MOST_JSON))
        if not version.startswith("1."):
            raise TaskError(f"{archive} has version {version} of the OCI layout; 1.x is read")
        found = [each for each in index["manifests"] if name is None or name in _names(each)]
        manifests = [each for top in found for each in _manifests(read, top)]
        if len({each["digest"] for each in manifests}) != 1:
            names = ", ".join(sorted({each for top in index["manifests"] for each in _names(top)})) or "no named image"
            what = f"{len(manifests)} images" if manifests else "no image"
            raise TaskError(
                f"{archive} has {what} for {_platform()} by that name: choose one by --name (it has {names})"
            )
        (digest,) = {each["digest"] for each in manifests}
        manifest = json.loads(_blob(read, manifests[0]))
        return _Image(digest, json.loads(_blob(read, manifest["config"])), manifest["layers"])
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise TaskError(f"{archive} is no OCI image archive ({type(error).__name__}: {error}): {_HELP}") from error


def _names(descriptor: Mapping[str, Any]) -> set[str]:
    annotations = descriptor.get("annotations") or {}
    keys = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
    return {annotations[key] for key in keys if key in annotations}


def _manifests(
    read: Callable[[str], IO[bytes]], descriptor: dict[str, Any], depth: int = 3
) -> Iterator[dict[str, Any]]:
    """Manifests of this platform that a descriptor leads to."""
    said = descriptor.get("platform")
    if said is not None and (said.get("os"), said.get("architecture")) != tuple(_platform().split("/")):
        return
    content = json.loads(_blob(read, descriptor))
    if "layers" in content:
        yield descriptor
    for each in content.get("manifests", ()) if depth else ():
        yield from _manifests(read, each, depth - 1)


def _platform() -> str:
    machine = platform.machine()
    return f"linux/{_MACHINES.get(machine, machine)}"


def _blob_path(descriptor: Mapping[str, Any]) -> str:
    algorithm, _, digest = descriptor["digest"].partition(":")
    if algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"digest {descriptor['digest'][:80]!r} is not a SHA-256")
    return f"blobs/sha256/{digest}"


def _blob(read: Callable[[str], IO[bytes]], descriptor: Mapping[str, Any]) -> bytes:
    with read(_blob_path(descriptor)) as file:
        data = file.read(_MOST_JSON)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != descriptor["digest"]:
        raise ValueError(f"blob {descriptor['digest'][:19]} has other content than its name says")
    return data


def _layer(read: Callable[[str], IO[bytes]], image: _Image, number: int, file: IO[bytes]) -> tarfile.TarFile:
    """A layer, decompressed into a file. Its content must have the digests that manifest and config name."""
    wanted = image.layers[number]["digest"]
    try:
        with read(_blob_path(image.layers[number])) as blob:
            packed = _sha256(blob)
            magic = blob.read(4)
            blob.seek(0)
            stream: Any = blob
            if magic[:2] == b"\x1f\x8b":
                stream = gzip.GzipFile(fileobj=blob)
            elif magic == b"\x28\xb5\x2f\xfd":
                stream = pa.CompressedInputStream(pa.PythonFile(blob, "r"), "zstd")
            while data := stream.read(_PIECE):
                file.write(data)
        if (packed, _sha256(file)) != (wanted, image.config["rootfs"]["diff_ids"][number]):
            raise ValueError("its content is another than its digest says")
        return tarfile.open(fileobj=file, mode="r:")
    except (*DAMAGED, KeyError, IndexError, ValueError, pa.ArrowException) as error:
        raise TaskError(f"layer {wanted[:19]} of the image can't be read ({error}): get the image again") from error


def _sha256(file: IO[bytes]) -> str:
    """Digest of a whole file, which is at its beginning afterwards."""
    file.seek(0)
    digest = hashlib.sha256()
    while data := file.read(_PIECE):
        digest.update(data)
    file.seek(0)
    return f"sha256:{digest.hexdigest()}"


class _Tree:
    """The files of layers, each over those below it, by their paths without a slash in front."""

    def __init__(self, dropped: Sequence[str]) -> None:
        self.nodes: dict[str, _Node] = {}
        self._dropped = (*_OWN, *dropped)

    def add(self, layer: tarfile.TarFile, number: int) -> None:
        """Put a layer over the tree. Raises TaskError."""
        try:
            members = layer.getmembers()
        except DAMAGED as error:
            raise TaskError(f"layer {number + 1} of the image is no tar ({error}): get the image again") from error
        marks = [each for each in members if posixpath.basename(each.name).startswith(_GONE)]
        for each in marks:  # of what lies below this layer
            above, name = posixpath.split(self._place(each.name))
            if name == _ALL_GONE:
                self._remove(above, itself=False)
            else:
                self._remove(posixpath.join(above, name.removeprefix(_GONE)))
        for each in members:
            path = self._place(each.name)
            if path and not posixpath.basename(path).startswith(_GONE) and not self._is_dropped(path):
                self._put(path, each, number)

    def finish(self, env: Mapping[str, str]) -> None:
        """Add what every sandbox needs. Raises TaskError if the image has no bash, or no Python that is new enough."""
        for path, content in _REPLACED.items():
            self._remove(path)
            self.nodes[path] = (
                _Node("link", target=content) if isinstance(content, str) else _Node("file", data=content)
            )
            self._make_above(path)
        self.nodes[".envd/image.json"] = _Node("file", data=canonical_json({"env": dict(env)}))
        self.nodes |= {path: _Node("directory") for path in _OWN}
        self._check(env["PATH"].split(":"))

    def _check(self, places: Sequence[str]) -> None:
        if not self._program("bash", places):
            raise TaskError("the image has no bash in its PATH, which agents' commands run in: add it to the image")
        python = self._program("python3", places)
        if not python:
            raise TaskError("the image has no python3 in its PATH, which runs tests: add it to the image")
        version = re.fullmatch(r"python(\d+)\.(\d+)", posixpath.basename(python))
        if version and tuple(map(int, version.groups())) < _OLDEST:
            raise TaskError(f"the image has Python {'.'.join(version.groups())}, but verdicts need 3.11 or newer")

    def _program(self, name: str, places: Sequence[str]) -> str:
        """Path of a program behind all links; empty if there is none."""
        found = (self._real(posixpath.join(place, name)) for place in places)
        return next((each for each in found if each in self.nodes and self.nodes[each].kind == "file"), "")

    def _put(self, path: str, member: tarfile.TarInfo, number: int) -> None:
        there = self.nodes.get(path)
        if member.isdir():
            if there is None or there.kind != "directory":
                self.nodes[path] = _Node("directory")
                self._make_above(path)
            return
        if member.issym():
            node = _Node("link", target=member.linkname)
        elif member.islnk():
            target = self.nodes.get(self._place(member.linkname))
            if target is None:
                if self._is_dropped(self._place(member.linkname)):
                    return
                raise TaskError(f"the image links /{path} to {member.linkname!r}, which it does not have")
            node = target
        elif member.isreg():
            node = _Node("file", bool(member.mode & 0o111), layer=number, member=member)
        else:
            return  # a device or a pipe
        self._remove(path)
        self.nodes[path] = node
        self._make_above(path)

    def _make_above(self, path: str) -> None:
        """Make the directories of a path, also in place of files."""
        while path := posixpath.dirname(path):
            node = self.nodes.get(path)
            if node is not None and node.kind == "directory":
                return
            self.nodes[path] = _Node("directory")

    def _remove(self, path: str, *, itself: bool = True) -> None:
        node = self.nodes.get(path) if path else _Node("directory")
        if node is None:
            return
        if node.kind == "directory":
            for each in [each for each in self.nodes if not path or each.startswith(f"{path}/")]:
                del self.nodes[each]
        if itself:
            self.nodes.pop(path, None)

    def _is_dropped(self, path: str) -> bool:
        return ".git" in path.split("/") or any(path == each or path.startswith(f"{each}/") for each in self._dropped)

    def _place(self, name: str) -> str:
        """Path of a layer's member: its directory behind all links."""
        above, last = posixpath.split(posixpath.normpath(f"/{name}"))
        return posixpath.join(self._real(above), last).lstrip("/")

    def _real(self, path: str) -> str:
        """Path behind all links of the tree, which its root contains. Raises TaskError for links in a circle."""
        at: list[str] = []
        todo, links = path.split("/")[::-1], 0
        while todo:
            part = todo.pop()
            if part == "..":
                at = at[:-1]
            if part in ("", ".", ".."):
                continue
            node = self.nodes.get("/".join([*at, part]))
            if node is None or node.kind != "link":
                at.append(part)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise TaskError(f"the image has links in a circle at /{'/'.join([*at, part])}")
            at = [] if node.target.startswith("/") else at
            todo += node.target.split("/")[::-1]
        return "/".join(at)


def _write(nodes: Mapping[str, _Node], layers: Sequence[tarfile.TarFile], target: Path) -> int:
    """Write a tar whose bytes depend on the tree alone, beginning with its root, and return the files' bytes."""
    total = 0
    with tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as out:
        out.addfile(_about(".", tarfile.DIRTYPE, 0o755))
        for path, node in sorted(nodes.items()):
            if node.kind == "directory":
                out.addfile(_about(path, tarfile.DIRTYPE, 0o755))
            elif node.kind == "link":
                out.addfile(_about(path, tarfile.SYMTYPE, 0o777, node.target))
            elif node.written:
                out.addfile(_about(path, tarfile.LNKTYPE, 0o644, node.written))
            else:
                node.written = path
                about = _about(path, tarfile.REGTYPE, 0o755 if node.executable else 0o644)
                content = BytesIO(node.data) if node.member is None else layers[node.layer].extractfile(node.member)
                assert content is not None, "only regular files are files"
                about.size = len(node.data) if node.member is None else node.member.size
                total += about.size
                out.addfile(about, content)
    return total


def _about(path: str, kind: bytes, mode: int, target: str = "") -> tarfile.TarInfo:
    about = tarfile.TarInfo(path)
    about.type, about.mode, about.linkname = kind, mode, target
    return about
