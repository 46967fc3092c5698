"""The `search` tool in a sandbox: runs ripgrep if its result equals that of our own search, else our own search, as a
process there.

Ripgrep takes a few milliseconds and never backtracks. Its pattern syntax differs from Python's, so it gets only the
patterns that mean the same in both. (Remaining differences: characters outside ASCII that only one of them treats as a
word character or a space, and bytes that are not UTF-8, which only our own search's `.` matches.) Links on the path, a
null character far into a file, or more output than is kept also lead to our own search.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envd.guest.link import GuestLink
from envd.server.guestprocess import Finished, candidates, run_in_guest
from envd.tools import searching
from envd.tools.files import Search, ToolError
from envd.tools.output import Output

_LITERAL = r"[A-Za-z0-9_ \"'<>=!@%&,;:/~`#\-\u00a1-\ud7ff]|\\[.^$*+?()\[\]{}|\\/\-\"'#&~!%@,;:=` ]"
_SET_ITEM = (
    r"(?:[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]|[A-Za-z0-9_ \"'<>=!@%,;:/`#.*+?(){}|$]|\\[.^$*+?()\[\]{}|\\/\-dsw])"
)
_REPEAT = r"(?:[*+?]|\{[0-9]{1,3}(?:,[0-9]{0,3})?\})\??"
_ATOM = rf"(?:{_LITERAL}|\.|\\[dsw]|\[{_SET_ITEM}+\]|\))"
PORTABLE = re.compile(
    rf"(?:\(\?i\))?(?:{_ATOM}(?:{_REPEAT})?(?![*+?{{])|\((?:\?:)?(?![*+?{{])|[|^$](?![*+?{{])|\\[bB](?![*+?{{]))*"
)
"""Patterns that have the same meaning in Python and ripgrep."""
_MAX_PORTABLE = 1000
_RIPGREP = (
    "--json --no-config --no-ignore --hidden --no-messages --encoding none --no-mmap --binary --sort path "
    f"--max-filesize {searching.MAX_FILE_BYTES} --max-depth {searching.MAX_DEPTH}"
).split() + [f"--glob=!{name}" for name in sorted(searching.HIDDEN)]
_OWN = ["-I", "-S", "-X", "utf8", "-c", Path(searching.__file__).read_text()]
_PROBE = 8192


async def search_text(guest: GuestLink, need: Search, timeout_s: float) -> Output:
    """Find the matching lines. Raises BadPattern, ToolError, OSError as the local search does, and TimeoutError."""
    if len(need.pattern) <= _MAX_PORTABLE and PORTABLE.fullmatch(need.pattern) and await no_links_on(guest, need.path):
        where = need.path if need.path == "." else f"./{need.path}"
        arguments = [*_RIPGREP, "--regexp", need.pattern, "--", where]
        done = await run_in_guest(guest, candidates("rg"), arguments, timeout_s=timeout_s)
        if done is not None:
            found = _ripgrep_output(done)
            if found is not None:
                return found
    arguments = [*_OWN, need.pattern, need.path]
    done = await run_in_guest(guest, candidates("python3"), arguments, timeout_s=timeout_s)
    if done is None:
        raise ToolError("error: search needs rg or python3 in the sandbox")
    return _own_output(done)


async def no_links_on(guest: GuestLink, path: str) -> bool:
    """Whether a path (as `relative` gives it) exists without links in it, which ripgrep would resolve from the
    sandbox's root.
    """
    parts = [] if path == "." else path.split("/")
    if ".." in parts or len(parts) > searching.MAX_DEPTH:
        return False
    try:
        for count in range(1, len(parts) + 1):
            entry = await guest.stat("/".join(parts[:count]), follow=False)
            if entry.type not in ("directory", "file"):
                return False
    except OSError:
        return False
    return True


def _ripgrep_output(done: Finished) -> Output | None:
    """Convert ripgrep's output to the tool's; None if our own search must run instead."""
    if done.cut or done.timed_out or done.code not in (0, 1, 2) or done.stderr:
        return None
    output = Output()
    try:
        for line in _ripgrep_lines(done.stdout):
            output.feed(b"\n" + line if output.true_bytes else line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return output


def _ripgrep_lines(stdout: bytes) -> Iterator[bytes]:
    found: list[bytes] = []
    for raw in stdout.splitlines():
        event = json.loads(raw)
        data = event["data"]
        if event["type"] == "match":
            name = raw_bytes(data["path"]).removeprefix(b"./")
            found.append(b"%b:%d: %b" % (name, data["line_number"], raw_bytes(data["lines"]).removesuffix(b"\n")))
        elif event["type"] == "end":
            if data["binary_offset"] is None:
                yield from found
            elif data["binary_offset"] >= _PROBE:
                raise ValueError("a null character beyond the beginning")
            found = []


def raw_bytes(value: dict[str, Any]) -> bytes:
    """Bytes of a text or a path in ripgrep's JSON."""
    data: bytes = value["text"].encode() if "text" in value else base64.b64decode(value["bytes"])
    return data


def _own_output(done: Finished) -> Output:
    if done.timed_out:
        raise TimeoutError
    if done.stdout.startswith(b"bad "):
        raise searching.BadPattern(done.stdout[4:260].decode("utf-8", "surrogateescape"))
    if re.fullmatch(rb"errno \d{1,3}", done.stdout):
        raise OSError(int(done.stdout[6:]), "search")
    header = re.match(rb"(\d{1,18}) (\d{1,8})\n", done.stdout)
    if done.code or done.cut or header is None:
        raise ToolError(f"error: the tool failed: search ended with code {done.code}")
    middle = header.end() + int(header[2])
    return Output.of_parts(done.stdout[header.end() : middle], done.stdout[middle:], int(header[1]))
