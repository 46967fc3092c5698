"""Licence of a repository, by its metadata or its licence file, and whether tasks may be made of it."""

from __future__ import annotations

import email
import functools
import re
import tomllib
from collections.abc import Iterator
from email.message import Message
from pathlib import PurePosixPath
from typing import Any

from license_expression import ExpressionError, get_license_index, get_spdx_licensing
from license_expression import ParseError as LicenceParseError

from curation.errors import TaskError
from curation.tasks.importing.trees import Tree

UNKNOWN = "unknown"
_FREE = frozenset({"Permissive", "Public Domain"})
_COMMON = {
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "mit license": "MIT",
    "apache software license": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "isc license (iscl)": "ISC",
    "python software foundation license": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "gnu general public license v3 (gplv3)": "GPL-3.0-only",
    "gnu lesser general public license v3 (lgplv3)": "LGPL-3.0-only",
    "proprietary": "LicenseRef-Proprietary",
    "other/proprietary license": "LicenseRef-Proprietary",
}
"""Names that metadata uses beside SPDX identifiers."""
_PHRASES = (
    ("GNU AFFERO GENERAL PUBLIC LICENSE", "AGPL-{}-only", "3.0"),
    ("GNU LESSER GENERAL PUBLIC LICENSE", "LGPL-{}-only", "3.0"),
    ("GNU LIBRARY GENERAL PUBLIC LICENSE", "LGPL-{}-only", "2.0"),
    ("GNU GENERAL PUBLIC LICENSE", "GPL-{}-only", "3.0"),
    ("MOZILLA PUBLIC LICENSE", "MPL-{}", "2.0"),
    ("APACHE LICENSE", "Apache-{}", "2.0"),
    ("PERMISSION IS HEREBY GRANTED, FREE OF CHARGE", "MIT", ""),
    ("REDISTRIBUTION AND USE IN SOURCE AND BINARY FORMS", "BSD-3-Clause", ""),
    ("PERMISSION TO USE, COPY, MODIFY, AND/OR DISTRIBUTE THIS SOFTWARE", "ISC", ""),
    ("BUSINESS SOURCE LICENSE", "BUSL-1.1", ""),
    ("SERVER SIDE PUBLIC LICENSE", "SSPL-1.0", ""),
    ("ELASTIC LICENSE", "Elastic-2.0", ""),
    ("FUNCTIONAL SOURCE LICENSE", "LicenseRef-FSL", ""),
    ("COMMONS CLAUSE", "LicenseRef-Commons-Clause", ""),
    ("POLYFORMPROJECT.ORG/LICENSES", "LicenseRef-PolyForm", ""),
    ("ATTRIBUTION-NONCOMMERCIAL", "LicenseRef-CC-BY-NC", ""),
    ("CC BY-NC", "LicenseRef-CC-BY-NC", ""),
)
"""Words of licence texts, the licence, and its version where the text names none."""
_VERSION = re.compile(r".{0,60}?\bV(?:ERSION)? ?(\d+(?:\.\d+)?)")
"""Version of a licence, after its name."""


def licence_of(tree: Tree) -> str:
    """SPDX expression of a repository's licence, or UNKNOWN."""
    about = email.message_from_string(tree.get("PKG-INFO", b"").decode(errors="replace"))
    project = _project_licence(tree.get("pyproject.toml", b""))
    for stated in (about.get("License-Expression", ""), project if isinstance(project, str) else ""):
        if stated.strip():  # a licence file may be of a part only
            return _expression(stated) or UNKNOWN
    text = str(project.get("text", "")) if isinstance(project, dict) else ""
    return next(filter(None, map(_expression, _claims(tree, about, text))), UNKNOWN)


def check_licence(name: str, licence: str, allowed: tuple[str, ...]) -> None:
    """Raise TaskError for an unknown or a copyleft licence that is not in `allowed`."""
    if licence in allowed or _is_free(licence):
        return
    what = "no known licence" if licence == UNKNOWN else f"the licence {licence}, which is not permissive"
    raise TaskError(f"{name} has {what}: if you may train on it, add --allow-license {licence}")


def _claims(tree: Tree, about: Message, text: str) -> Iterator[str]:
    """Texts that may name a licence, the most exact first. about: of PKG-INFO. text: of pyproject.toml."""
    yield text
    yield about.get("License", "")
    for classifier in about.get_all("Classifier", []):
        if classifier.startswith("License ::"):
            yield classifier.rpartition("::")[2].strip()
    for path in sorted(tree):
        if PurePosixPath(path).stem.upper() in ("LICENSE", "LICENCE", "COPYING") and "/" not in path:
            yield _licence_of_text(" ".join(tree[path].decode(errors="replace").upper().split()))


def _licence_of_text(text: str) -> str:
    """Licence of a text in capitals, empty if unknown: the first one that it names, but of those that are not
    permissive if there are any. Licences name others further down.
    """
    found = []
    for phrase, licence, usual in _PHRASES:
        at = text.find(phrase)
        if at >= 0:
            version = _VERSION.match(text, at + len(phrase))
            number = version[1] if version else usual
            licence = licence.format(number if "." in number else f"{number}.0")
            found.append((_is_free(licence), at, licence))
    return min(found)[2] if found else ""


def _project_licence(data: bytes) -> Any:
    """`project.license` of pyproject.toml: an expression, or a table."""
    try:
        return tomllib.loads(data.decode()).get("project", {}).get("license")
    except (ValueError, AttributeError, RecursionError):
        return None  # `read_project` names it


def _expression(text: str) -> str | None:
    text = _COMMON.get(text.strip().lower(), text.strip())
    if not text or len(text) > 200:
        return None
    spdx = get_spdx_licensing()
    try:
        found = spdx.parse(text)
        return str(found) if all(key.startswith("LicenseRef-") for key in spdx.unknown_license_keys(found)) else None
    except (ExpressionError, LicenceParseError, IndexError, AssertionError):  # the last two: such as `()`
        return None


@functools.cache
def _categories() -> dict[str, str]:
    return {entry["spdx_license_key"]: entry["category"] for entry in get_license_index() if entry["spdx_license_key"]}


def _is_free(licence: str) -> bool:
    """Whether every licence of an expression is permissive; of alternatives, whether one is."""
    spdx = get_spdx_licensing()

    def free(part: Any) -> bool:
        if isinstance(part, spdx.AND):
            return all(map(free, part.args))
        if isinstance(part, spdx.OR):
            return any(map(free, part.args))
        keys = spdx.license_keys(part)  # a licence, and its exception if it has one
        return bool(keys) and all(_categories().get(key) in _FREE for key in keys)

    try:
        return free(spdx.parse(licence))
    except (ExpressionError, LicenceParseError):
        return False
