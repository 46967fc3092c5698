"""Files.Search: run ripgrep in a sandbox's workspace, or a search in plain Python if the sandbox has no ripgrep."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.pb import envd_operations_pb2 as pb
from envd.errors import EnvdError
from envd.guest.link import GuestLink
from envd.server.guestprocess import Finished, candidates, run_in_guest
from envd.server.resolving import resolved
from envd.server.rules import hides
from envd.server.textsearch import raw_bytes
from envd.tools import treesearch
from envd.tools.searching import MAX_PATTERN

_LIMIT, _MAX_LIMIT = 1000, 10_000
_TIMEOUT_S, _MAX_TIMEOUT_S = 10.0, 3600.0
_MAX_TEXT = 4096
"""Maximum bytes of a matching line in the reply."""
_OUTPUT = 4 * 1024 * 1024
_MAX_GLOBS = 256
_OWN = ["-I", "-S", "-X", "utf8", "-c", Path(treesearch.__file__).read_text()]


async def search_files(
    guest: GuestLink, request: pb.FileSearchRequest, hidden: Sequence[str] = ()
) -> pb.FileSearchReply:
    """Find the matching lines, sorted by path, without those of files that the globs in `hidden` match.

    Raises OSError for the path, EnvdError for an invalid pattern or a search that exceeds its timeout.
    """
    limit = min(request.limit or _LIMIT, _MAX_LIMIT)
    timeout_s = request.timeout_s or _TIMEOUT_S
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise EnvdError(f"timeout_s is {timeout_s:g}: it must be above 0 and at most {_MAX_TIMEOUT_S:g}")
    if len(request.pattern) > MAX_PATTERN or len(request.globs) > _MAX_GLOBS:
        raise EnvdError(f"a search has at most {MAX_PATTERN} characters in its pattern and {_MAX_GLOBS} globs")
    if "\0" in request.pattern + request.path + "".join(request.globs):
        raise EnvdError("a pattern, a path or a glob holds a null character")
    path = await resolved(guest, request.path)
    try:
        most = _MAX_LIMIT if hidden else limit  # hidden matches do not count
        engine, done = await _searched(guest, request, path, most, timeout_s)
    except TimeoutError:
        done = Finished(0, b"", b"", cut=False, timed_out=True)
    if done.timed_out:
        raise EnvdError(f"the search took over {timeout_s:g} s: narrow its path, or raise timeout_s")
    if done.code == 2 and done.stderr:
        raise EnvdError(f"pattern {request.pattern[:80]!r}: {_reason(done.stderr)}")
    if done.code not in (0, 1, 2) and not done.cut:
        raise EnvdError(f"the search ended with code {done.code} in the sandbox")
    reply = await asyncio.to_thread(_parsed, done, limit, hidden)
    reply.engine = engine
    return reply


async def _searched(
    guest: GuestLink, request: pb.FileSearchRequest, path: str, limit: int, timeout_s: float
) -> tuple[str, Finished]:
    arguments = _ripgrep(request, path, limit)
    done = await run_in_guest(guest, candidates("rg"), arguments, timeout_s=timeout_s, at_most=_OUTPUT)
    if done is not None:
        return "ripgrep", done
    arguments = [*_OWN, _options(request, path, limit)]
    done = await run_in_guest(guest, candidates("python3"), arguments, timeout_s=timeout_s, at_most=_OUTPUT)
    if done is None:
        raise EnvdError("search needs rg or python3 in the sandbox: install one in its image")
    return "python", done


def _ripgrep(request: pb.FileSearchRequest, path: str, limit: int) -> list[str]:
    options = ["--json", "--no-config", "--no-messages", "--no-require-git", "--no-ignore-global", "--sort", "path"]
    options += ["--encoding", "none", "--max-count", str(limit + 1), "--max-depth", "256"]
    options += [f"--glob={glob}" for glob in request.globs]
    options += ["--ignore-case"] * request.ignore_case + ["--fixed-strings"] * request.fixed_string
    options += ["--hidden", "--no-ignore"] * request.hidden
    return [*options, f"--regexp={request.pattern}", "--", path if path == "." else f"./{path}"]


def _options(request: pb.FileSearchRequest, path: str, limit: int) -> str:
    return json.dumps(
        {
            "pattern": request.pattern,
            "path": path,
            "globs": list(request.globs),
            "ignore_case": request.ignore_case,
            "fixed_string": request.fixed_string,
            "hidden": request.hidden,
            "limit": limit + 1,
        }
    )


def _reason(stderr: bytes) -> str:
    """First `error:` line of ripgrep's stderr, or its first line."""
    lines = stderr.decode(errors="replace").split("\n")
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    return " ".join(said[0].split())[:200]


def _parsed(done: Finished, limit: int, hidden: Sequence[str]) -> pb.FileSearchReply:
    """Matches from the search's output, up to the limit, without those of binary or hidden files."""
    found: list[pb.FileMatch] = []
    of_file = 0
    *lines, _ = done.stdout.split(b"\n")
    try:
        for line in lines:
            event = json.loads(line)
            data = event["data"]
            if event["type"] == "begin":
                of_file = len(found)
            elif event["type"] == "end" and data["binary_offset"] is not None:
                del found[of_file:]
            elif event["type"] == "match" and len(found) <= limit:
                match = _match(data)
                if not hides(hidden, match.path):
                    found.append(match)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise EnvdError(f"the search program in the sandbox sent invalid output: {type(error).__name__}") from error
    return pb.FileSearchReply(matches=found[:limit], truncated=done.cut or len(found) > limit)


def _match(data: dict[str, Any]) -> pb.FileMatch:
    path, lines, submatches = data["path"], data["lines"], data["submatches"]
    name = os.fsdecode(raw_bytes(path)).removeprefix("./")
    return pb.FileMatch(
        path=name.encode("utf-8", "replace").decode(),
        line=data["line_number"],
        column=submatches[0]["start"] + 1 if submatches else 1,
        text=raw_bytes(lines).removesuffix(b"\n")[:_MAX_TEXT],
    )
