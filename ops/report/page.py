"""Render the report as one file with markup, style, script and data, without network access.

The data is gzipped JSON in base64, which cannot close its element. The script creates text nodes only, never markup,
and the content security policy allows no other script. So text of a policy stays text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from functools import cache
from importlib.resources import files
from typing import Any

from contracts.digests import canonical_json

SCRIPTS = ("dom.js", "charts.js", "sections.js", "transcript.js", "viewer.js", "main.js")
_MARK = re.compile(r"%([A-Z]+)%")


def render(data: dict[str, Any]) -> bytes:
    """HTML page that shows `data`. Equal data gives equal bytes."""
    style, script = _web("page.css"), "\n".join(_web(name) for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    rules = {
        "default-src": "'none'",
        "script-src": _source(script),
        "style-src": _source(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    parts = {
        "TITLE": html.escape(f"{data['experiment']} {data['iteration']}"),
        "POLICY": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": base64.b64encode(gzip.compress(canonical_json(data), mtime=0)).decode(),
    }
    return _MARK.sub(lambda found: parts[found.group(1)], _web("page.html")).encode()


def read_data(page: bytes) -> dict[str, Any]:
    """Data of a rendered page, the inverse of `render`."""
    import json

    found = re.search(rb'<script id="data"[^>]*>([^<]*)</script>', page)
    assert found is not None, "a rendered page contains its data"
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found.group(1))))
    return data


@cache
def _web(name: str) -> str:
    return (files("ops.report") / "web" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
