"""Install a lock's packages and publish them as a `runtime` artifact: one tar whose SHA-256 is the runtime's digest."""

from __future__ import annotations

import csv
import email.parser
import io
import shutil
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import file_sha256
from contracts.runtimes import ARCHIVE, KIND
from contracts.store import Store
from curation.tasks.runtimes.resolving import RUNTIME_VERSION, Lock, uv

_OF_INSTALLER = frozenset({"INSTALLER", "REQUESTED", "direct_url.json", "uv_build.json", "uv_cache.json"})
"""Files of a dist-info directory that depend on how it was installed."""


def build_runtime(store: Store, lock: Lock, *, index: str | None = None, wheelhouse: Path | None = None) -> Artifact:
    """Publish the packages of a lock, or return the existing artifact; killed, it is as if never begun.

    `meta["digest"]` is what tasks name; packages.json lists packages with licences and plugins of pytest. index,
    wheelhouse: see `resolve`. Raises TaskError if a wheel is missing or has another hash.
    """
    found = find_artifact(store, KIND, lock.key)
    if found is not None:
        return found
    with ArtifactWriter(store, KIND, lock.key, parents={}, config=lock.settings, code_version=RUNTIME_VERSION) as out:
        site = out.directory / "site"
        if lock.installed:
            _copy_installed(lock, site)
        else:
            listed = out.directory / "requirements.txt"
            listed.write_text("".join(f"{each}\n" for each in lock.packages))
            command = ["pip", "install", "--target", str(site), "--require-hashes", "--no-deps", "--link-mode", "copy"]
            uv([*command, "-r", str(listed)], out.directory, index, wheelhouse, "its packages can't be installed")
            listed.unlink()
        licences = [_about(each) for each in sorted(site.glob("*.dist-info"))]
        _tidy(site)
        _add_own(site, lock)
        size = _pack(site, out.directory / ARCHIVE)
        digest = file_sha256(out.directory / ARCHIVE)
        shutil.rmtree(site)
        out.add_file(ARCHIVE, sha256=digest)
        out.add_json("packages.json", licences)
        return out.commit(meta={"digest": digest, "packages": len(licences), "bytes": size})


def _copy_installed(lock: Lock, site: Path) -> None:
    """Copy the files of installed distributions, without programs and byte code."""
    for package in lock.packages:
        for file in metadata.distribution(package.partition("==")[0]).files or ():
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target)


def _about(directory: Path) -> dict[str, Any]:
    """Name, version, licence and pytest's plugins (modules) of an installed distribution, as its metadata says."""
    points = metadata.Distribution.at(directory).entry_points.select(group="pytest11")
    text = (directory / "METADATA").read_text(encoding="utf-8", errors="replace")
    read = email.parser.Parser().parsestr(text, headersonly=True)
    classified = [each.rpartition(" :: ")[2] for each in read.get_all("Classifier", []) if each.startswith("License")]
    said = read["License-Expression"] or "; ".join(classified) or (read["License"] or "").strip().split("\n")[0]
    return {
        "name": read["Name"],
        "version": read["Version"],
        "licence": said or "unknown",
        "plugins": sorted(p.value for p in points),
    }


def _tidy(site: Path) -> None:
    """Remove what depends on the installation: programs, which name an interpreter, and the installer's notes."""
    shutil.rmtree(site / "bin", ignore_errors=True)
    for path in [site / ".lock", *(each for each in site.glob("*.dist-info/*") if each.name in _OF_INSTALLER)]:
        path.unlink(missing_ok=True)
    for record in site.glob("*.dist-info/RECORD"):
        recorded = csv.reader(io.StringIO(record.read_text(encoding="utf-8")))
        rows = [row for row in recorded if row and (site / row[0]).is_file()]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(sorted(row for row in rows if ".." not in row[0]))
        record.write_text(text.getvalue(), encoding="utf-8")


def _add_own(site: Path, lock: Lock) -> None:
    """Add the metadata of the repository's own distribution, which tests may ask for, without its code."""
    if not lock.name:
        return
    directory = site / f"{lock.name.replace('-', '_')}-{lock.version}.dist-info"
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {lock.name}\nVersion: {lock.version}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(points.items()))
        for group, points in sorted(lock.entry_points.items())
    )
    (directory / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")


def _pack(site: Path, target: Path) -> int:
    """Write a tar whose bytes depend on the files alone, and return the files' bytes."""
    total = 0
    with tarfile.open(target, "x", format=tarfile.PAX_FORMAT) as archive:
        for path in _files(site):
            about = tarfile.TarInfo(path.relative_to(site).as_posix())
            about.size = path.stat().st_size
            about.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            total += about.size
            with path.open("rb") as file:
                archive.addfile(about, file)
    return total


def _files(site: Path) -> Iterator[Path]:
    for path in sorted(site.rglob("*")):
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
            yield path
