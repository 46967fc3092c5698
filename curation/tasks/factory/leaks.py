"""Keep the answer from the agent: cut failing tests out of its files, find copies of the fixed code."""

from __future__ import annotations

import ast
import io
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

from contracts.syntax import has_lone_return, parse_python
from curation.tasks.factory.baseline import TestFunction
from curation.tasks.factory.functions import Function, FunctionNode, Source, first_line
from curation.tasks.importing.trees import Tree

MOST_CONTAINED = 0.8
"""Largest share of a function's code that another file may hold."""
MOST_NAMESAKES = 8
"""Most functions of the same qualified name that are tried in the place of a function."""
_WINDOW = 8
"""Tokens that are compared at once."""
_LEAST = 24
"""Tokens of a function below which a copy of most of it is chance."""
_WORD = re.compile(r"[^\W\d]\w{3,}")
_DEFINITION = re.compile(rb"\bdef (\w+)\(")
_LAYOUT = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})


def without_tests(tree: Tree, tests: Iterable[TestFunction]) -> Tree | str:
    """`tree` without the definitions of these tests, or the reason why they can't be cut out."""
    lines: dict[str, set[int]] = {}
    for test in tests:
        if test.path not in tree:
            return "a failing test has no place in the repository"
        lines.setdefault(test.path, set()).add(test.line)
    cut = dict(tree)
    for path, starts in lines.items():
        changed = _cut(tree[path], frozenset(starts))
        if changed is None:
            return "a failing test can't be cut out of its file"
        cut[path] = changed
    return cut


@dataclass(frozen=True)
class _Lines:
    """Lines of a function in its file, from 1."""

    first: int
    """Of its first decorator, or of the definition."""
    definition: int
    body: int
    """Of its first statement."""
    last: int
    indent: int


@lru_cache(maxsize=256)
def _bodies(data: bytes) -> Sequence[tuple[int, Sequence[_Lines]]] | None:
    """For each body that holds functions (the module's, a class's, an `if`'s, not a function's): its number of
    statements, and the lines of these functions. None for a file that is not Python, or whose lines can't be counted.
    """
    if has_lone_return(data):
        return None
    try:
        module = parse_python(data)
    except (SyntaxError, ValueError):
        return None
    found = []
    for parent in ast.walk(module):
        body = getattr(parent, "body", None)
        if not isinstance(body, list) or isinstance(parent, FunctionNode):
            continue
        functions = [
            _Lines(
                first_line(node),
                node.lineno,
                node.body[0].lineno,
                node.end_lineno or node.lineno,
                node.col_offset,
            )
            for node in body
            if isinstance(node, FunctionNode)
        ]
        if functions:
            found.append((len(body), functions))
    return found


@lru_cache(maxsize=256)
def _cut(data: bytes, starts: frozenset[int]) -> bytes | None:
    """A test file without the functions that begin at these lines (of the definition or of a decorator).

    The results are kept: several bugs fail the same tests, and to parse a long file takes a tenth of a second.
    """
    if (bodies := _bodies(data)) is None:
        return None
    lines: list[bytes | None] = list(data.split(b"\n"))
    left = set(starts)
    for statements, functions in bodies:
        gone = 0
        for each in functions:
            if left & set(range(each.first, each.body + 1)) or starts & set(range(each.first, each.definition + 1)):
                left -= set(range(each.first, each.body + 1))
                gone += 1
                lines[each.first - 1 : each.last] = [None] * (each.last - each.first + 1)
                if gone == statements:
                    lines[each.first - 1] = b" " * each.indent + b"pass"
    if left:
        return None
    changed = b"\n".join(line for line in lines if line is not None)
    try:
        parse_python(changed)
    except (SyntaxError, ValueError):
        return None
    return changed


@cache
def standard_library() -> Mapping[str, bytes]:
    """Sources of Python's standard library, with its tests, which every sandbox shows."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return {f"python/{path.relative_to(root)}": path.read_bytes() for path in paths}


class Copies:
    """Finds files, other than a function's own, that hold most of its code: of a short one, all of it and its name."""

    def __init__(self, tree: Tree, packages: Mapping[str, bytes]) -> None:
        """packages: sources beside the tree that an agent can read."""
        self._tree, self._packages = tree, packages
        self._of_packages: dict[str, Counter[int]] = {}
        self._parsed: dict[int, list[Function]] = {}
        """Functions of a file, by the identity of its content."""
        self._found: dict[str, str | None] = {}

    @cached_property
    def _windows(self) -> Mapping[str, Counter[int]]:
        return {path: _windows(data) for path, data in self._tree.items() if b"\0" not in data[:1024]}

    @cached_property
    def _defining(self) -> Mapping[bytes, list[str]]:
        """Files of the packages by the names of the functions in them."""
        found: dict[bytes, list[str]] = {}
        for path, data in self._packages.items():
            for name in set(_DEFINITION.findall(data)):
                found.setdefault(name, []).append(path)
        return found

    def of(self, function: Function) -> str | None:
        """Path of a file with a copy, or None. The function's own file counts without the function."""
        if function.key not in self._found:
            wanted = _windows(function.text.encode())
            defining = self._defining.get(function.node.name.encode(), [])
            copy = self._same(function, exact=len(wanted) < _LEAST)
            if copy is None and len(wanted) >= _LEAST:
                copy = self._long(function, wanted, defining)
            self._found[function.key] = copy
        return self._found[function.key]

    def _long(self, function: Function, wanted: Counter[int], defining: Sequence[str]) -> str | None:
        least = MOST_CONTAINED * len(wanted)
        for path, found in self._windows.items():
            own = wanted if path == function.source.path else Counter[int]()
            if sum(found[each] > own[each] for each in wanted) > least:
                return path
        words = {each.encode() for each in _WORD.findall(function.text)}
        for path in defining:
            if not _holds_most(self._packages[path], words):
                continue  # to read all files that define __init__ takes a minute
            if path not in self._of_packages:
                self._of_packages[path] = _windows(self._packages[path])
            if len(wanted.keys() & self._of_packages[path].keys()) > least:
                return path
        return None

    def _same(self, function: Function, *, exact: bool) -> str | None:
        """Path of another file that has a function of the same qualified name with the same code; without `exact`, with
        most of the code. Docstrings and the names of parameters and other local variables don't count.
        """
        code = _code(function)
        wanted = _windows_of(code)
        words = {word.encode() for each in code if each[:1] != "<" for word in _WORD.findall(each)}
        for path, each in self._of_the_same_name(function, words):
            other = _code(each)
            common = (wanted & _windows_of(other)).total()
            if other == code or (not exact and common > MOST_CONTAINED * wanted.total()):
                return path
        return None

    def namesakes(self, function: Function) -> list[str]:
        """Texts, without decorators, of functions that have the same qualified name in other files: those of different
        code, the most similar ones first, at most MOST_NAMESAKES.
        """
        own, found = Counter(_code(function)), dict[tuple[str, ...], tuple[float, str, str]]()
        for path, each in self._of_the_same_name(function):
            code = _code(each)
            lines = each.source.data.split(b"\n")[each.node.lineno - 1 : each.last]
            similar = (own & Counter(code)).total() / max(own.total(), len(code))
            found.setdefault(tuple(code), (-similar, path, b"\n".join(lines).decode(errors="replace")))
        return [text for _, _, text in sorted(found.values())[:MOST_NAMESAKES]]

    def _of_the_same_name(self, function: Function, words: Collection[bytes] = ()) -> Iterator[tuple[str, Function]]:
        """Functions of the same qualified name in other files that contain most of `words`, each after its path."""
        files = [(path, self._tree[path]) for path in self._tree if path != function.source.path]
        files += [(path, self._packages[path]) for path in self._defining.get(function.node.name.encode(), [])]
        *classes, name = map(re.escape, function.qualname.encode().split(b"."))
        definition = re.compile(rb"^%s(async )?def %s\(" % (rb"[ \t]+" if classes else b"", name), re.MULTILINE)
        texts = [b"class " + each for each in classes]
        for path, data in files:
            if not path.endswith(".py") or not all(each in data for each in texts):
                continue
            if definition.search(data) is None or not _holds_most(data, words):
                continue
            for each in self._functions(path, data):
                if each.qualname == function.qualname:
                    yield path, each

    def _functions(self, path: str, data: bytes) -> list[Function]:
        if id(data) not in self._parsed:
            try:
                self._parsed[id(data)] = Source(path, data, parse_python(data)).functions
            except (SyntaxError, ValueError):
                self._parsed[id(data)] = []
        return self._parsed[id(data)]


def _holds_most(data: bytes, words: Collection[bytes]) -> bool:
    """Whether a file contains the share of the words that a copy would."""
    left = (1 - MOST_CONTAINED) * len(words)
    for each in words:
        if each not in data:
            left -= 1
            if left < 0:
                return False
    return True


def _code(function: Function) -> list[str]:
    """Node types and values of a function's syntax tree, with numbers in place of its local names."""
    names: dict[str, str] = {}
    nodes = [each for part in (function.node.args, *function.body) for each in ast.walk(part)]
    for each in nodes:
        if isinstance(each, ast.arg):
            names.setdefault(each.arg, str(len(names)))
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.setdefault(each.id, str(len(names)))
    said = []
    for each in nodes:
        fields = (value for _, value in ast.iter_fields(each) if isinstance(value, (str, bytes, int, float, complex)))
        local = names.get(each.arg if isinstance(each, ast.arg) else each.id if isinstance(each, ast.Name) else "")
        said += [f"<{type(each).__name__}>", *([local] if local is not None else map(str, fields))]
    return said


def _windows_of(words: Sequence[str]) -> Counter[int]:
    """How often each run of _WINDOW words stands there, by hash."""
    return Counter(hash(tuple(words[start : start + _WINDOW])) for start in range(len(words) - _WINDOW + 1))


def _windows(data: bytes) -> Counter[int]:
    """How often each run of _WINDOW tokens stands there, by hash; of words, where the text is not Python."""
    words: list[str] = []
    try:
        for token in tokenize.tokenize(io.BytesIO(data).readline):
            if token.type not in _LAYOUT and token.type != tokenize.ENCODING and token.string:
                words.append(token.string)
    except (SyntaxError, tokenize.TokenError, UnicodeDecodeError, ValueError):
        pass  # the tokens up to here count: a fragment, or another language
    return _windows_of(words)
