"""Licence of a repository, by its metadata or its licence file, and whether tasks may be made of it."""

from __future__ import annotations

import email
import functools
import tomllib
from collections.abc import Iterator
from pathlib import PurePosixPath

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
}
"""Names that metadata uses beside SPDX identifiers."""
_PHRASES = (
    ("GNU AFFERO GENERAL PUBLIC LICENSE", "AGPL-3.0-only"),
    ("GNU LESSER GENERAL PUBLIC LICENSE", "LGPL-3.0-only"),
    ("GNU GENERAL PUBLIC LICENSE", "GPL-3.0-only"),
    ("MOZILLA PUBLIC LICENSE", "MPL-2.0"),
    ("APACHE LICENSE", "Apache-2.0"),
    ("PERMISSION IS HEREBY GRANTED, FREE OF CHARGE", "MIT"),
    ("REDISTRIBUTION AND USE IN SOURCE AND BINARY FORMS", "BSD-3-Clause"),
    ("PERMISSION TO USE, COPY, MODIFY, AND/OR DISTRIBUTE THIS SOFTWARE", "ISC"),
)


def licence_of(tree: Tree) -> str:
    """SPDX expression of a repository's licence, or UNKNOWN."""
    return next(filter(None, map(_expression, _claims(tree))), UNKNOWN)


def check_licence(name: str, licence: str, allowed: tuple[str, ...]) -> None:
    """Raise TaskError for an unknown or a copyleft licence that is not in `allowed`."""
    if licence in allowed or _is_free(licence):
        return
    what = "no known licence" if licence == UNKNOWN else f"the licence {licence}, which is not permissive"
    raise TaskError(f"{name} has {what}: if you may train on it, add --allow-license {licence}")


def _claims(tree: Tree) -> Iterator[str]:
    """Texts that name a licence, the most exact first."""
    about = email.message_from_bytes(tree.get("PKG-INFO", b""))
    yield about.get("License-Expression", "")
    yield from _project_licence(tree.get("pyproject.toml", b""))
    yield about.get("License", "")
    for classifier in about.get_all("Classifier", []):
        if classifier.startswith("License ::"):
            yield classifier.rpartition("::")[2].strip()
    for path in sorted(tree):
        if PurePosixPath(path).stem.upper() in ("LICENSE", "LICENCE", "COPYING") and "/" not in path:
            text = " ".join(tree[path].decode(errors="replace").upper().split())
            yield from (name for phrase, name in _PHRASES if phrase in text)


def _project_licence(data: bytes) -> Iterator[str]:
    try:
        found = tomllib.loads(data.decode()).get("project", {})
    except (ValueError, UnicodeDecodeError):
        return
    licence = found.get("license", "")
    yield licence if isinstance(licence, str) else str(licence.get("text", ""))


def _expression(text: str) -> str | None:
    text = _COMMON.get(text.strip().lower(), text.strip())
    if not text or len(text) > 200:
        return None
    try:
        return str(get_spdx_licensing().parse(text, validate=True))
    except (ExpressionError, LicenceParseError):
        return None


@functools.cache
def _categories() -> dict[str, str]:
    return {entry["spdx_license_key"]: entry["category"] for entry in get_license_index() if entry["spdx_license_key"]}


def _is_free(licence: str) -> bool:
    """Whether every licence of an expression is permissive; of alternatives, whether one is."""
    try:
        parsed = get_spdx_licensing().parse(licence)
    except (ExpressionError, LicenceParseError):
        return False
    return all(_categories().get(key) in _FREE for key in get_spdx_licensing().license_keys(parsed)) or any(
        _is_free(part.strip(" ()")) for part in licence.split(" OR ") if " OR " in licence
    )
