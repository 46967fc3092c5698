"""Search as ripgrep does it, in plain Python, for sandboxes that have no ripgrep; its answer has the form of `rg
--json`.

Honoured: .gitignore, .ignore and .rgignore of the workspace, hidden names, globs, case, fixed strings, binary files
left out, links not followed. Not: global ignore files, and regular expressions are Python's. Needs the standard library
only: this very file runs in the sandbox.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator

_IGNORE_FILES = (".gitignore", ".ignore", ".rgignore")
_MAX_FILE = 256 * 1024 * 1024
_MAX_IGNORE = 1024 * 1024
_MAX_DEPTH = 256
Rule = tuple["re.Pattern[str]", bool, bool]
"""A pattern over a path, whether it takes back (`!`), whether it is of directories only."""


def rule(line: str) -> Rule | None:
    """One line of an ignore file; None where it says nothing or can't be understood."""
    line = line.rstrip("\r\n")
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    if not line or line.startswith("#"):
        return None
    negated = line.startswith("!")
    line = line[1:] if negated else line
    directories = line.endswith("/")
    line = line.rstrip("/") if directories else line
    anchored = "/" in line
    try:
        inner = re.compile(("" if anchored else "(?:.*/)?") + _translated(line.removeprefix("/")), re.DOTALL)
    except re.error:
        return None
    return inner, negated, directories


def _translated(glob: str) -> str:
    """A glob of an ignore file as a regular expression."""
    out = []
    at = 0
    while at < len(glob):
        if glob.startswith("**/", at) and (at == 0 or glob[at - 1] == "/"):
            out.append("(?:.*/)?")
            at += 3
        elif glob[at:] == "**" and at and glob[at - 1] == "/":
            out.append(".+")
            at += 2
        elif glob[at] == "*":
            while at < len(glob) and glob[at] == "*":
                at += 1
            out.append("[^/]*")
        elif glob[at] == "[" and "]" in glob[at + 2 :]:
            end = glob.index("]", at + 2)
            inner = glob[at + 1 : end].replace("\\", "\\\\")
            out.append("(?!/)[" + ("^" + inner[1:] if inner[0] in "!^" else inner) + "]")
            at = end + 1
        else:
            if glob[at] == "\\" and at + 1 < len(glob):
                at += 1
                out.append(re.escape(glob[at]))
            else:
                out.append("[^/]" if glob[at] == "?" else re.escape(glob[at]))
            at += 1
    return "".join(out)


def verdict(rules: list[Rule], path: str, is_dir: bool) -> bool | None:
    """True: these rules name the path; False: they take it back; None: they say nothing.

    The last one that matches decides.
    """
    for pattern, negated, directories in reversed(rules):
        if (is_dir or not directories) and pattern.fullmatch(path):
            return not negated
    return None


class Tree:
    """The files of a workspace that a search looks at."""

    def __init__(self, root: str, globs: list[str], hidden: bool) -> None:
        self._root = root
        self._hidden = hidden
        self._globs = [found for found in map(rule, globs) if found]
        self._wanted = any(not negated for _, negated, _ in self._globs)

    def files(self, start: str) -> Iterator[str]:
        """Paths below `start`, itself where it is a file; sorted by name within each directory."""
        if not stat.S_ISDIR(os.stat(os.path.join(self._root, start)).st_mode):  # noqa: PTH116, PTH118 - pathlib costs half this process's start
            yield start
            return
        above: list[tuple[str, list[Rule]]] = []
        parts = [part for part in start.split("/") if part not in ("", ".")]
        for count in range(len(parts)):
            above.append(self._rules("/".join(parts[:count])))
        yield from self._below("/".join(parts), above, 0)

    def _below(self, directory: str, above: list[tuple[str, list[Rule]]], depth: int) -> Iterator[str]:
        rules = [*above, self._rules(directory)]
        try:
            with os.scandir(os.path.join(self._root, directory)) as found:  # noqa: PTH118
                entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        except OSError:
            return
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            is_dir = entry.is_dir(follow_symlinks=False)
            if entry.is_symlink() or self._left_out(path, entry.name, is_dir, rules):
                continue
            if is_dir and depth < _MAX_DEPTH:
                yield from self._below(path, rules, depth + 1)
            elif not is_dir:
                yield path

    def _left_out(self, path: str, name: str, is_dir: bool, rules: list[tuple[str, list[Rule]]]) -> bool:
        said = verdict(self._globs, path, is_dir)
        if said is not None:
            return not said  # a glob names what is wanted, with `!` what is not
        if self._wanted and not is_dir:
            return True
        if self._hidden:
            return False
        for directory, own in reversed(rules):
            ignored = verdict(own, path[len(directory) + 1 :] if directory else path, is_dir)
            if ignored is not None:
                return ignored
        return name.startswith(".")

    def _rules(self, directory: str) -> tuple[str, list[Rule]]:
        found: list[Rule] = []
        for name in () if self._hidden else _IGNORE_FILES:
            try:
                data = read(os.path.join(self._root, directory, name), _MAX_IGNORE)  # noqa: PTH118
            except OSError:
                continue
            found += [line for line in map(rule, data.decode("utf-8", "replace").split("\n")) if line]
        return directory, found


def read(path: str, at_most: int) -> bytes:
    """A regular file's bytes, none of one that is larger. Never waits for a pipe. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > at_most:
            return b""
        return file.read()


def events(tree: Tree, start: str, pattern: re.Pattern[bytes], limit: int) -> Iterator[dict[str, object]]:
    """What `rg --json` says of each line that matches, up to `limit`."""
    for path in tree.files(start):
        try:
            data = read(path, _MAX_FILE)
        except OSError:
            continue
        if b"\0" in data:
            continue
        for number, line in enumerate(data.split(b"\n") if data else (), 1):
            found = pattern.search(line)
            if found is None or (not line and data.endswith(b"\n") and number == data.count(b"\n") + 1):
                continue
            yield {
                "type": "match",
                "data": {
                    "path": {"text": os.fsencode(path).decode("utf-8", "replace")},
                    "line_number": number,
                    "lines": {"text": line.decode("utf-8", "replace")},
                    "submatches": [{"start": found.start()}],
                },
            }
            limit -= 1
            if limit <= 0:
                return


def main(arguments: list[str], write: Callable[[str], object], complain: Callable[[str], object]) -> int:
    """Options as JSON; events, one a line. 2: the pattern is none."""
    options = json.loads(arguments[0])
    source = os.fsencode(options["pattern"])
    try:
        flags = re.IGNORECASE if options["ignore_case"] else re.NOFLAG
        text = re.escape(options["pattern"]) if options["fixed_string"] else options["pattern"]
        re.compile(text)
        pattern = re.compile(re.escape(source) if options["fixed_string"] else source, flags)
    except (re.error, RecursionError, OverflowError) as error:
        complain(f"error: {getattr(error, 'msg', 'too complex')}\n")
        return 2
    tree = Tree(".", options["globs"], options["hidden"])
    for event in events(tree, options["path"], pattern, options["limit"]):
        write(json.dumps(event) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdout.write, sys.stderr.write))
