"""Folders of wheels made by tests, so that packages can be installed without an index."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

OTHER_PYTEST = "99.0"
_LEXER = re.compile(r"^pygments/(lexers|styles|formatters)/(?!__init__|_mapping|python|diff|special|default|terminal)")


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes],
    needs: tuple[str, ...] = (),
    more: str = "",
    plugin: str = "",
) -> Path:
    """Write a pure Python wheel. more: further lines of its metadata. plugin: its module that is a plugin of pytest."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {each}\n" for each in needs)
    content = dict(files) | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}{more}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if plugin:
        content[f"{info}/entry_points.txt"] = f"[pytest11]\n{name} = {plugin}\n".encode()
    record = [f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in sorted(content.items())]
    content[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    wheel = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in content.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return wheel


def pytest_wheels(folder: Path, *, other: bool = False) -> None:
    """Write wheels of the pytest that is installed here. other: call its version OTHER_PYTEST.

    Of pygments it is what pytest uses, since all of it takes seconds to compile.
    """
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        found = metadata.distribution(name)
        paths = [each for each in found.files or () if each.suffix == ".py" and not _LEXER.search(str(each))]
        files = {str(each): Path(str(each.locate())).read_bytes() for each in paths}
        needs = {"pytest": ("pluggy", "iniconfig", "packaging", "pygments")}.get(name, ())
        version = OTHER_PYTEST if other and name == "pytest" else found.version
        write_wheel(folder, name, version, files, needs)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
