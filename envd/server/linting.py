"""The `lint` tool: run linters as processes in the sandbox, on the files below a path."""

from __future__ import annotations

import time
from collections.abc import Sequence

from envd.guest.link import GuestLink
from envd.server.guestprocess import candidates, run_in_guest
from envd.tools.files import ToolError
from envd.tools.linters import LINTERS, Finding, Linter, as_text, linter_of
from envd.tools.paths import relative

_MAX_FILES = 2000
_MAX_SINGLE = 100
"""Maximum number of files for a linter that takes one file at a time."""
_MAX_FINDINGS = 10_000


async def lint(guest: GuestLink, path: str, timeout_s: float) -> str:
    """Run the linters and return their findings as text. Raises ToolError, OSError for the path, TimeoutError."""
    deadline = time.monotonic() + timeout_s
    where = relative(path)
    entry = await guest.stat(where)
    if entry.type == "directory":
        listed, cut = await guest.list(where, depth=64, limit=50_000, skip_hidden=True, files_only=True)
        paths = [each.path for each in listed if each.type == "file"]
    else:
        cut, paths = False, [where]
        if linter_of(where) is None:
            raise ToolError(f"error: no linter for {path}: there are some for {' '.join(_suffixes())}")
    findings: list[Finding] = []
    notes = [f"not looked at: files beyond 50000 below {path}"] if cut else []
    for linter in LINTERS:
        own = [each for each in paths if linter_of(each) is linter]
        most = _MAX_SINGLE if linter.one_file else _MAX_FILES
        if len(own) > most:
            notes.append(f"not looked at: {len(own) - most} of {len(own)} files for {linter.program}")
        said = await _run(guest, linter, own[:most], deadline)
        if said is None:
            notes.append(f"not looked at: {len(own)} files for {linter.program}, which is not in the sandbox")
        else:
            findings += said
    return as_text(findings[:_MAX_FINDINGS], notes)


def _suffixes() -> list[str]:
    return [suffix for linter in LINTERS for suffix in linter.suffixes]


async def _run(guest: GuestLink, linter: Linter, paths: Sequence[str], deadline: float) -> list[Finding] | None:
    """Findings of a linter; None if the sandbox does not have the program."""
    found: list[Finding] = []
    turns = [[each] for each in paths] if linter.one_file else [list(paths)] if paths else []
    for turn in turns:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        files = [f"./{each}" for each in turn]
        done = await run_in_guest(guest, candidates(linter.program), [*linter.arguments, *files], timeout_s=left)
        if done is None:
            return None
        if done.timed_out:
            raise TimeoutError
        if done.cut:
            raise ToolError(f"error: {linter.program} has too much to say: lint a directory below")
        try:
            if done.code not in linter.codes:
                raise ValueError(f"exit {done.code}")
            found += [each._replace(path=_inside(each.path, turn)) for each in linter.parse(done.stdout, done.stderr)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            words = " ".join(done.stderr.decode(errors="replace").split())[:200] or f"exit {done.code}"
            raise ToolError(f"error: {linter.program} failed: {words}") from error
    return found


def _inside(said: str, turn: Sequence[str]) -> str:
    """Convert a linter's file name to the path that the tools use: some linters report the resolved path."""
    name = said.removeprefix("./")
    return name if name in turn else next((each for each in turn if said.endswith("/" + each)), name)
