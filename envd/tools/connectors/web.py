"""The tool `http`: one request through the sandbox's proxy; also what the browser fetches pages with."""

from __future__ import annotations

import codecs
import http.client
import os
import re
import urllib.error
import urllib.request
from email.message import Message
from typing import NamedTuple
from urllib.parse import quote, urldefrag, urlsplit

from envd.tools.connectors.answers import Answer, Arguments, Refused

BODY = 1 << 20
"""Bytes read of a body."""
SHOWN = ("content-type", "content-length", "location", "allow", "etag", "retry-after", "set-cookie", "www-authenticate")
"""Headers of a response that are shown."""


_CHARSET = re.compile(rb"<meta[^>]{0,500}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE | re.ASCII)


class Response(NamedTuple):
    """Response of a server."""

    url: str
    status: int
    reason: str
    headers: Message
    body: bytes
    more: bool
    """Whether the body is longer than BODY."""

    @property
    def text(self) -> str:
        """Body as text."""
        return decoded(self.body, self.markup, self.headers.get_content_charset() or "")

    @property
    def markup(self) -> bool:
        """Whether the body is HTML."""
        return self.headers.get_content_type() in ("text/html", "application/xhtml+xml")


def decoded(body: bytes, markup: bool, charset: str = "") -> str:
    """Text of a body, in the charset of its byte order mark, else the given one, else its markup's, else UTF-8."""
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        charset = "utf-16"
    elif body.startswith(codecs.BOM_UTF8):
        charset = "utf-8-sig"
    elif not charset and markup and (named := _CHARSET.search(body[:1024])):
        charset = named[1].decode().lower()
        charset = "utf-8" if charset.startswith("utf-16") else charset  # it could not be read so far
    try:
        text = body.decode(charset or "utf-8", "replace")
    except (LookupError, ValueError):
        text = body.decode("utf-8", "replace")
    return f"[{len(body)} bytes that are not text]" if "\0" in text else text


def run(arguments: Arguments) -> Answer:
    """See the schema of `http`."""
    found = fetch(
        arguments["url"], arguments["method"], arguments.get("body"), arguments.get("headers", {}), plain_opener()
    )
    lines = [f"HTTP {found.status} {found.reason}".rstrip()]
    lines += [f"{name.lower()}: {value}" for name, value in found.headers.items() if name.lower() in SHOWN]
    shown = Answer("\n".join(lines) + "\n\n" + found.text)
    shown.note = f"[only the first {BODY} bytes were read]" if found.more else ""
    return shown


def plain_opener(*more: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Opener of http and https alone, by the proxy that the environment names."""
    opener = urllib.request.OpenerDirector()
    for each in (urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(), *more):
        opener.add_handler(each)
    return opener


def fetch(
    url: str,
    method: str,
    body: str | None,
    headers: dict[str, str],
    opener: urllib.request.OpenerDirector,
) -> Response:
    """Response to a request. Raises Refused if there is none."""
    url = urldefrag(url.strip())[0]
    url = quote(url, safe="%/:=&?~#+!$,;'@()*[]")  # pages write spaces and letters of all languages
    host = urlsplit(url).hostname
    if urlsplit(url).scheme not in ("http", "https") or not host:
        raise Refused(f"not an http:// or https:// address: {url[:200]}")
    try:
        request = urllib.request.Request(url, None if body is None else body.encode(), headers, method=method)
        if body is not None and not request.has_header("Content-type"):
            request.add_header("Content-type", "application/json" if body[:1] in ("{", "[") else "text/plain")
        try:
            response = opener.open(request)
        except urllib.error.HTTPError as error:
            if error.code in (301, 302, 303, 307, 308) and "location" in error.headers:
                raise Refused(f"redirected too often, or to another protocol: {url[:200]}") from None
            response = error
        with response:
            content = response.read(BODY + 1)
            return Response(
                response.geturl(),
                response.status,
                response.reason,
                response.headers,
                content[:BODY],
                len(content) > BODY,
            )
    except (OSError, http.client.HTTPException, ValueError) as error:
        words = str(getattr(error, "reason", "") or error or type(error).__name__)
        if "http_proxy" not in os.environ and not (host == "localhost" or host.startswith("127.")):
            words += " (this sandbox has no network: its rules allow no destination)"
        raise Refused(f"no response from {host[:200]}: {words}") from None
