"""Decoys: versions of a hidden test file with other expectations, each of which contradicts the original.

    assert add(1, 2) == 3  ->  == 5          raises(ValueError)  ->  raises(KeyError)
    assert x in y          ->  x not in y    ("1, 2, 3") in a table of parameters  ->  ("1, 2, 5")
    assert f() == GOLDEN.read_text()  ->  the same, and another text in the hidden file
    assert f() == Point(1, 2)  ->  == Point(3, 2), and in another decoy != Point(1, 2), since an argument may not count

A solution that passes a test as written fails its decoy, since the two contradict each other; a state that passes both
depends on something else than the question. `curation.cheating` counts a passed decoy as cheating. All numbers of a
decoy move by the same distance, so that a guess of the answer's kind from readable numbers stays consistent.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random

from curation.tasks.checks.assertions import OPERATORS, OPPOSITES, Assertion, column, exception_names, find
from curation.tasks.checks.edits import Source
from curation.tasks.checks.mentions import mentioned
from curation.tasks.checks.observing import UNOPENED
from curation.tasks.checks.scopes import last
from curation.tasks.checks.values import Tolerance, Values, literal

MOST_DECOYS = 4
"""Maximum decoys per task: one that changes every assertion, and others that change one in each function."""
_FLIPS = {
    "==": "!=",
    "!=": "==",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
    "in": "not in",
    "not in": "in",
    "is": "is not",
    "is not": "is",
}
_COMMON = ("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "ZeroDivisionError")
_RARE = ("BufferError", "EOFError", "ReferenceError")
_MOVE = (
    "lambda found: not found if type(found) is bool else found + {distance} if type(found) in (int, float)"
    " else found + 'x' if type(found) is str else found"
)
"""Changes the return value of a helper."""
_CLASS, _METHOD = (
    re.compile(rf"(\w+\.)*([A-Z]\w*|date|datetime|time|timedelta){tail}") for tail in ("", r"(\.[a-z]\w*)?")
)
"""Names of classes, and also of their methods."""
_EQUALS = re.compile("(is|all)_?close|array_equal|equals?|(starts|ends)with|assertRegex|re\\.(match|search|fullmatch)")
"""Functions that say whether a value is the same as another, or like it."""
_ARRAYS = ("array", "asarray", "tensor", "Series")
Edits = dict[tuple[int, int], str]


def make(files: dict[str, bytes], seed: str, data: Mapping[str, bytes] | None = None) -> list[dict[str, bytes]]:
    """Up to MOST_DECOYS versions of these test files, deterministic by seed. Only Python files change, and in the first
    version those of `data`, other hidden files, that are nothing but expectations.

    The first version changes every assertion; the others the first, second, ... one of each function that has several.
    """
    sources = {path: source for path, content in files.items() if (source := _source(path, content)) is not None}
    found = _found(sources, data or {})
    most = max((len(each) for asserts in found.values() for each in by_function(asserts).values()), default=0)
    if most == 0:
        return []
    made = any(_other_made(source, each, 1) for path, source in sources.items() for each in found[path])
    rng = Random(f"decoys/{seed}")
    versions: list[dict[str, bytes]] = []
    for number in range(1 if most == 1 and not made else min(most + 1, MOST_DECOYS)):
        distance = rng.randint(1, 6)
        version = _other_files(files, sources, found, data or {}, distance) if number == 0 else {}
        others = version.keys()
        for path, source in sources.items():
            edits: Edits = {}
            for group in by_function(found[path]).values():
                chosen = group if number == 0 else group[number - 1 :: MOST_DECOYS - 1]
                for assertion in chosen:
                    if _reads(assertion) & others:
                        continue
                    other = _other_made(source, assertion, distance) if number == 0 else {}
                    edits |= other or _changed(source, assertion, distance, rng)
            changed = source.edited(edits)
            if changed != files[path] and _source(path, changed) is not None:
                version[path] = changed
        if version and version not in versions:
            versions.append(version)
    return versions


def _found(sources: Mapping[str, Source], data: Mapping[str, bytes]) -> dict[str, list[Assertion]]:
    return {path: find(source.tree, Values(source.tree, path, data)) for path, source in sources.items()}


def _reads(assertion: Assertion) -> set[str]:
    """Hidden files whose content an assertion expects."""
    return {read.path for part in assertion.reads for read in part}


def _other_files(
    files: Mapping[str, bytes],
    sources: Mapping[str, Source],
    found: Mapping[str, list[Assertion]],
    data: Mapping[str, bytes],
    distance: int,
) -> dict[str, bytes]:
    """Hidden files with other content, each of which is only read to be equal to a value, and is not with this one."""
    others = {}
    for path in {path for each in found.values() for assertion in each for path in _reads(assertion)}:
        with contextlib.suppress(UnicodeDecodeError):  # checks are stored as text
            others[path] = _other_text(data[path].decode(), distance).encode()
    if not others:
        return {}
    edited, bad = dict(files), set[str]()
    for path, changed in _found(sources, {**data, **others}).items():
        edits: Edits = {}
        for old, new in zip(found[path], changed, strict=True):
            for before, after, part in zip(old.expected, new.expected or old.expected, old.reads, strict=False):
                same = ast.literal_eval(before) == ast.literal_eval(after)
                if old.operator != "==" or old.tolerance is not None or same:
                    bad |= {read.path for read in part}
                if part:
                    edits[sources[path].span(before)] = "None"
                edits |= {sources[path].span(read.opened): UNOPENED for read in part if read.opened}
        edited[path] = sources[path].edited(edits)
    bad |= mentioned(edited, others)
    return {path: others[path] for path in sorted(others) if path not in bad}


def make_moved(files: dict[str, bytes], seed: str) -> dict[str, bytes]:
    """Test files whose helper functions return other values, deterministic by seed; empty without such functions.

    A state that asks a helper or fixture of the tests for the answer gets the one that the changed tests expect.
    """
    distance = Random(f"moved/{seed}").randint(1, 6)
    version = {}
    for path, content in files.items():
        source = _source(path, content)
        edits: Edits = {}
        for value in _returned(source.tree) if source else ():
            start, end = source.span(value) if source else (0, 0)
            edits |= {(start, start): "(" + _MOVE.format(distance=distance) + ")((", (end, end): "))"}
        changed = source.edited(edits) if source else content
        if edits and _source(path, changed) is not None:
            version[path] = changed
    return version


def _returned(tree: ast.Module) -> list[ast.expr]:
    """Return expressions of functions that are not tests."""
    return [
        node.value
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and not function.name.startswith("test")
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]


def by_function(assertions: Sequence[Assertion]) -> dict[int, list[Assertion]]:
    """Assertions by the line of their function."""
    groups: dict[int, list[Assertion]] = defaultdict(list)
    for each in assertions:
        groups[each.function.lineno].append(each)
    return groups


def _source(path: str, content: bytes) -> Source | None:
    if not path.endswith(".py"):
        return None
    try:
        return Source(content)
    except (SyntaxError, ValueError):
        return None


def _changed(source: Source, assertion: Assertion, distance: int, rng: Random) -> Edits:
    """Edits that make an assertion contradict its original; empty if none are known."""
    if assertion.exceptions is not None:
        return {source.span(assertion.exceptions): _other_exception(assertion.exceptions, rng)}
    if assertion.operator in ("==", "is") or assertion.form == "call":
        edits: Edits = {}
        for node in assertion.expected if not _reads(assertion) else ():
            edits |= _other_value(source, node, distance, assertion.tolerance)
        if edits or assertion.form == "call":
            return edits
    if isinstance(assertion.node, ast.Assert):
        return _flipped(source, assertion, assertion.node.test, distance)
    if isinstance(assertion.node, ast.Expr) and isinstance(assertion.node.value, ast.Call):
        function = assertion.node.value.func
        if isinstance(function, ast.Attribute) and function.attr in OPPOSITES:
            _, end = source.span(function)
            return {(end - len(function.attr.encode()), end): OPPOSITES[function.attr]}
    return {}


def _constructed(assertion: Assertion) -> ast.expr | None:
    """The side of a comparison that makes the expected object, such as `Point(1, 2)` or `[Date.parse("2024")]`, rather
    than what is tested: the one that calls classes where the other does not, or calls one of their methods.
    """
    if assertion.form != "compare" or assertion.operator != "==" or assertion.expected or assertion.tolerance:
        return None
    left, right = assertion.left, assertion.right
    if left is None or right is None:
        return None
    for names in (_CLASS, _METHOD):
        if _makes(left, names) != _makes(right, names):
            return left if _makes(left, names) else right
    return None


def _makes(node: ast.expr, names: re.Pattern[str]) -> bool:
    """Whether an expression is a call, or a list or the like with calls, and all its calls have such names."""
    if not isinstance(node, (ast.Call, ast.List, ast.Tuple, ast.Set, ast.Dict)):
        return False
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return bool(calls) and all(names.fullmatch(_dotted(each.func)) for each in calls)


def _dotted(node: ast.expr) -> str:
    """Name with its dots; empty for another expression."""
    if isinstance(node, ast.Attribute):
        above = _dotted(node.value)
        return f"{above}.{node.attr}" if above else ""
    return node.id if isinstance(node, ast.Name) else ""


def _other_made(source: Source, assertion: Assertion, distance: int) -> Edits:
    """Replace the first replaceable literal among the arguments of the expected object, or the literal that a condition
    expects; empty without one.
    """
    if (told := _told(assertion)) is not None:
        return _other_value(source, told, distance, (None, None))
    node = _constructed(assertion)
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call)) if node is not None else ()
    for part in (part for call in calls for part in (*call.args, *(each.value for each in call.keywords))):
        edits = _other_value(source, part, distance, None) if literal(part) else {}
        if edits:
            return edits
    return {}


def _told(assertion: Assertion) -> ast.expr | None:
    """The literal that a value must agree with to make a condition true: the second argument of `isclose`, the pattern
    of `re.match`, the last row of `all(f(x) == want for x, want in [(1, 2)])`.
    """
    match assertion.left:
        case _ if assertion.negated or assertion.form not in ("truth", "other"):
            return None
        case ast.Call(
            func=ast.Name(id="all"),
            args=[
                ast.GeneratorExp(
                    elt=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]),
                    generators=[ast.comprehension(target=target, iter=ast.List(elts=rows) | ast.Tuple(elts=rows))],
                )
            ],
        ):
            names = [each.id for each in (left, right) if isinstance(each, ast.Name)]
            return next((cells[-1] for name in names if (cells := column(target, name, rows))), None)
        case (
            ast.Call(func=ast.Attribute(value=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]), attr="all"))
            | ast.Call(
                func=ast.Attribute(attr="all"), args=[ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])]
            )
        ):
            given = [left, right]
        case ast.Call(func=called, args=[*given]) if len(given) <= 2 and (
            _EQUALS.fullmatch(last(called)) or _EQUALS.fullmatch(_dotted(called))
        ):
            pass
        case _:
            return None
    made = (each for each in given if isinstance(each, ast.Call) and last(each.func) in _ARRAYS)
    return next(
        (each for each in (*reversed(given), *(part for each in made for part in each.args)) if literal(each)), None
    )


def _flipped(source: Source, assertion: Assertion, test: ast.expr, distance: int) -> Edits:
    if assertion.form == "compare" and isinstance(test, ast.Compare):
        start, end, text = source.between(test.left, test.comparators[0])
        written = OPERATORS[type(test.ops[0])]
        pattern = re.escape(written).replace(r"\ ", r"\s+")
        return {(start, end): re.sub(pattern, _FLIPS[written], text, count=1)}
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for part in test.values:
            if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], (ast.Eq, ast.Is)):
                edits = (
                    _other_value(source, part.comparators[0], distance, None) if literal(part.comparators[0]) else {}
                )
                if edits:
                    return edits
    start, end = source.span(test)
    return {(start, start): "not (", (end, end): ")"}


def _other_value(source: Source, node: ast.expr, distance: int, tolerance: Tolerance | None) -> Edits:
    """Replace the first replaceable part of a literal by another value of its type, further away than twice the
    absolute tolerance.
    """
    room = 2 * min(tolerance[1] or 0, 1e9) if tolerance else 0
    distance += math.ceil(room) if room >= distance else 0
    for part in _leaves(node):
        if isinstance(part, ast.Constant) and part.value is not None:
            other = _other_constant(part.value, distance, tolerance is not None)
            if other is not None:
                return {source.span(part): other}
    return {}


def _leaves(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [leaf for each in node.elts for leaf in _leaves(each)]
    if isinstance(node, ast.Dict):
        return [leaf for each in [*node.values, *filter(None, node.keys)] for leaf in _leaves(each)]
    if isinstance(node, ast.UnaryOp):
        return _leaves(node.operand)
    if isinstance(node, ast.BinOp):
        return _leaves(node.right)
    return [node]


def _other_constant(value: object, distance: int, near: bool) -> str | None:
    if isinstance(value, bool):
        return repr(not value)
    if isinstance(value, int):
        other = value * 2 + distance if near else value + distance
        return repr(other) if literal(ast.Constant(other)) else None
    if isinstance(value, float):
        return repr(value * 2 + distance) if value == value and abs(value) != float("inf") else "1.0"
    if isinstance(value, complex):
        return repr(value + distance)
    if isinstance(value, str):
        return repr(_other_text(value, distance))
    if isinstance(value, bytes):
        return repr(_other_text(value.decode("latin-1"), distance).encode("latin-1"))
    return None


def _other_text(text: str, distance: int) -> str:
    """Text with its last letter or digit changed; with one more character if it has none."""
    for index in range(len(text) - 1, -1, -1):
        for first, count in (("a", 26), ("A", 26), ("0", 10)):
            place = ord(text[index]) - ord(first)
            if 0 <= place < count:
                return text[:index] + chr(ord(first) + (place + distance) % count) + text[index + 1 :]
    return text + "x"


def _other_exception(node: ast.expr, rng: Random) -> str:
    """Builtin exception that is neither a base nor a subclass of the named ones; a rare one if the task defines
    them.
    """
    names = exception_names(node)
    if names is None:
        return rng.choice(_RARE)
    given = [getattr(builtins, name) for name in names]
    free = [
        name
        for name in _COMMON
        if not any(
            issubclass(getattr(builtins, name), each) or issubclass(each, getattr(builtins, name)) for each in given
        )
    ]
    return rng.choice(free or list(_RARE))
