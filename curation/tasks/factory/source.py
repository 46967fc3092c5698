"""Read a repository: a folder, a commit of a git repository, or a source distribution of a package index."""

from __future__ import annotations

import io
import os
import re
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from contracts.digests import digest_of, sha256
from contracts.store import Store
from contracts.tasks import files_digest
from curation.errors import DAMAGED, TaskError
from curation.tasks.factory.licences import licence_of
from curation.tasks.factory.steps import recall_bytes
from curation.tasks.importing.reading import MAX_BYTES
from curation.tasks.importing.trees import (
    LEFT_OUT,
    Tree,
    commit_entries,
    entries_tree,
    folder_tree,
    objects_of,
    run_git,
    utf8_name,
)

DEFAULT_INDEX = "https://pypi.org/simple/"
_BUILT = frozenset({"build", "dist", ".eggs", "htmlcov", "site-packages"})
"""Folders in the root that hold copies or products of the code; the agent gets none."""
_PIECE = 1 << 20
_PINNED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)")


@dataclass(frozen=True)
class Repository:
    """Code and tests that tasks are made of."""

    name: str
    """Short name, part of the tasks' ids."""
    source: str
    """What the user named."""
    tree: Tree
    licence: str
    clone: Path | None = None
    """Its git repository, if it has one."""

    @cached_property
    def digest(self) -> str:
        """Digest of name and files."""
        return digest_of([self.name, files_digest(self.tree)])


def read_repository(
    source: str, store: Store, *, index: str | None = None, wheelhouse: Path | None = None
) -> Repository:
    """Repository of a SOURCE argument. index: URL of the package index. wheelhouse: folder of archives, used instead.

    Raises TaskError with the source and the fix.
    """
    if source.startswith("pypi:"):
        (name, tree), clone = _distribution(source, store, index, wheelhouse), None
    else:
        path = Path(source)
        if not path.is_dir():
            raise TaskError(f"{source} is no folder: give a folder, a git repository, or pypi:NAME==VERSION")
        name = path.resolve().name.removesuffix(".git")
        clone = path if (path / ".git").exists() or (path / "HEAD").is_file() else None
        tree = _head(source, path) if clone else _folder(source, path)
    tree = {path: data for path, data in tree.items() if not _is_product(path)}
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.").lower() or "repository"
    return Repository(name, source, tree, licence_of(tree), clone)


def head_of(clone: Path) -> str:
    """Id of the commit HEAD of a git repository; empty without one."""
    return run_git(["rev-parse", "--quiet", "--verify", "HEAD"], clone).stdout.decode().strip()


def _is_product(path: str) -> bool:
    parts = PurePosixPath(path).parts
    made = any(part in LEFT_OUT for part in parts) or any(
        part.endswith((".egg-info", ".dist-info")) for part in parts[:-1]
    )
    return made or (len(parts) > 1 and parts[0] in _BUILT) or path.endswith((".pyc", ".pyo", ".whl"))


def _folder(source: str, path: Path) -> Tree:
    _check_size(source, sum(file.stat().st_size for file in _files(path)))
    return folder_tree(path)


def _files(root: Path) -> list[Path]:
    found: list[Path] = []
    for directory, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [each for name in names if (each := Path(directory, name)).is_file()]
    return found


def _head(source: str, clone: Path) -> Tree:
    """Files of the commit HEAD; changes that are not committed do not count."""
    commit = head_of(clone)
    if not commit:
        raise TaskError(f"{source} has no commit to read: commit its files first")
    with objects_of(clone) as objects:
        entries = commit_entries(objects, commit)
        submodule = next((each.path for each in entries if each.is_submodule), None)
        if submodule is not None:
            raise TaskError(
                f"{source} has the submodule {submodule}, which git does not store in it: make tasks of a source"
                " distribution or of a folder that holds its files"
            )
        _check_size(source, sum(each.size for each in entries))
        return entries_tree(objects, entries)


def _check_size(source: str, size: int) -> None:
    if size > MAX_BYTES:
        raise TaskError(
            f"{source} holds {size >> 20} MiB, at most {MAX_BYTES >> 20} fit: name the folder of one package in it"
        )


def _distribution(source: str, store: Store, index: str | None, wheelhouse: Path | None) -> tuple[str, Tree]:
    """Name and files of a pinned source distribution. The archive is kept in the store, for each place that has it."""
    pin = source.removeprefix("pypi:")
    match = _PINNED.fullmatch(pin)
    if match is None:
        raise TaskError(f"pypi:{pin} does not pin a version: write e.g. pypi:toolz==1.0.0")
    url = index or os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL") or DEFAULT_INDEX
    place = digest_of(str(wheelhouse.resolve()) if wheelhouse else url)
    key = f"factory/distributions/{match['name'].lower()}-{match['version']}-{place[:16]}"
    data = recall_bytes(store, key)
    if data is not None:
        return match["name"], _unpacked(source, data)
    data = _download(pin, url, wheelhouse)
    tree = _unpacked(source, data)
    store.create(key, data, cached=True)
    return match["name"], tree


def _download(pin: str, url: str, wheelhouse: Path | None) -> bytes:
    """Source archive, checked against the hash of the index. Nothing of it is run."""
    from unearth import PackageFinder

    places: Sequence[str] = [str(wheelhouse)] if wheelhouse else []
    with_index = [] if wheelhouse else [url]
    finder = PackageFinder(index_urls=with_index, find_links=places, no_binary=[":all:"])
    where = f"the folder {wheelhouse}" if wheelhouse else f"the index {url}"
    try:
        best = finder.find_best_match(pin).best
        if best is None:
            raise TaskError(f"{where} has no source distribution of {pin}: correct name and version")
        link = best.link
        if link.is_file:
            data = link.file_path.read_bytes()
        else:
            answer = finder.session.get(link.normalized)
            answer.raise_for_status()
            data = answer.content
    except TaskError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise TaskError(f"{where} does not give {pin} ({said}): check it, or name a folder by --wheelhouse") from error
    wanted = (link.hashes or {}).get("sha256")
    if wanted is not None and sha256(data) != wanted:
        raise TaskError(f"the archive of {pin} from {where} does not match its hash: try again")
    return data


def _unpacked(source: str, data: bytes) -> Tree:
    """Regular files of an archive, below its one folder."""
    tree: Tree = {}
    try:
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                _check_size(source, sum(each.file_size for each in archive.infolist()))
                tree = {each.filename: archive.read(each) for each in archive.infolist() if not each.is_dir()}
        else:
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                members = [each for each in tar.getmembers() if each.isfile()]
                while tar.fileobj is not None and tar.fileobj.read(_PIECE):  # the checksum is at the end
                    pass
                _check_size(source, sum(each.size for each in members))
                for each in members:
                    file = tar.extractfile(each)
                    tree[each.name] = file.read() if file else b""
    except DAMAGED as error:
        said = " ".join(str(error).split())
        raise TaskError(f"the archive of {source} is damaged ({said}): delete it from the index or folder") from None
    inside = {str(PurePosixPath(*PurePosixPath(path).parts[1:])): content for path, content in tree.items()}
    if any(".." in PurePosixPath(path).parts or path.startswith("/") for path in tree):
        raise TaskError(f"the archive of {source} holds paths that lead out of it: it can't be used")
    return {utf8_name(path): content for path, content in inside.items() if path != "."}
